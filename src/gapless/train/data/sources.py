"""Where tokens come from: real text that every machine has, text files, records, or token files.

Each source becomes a `Corpus`, from which `data` cuts windows. Files are looked for beside the config.
"""

import csv
import gzip
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ConfigError, optional
from gapless.train.host_memory import refuse_above
from gapless.units import show_bytes

BYTES = "bytes"
_TEXT = 4_000_000  # bytes of the standard library
_WIDTHS = {"uint8": torch.uint8, "uint16": torch.int16, "int16": torch.int16, "int32": torch.int32}
_WIDTHS |= {"uint32": torch.int32, "int64": torch.int64}
_MASKS = {"uint16": 0xFFFF, "uint32": 0xFFFFFFFF}  # torch has no arithmetic of its own for these
_RECORDS = (".jsonl", ".json", ".jsonl.gz", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Corpus:
    """Token numbers in pieces, each of which windows of `context` tokens and one more are cut from."""

    name: str
    pieces: Sequence[Tensor]
    context: int
    mask: int | None = None

    def __post_init__(self) -> None:
        context, most = self.context, max(map(len, self.pieces), default=0)
        if type(context) is not int or not 0 < context < max(2, most):
            raise ConfigError(
                f"data.arguments: context is {context!r:.40}, but it must be a whole number from 1 to "
                f"{max(1, most - 1):,}, which is how many tokens there are, less one"
            )

    @property
    def windows(self) -> Sequence[int]:
        """How many each piece has: they follow each other, and the last token of one is the first of the next."""
        return [max(0, (len(piece) - 1) // self.context) for piece in self.pieces]

    def rows(self, piece: int, starts: Tensor) -> Tensor:
        """Windows of one piece, by the tokens they begin with."""
        found = self.pieces[piece][starts[:, None] + torch.arange(self.context + 1)].long()
        return found if self.mask is None else found & self.mask


def python_source(tokenizer: str, folder: Path, context: int = 64) -> Corpus:
    """The source of Python's standard library."""
    piece = standard_library()
    if tokenizer != BYTES:
        piece = _encoded([bytes(piece.numpy(force=True)).decode("utf-8", "replace")], tokenizer, folder)
    return Corpus("python-source", [piece], context)


def text(tokenizer: str, folder: Path, files: Any = None, context: int = 64, pattern: str = "*.txt") -> Corpus:
    """Text files, one after the other; of a folder all that fit the pattern."""
    found = _found("text", files, folder, pattern)
    _check_room(found)
    if tokenizer == BYTES:
        return Corpus("text", _joined(file.read_bytes() for file in found), context)
    return Corpus("text", [_encoded(map(_text_of, found), tokenizer, folder)], context)


def records(
    tokenizer: str, folder: Path, files: Any = None, context: int = 64, pattern: str = "*.jsonl", field: str = "text"
) -> Corpus:
    """One field of the records of JSON Lines, JSON, CSV or Parquet files, as `datasets` writes them."""
    found = _found("records", files, folder, pattern)
    _check_room(found)
    texts = (each + "\n" for file in found for each in _field_of(file, field))
    if tokenizer == BYTES:
        return Corpus("records", _joined(each.encode("utf-8", "replace") for each in texts), context)
    return Corpus("records", [_encoded(texts, tokenizer, folder)], context)


def tokens(folder: Path, files: Any = None, context: int = 64, pattern: str = "*.bin", dtype: str = "uint16") -> Corpus:
    """Token numbers as they stand in memory, in files that are mapped and not read: raw ones, or .npy."""
    if dtype not in _WIDTHS:
        raise ConfigError(f"data.arguments: dtype is {dtype!r:.40}, but it must be {', '.join(_WIDTHS)}")
    found = _found("tokens", files, folder, pattern)
    pieces, kinds = [], dict[str, Path]()
    for file in found:
        kind = dtype
        if file.suffix == ".npy":
            piece, kind = _mapped_array(file)
        else:
            width = _WIDTHS[dtype].itemsize
            size = file.stat().st_size
            if size % width:
                raise ConfigError(f"data: {file} has {size:,} bytes, which are no whole number of {dtype} tokens")
            piece = torch.from_file(str(file), shared=False, size=size // width, dtype=_WIDTHS[dtype])
        pieces.append(piece)
        kinds.setdefault(kind, file)
    if len(kinds) > 1:
        there = " and ".join(f"{kind} in {file}" for kind, file in kinds.items())
        raise ConfigError(f"data: the tokens are {there}: write all files with one of these")
    return Corpus("tokens", pieces, context, _MASKS.get(next(iter(kinds))))


def standard_library() -> Tensor:
    """The source of Python's standard library, as bytes, file after file."""
    found = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += file.read_bytes()
        if len(found) > _TEXT:
            break
    if not found:
        raise ConfigError(f"there is no Python source in {sysconfig.get_paths()['stdlib']}: give data of your own")
    return torch.frombuffer(found, dtype=torch.uint8)


def _joined(parts: Iterable[bytes]) -> list[Tensor]:
    """All of them as one piece; none where they are empty."""
    whole = bytearray()
    for part in parts:
        whole += part
    return [torch.frombuffer(whole, dtype=torch.uint8)] if whole else []


# -- files ------------------------------------------------------------------------------------------------------------


def _found(name: str, files: Any, folder: Path, pattern: str) -> list[Path]:
    asked = [files] if isinstance(files, str) else files
    if not isinstance(asked, list) or not asked or not all(isinstance(each, str) for each in asked):
        raise ConfigError(
            f"data.arguments: {name} needs files, a file, a folder, a pattern or a list of these, as files = 'a.txt'"
        )
    found: list[Path] = []
    for each in asked:
        path = folder / each
        if path.is_dir():
            there = sorted(file for file in path.rglob(pattern) if file.is_file())
            if not there:
                raise ConfigError(f"data: the folder {path} has no {pattern}: set pattern, as pattern = '*.md'")
            found += there
        elif path.is_file():
            found.append(path)
        else:
            there = sorted(file for file in path.parent.glob(path.name) if file.is_file()) if "*" in path.name else []
            if not there:
                raise ConfigError(f"data: there is no file {path}: paths are taken from the folder of the config")
            found += there
    return found


def _check_room(files: Sequence[Path]) -> None:
    size = sum(file.stat().st_size for file in files)
    way_out = "write them as token files, which are not read but mapped, and use the data 'tokens'"
    refuse_above(size, f"data: the files have {show_bytes(size)}", way_out)


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {file} is not UTF-8 at byte {error.start:,}: convert it, or leave it out") from None


def _field_of(file: Path, field: str) -> Iterator[str]:
    """The texts of one field, record by record."""
    for number, record in enumerate(_records_of(file), start=1):
        value = record.get(field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                f"data: record {number} of {file} has no text in {field!r}, but {keys[:100]}: set field in "
                "data.arguments"
            )
        yield value


def _records_of(file: Path) -> Iterator[Any]:
    name = file.name.lower()
    if name.endswith(".parquet"):
        yield from _rows_of_parquet(file)
    elif name.endswith((".csv", ".tsv")):
        with file.open(encoding="utf-8", newline="") as rows:
            yield from csv.DictReader(rows, delimiter="\t" if name.endswith(".tsv") else ",")
    elif name.endswith(".json"):
        whole = _parsed(file, 1, _text_of(file))
        yield from whole if isinstance(whole, list) else [whole]
    elif name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") if name.endswith(".gz") else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parsed(file, number, line)
    else:
        raise ConfigError(
            f"data: {file} is none of {', '.join(_RECORDS)}: convert it, or read it in a function of your own"
        )


def _parsed(file: Path, number: int, words: str) -> Any:
    try:
        return json.loads(words)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"data: line {number} of {file} is not JSON: {str(error)[:100]}") from None


def _rows_of_parquet(file: Path) -> Iterator[Any]:
    missing = f"data: {file} is Parquet, which pyarrow reads: pip install pyarrow, or write JSON Lines"
    parquet = optional("pyarrow.parquet", missing)
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: {file} can't be read as Parquet: {str(error)[:200]}") from None


def _mapped_array(file: Path) -> tuple[Tensor, str]:
    numpy = optional("numpy", f"data: {file} is read with NumPy: pip install numpy, or write the tokens raw, as .bin")
    try:
        array = numpy.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: {file} can't be read as an array: {str(error)[:200]}") from None
    dtype = str(array.dtype)
    if array.ndim != 1 or dtype not in _WIDTHS:
        raise ConfigError(
            f"data: {file} has {array.ndim} dimensions of {dtype}, but tokens are one dimension of {', '.join(_WIDTHS)}"
        )
    size, offset = array.shape[0], array.offset
    width = _WIDTHS[dtype].itemsize
    whole = torch.from_file(str(file), shared=False, size=offset // width + size, dtype=_WIDTHS[dtype])
    return whole[offset // width :], dtype


# -- tokenizers -------------------------------------------------------------------------------------------------------


def _tokenizer(name: str, folder: Path) -> Any:
    file = folder / name
    if not file.is_file():
        raise ConfigError(
            f"data.tokenizer is {name!r}, but there is no file {file}: it is 'bytes', or a tokenizer.json"
        )
    missing = f"data.tokenizer is {name!r}, which the package tokenizers reads: pip install tokenizers"
    tokenizers = optional("tokenizers", missing)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # it raises Exception itself
        raise ConfigError(f"data.tokenizer: {file} can't be read: {str(error)[:200]}") from None


def _encoded(texts: Any, name: str, folder: Path) -> Tensor:
    tokenizer = _tokenizer(name, folder)
    return torch.cat([torch.tensor(tokenizer.encode(each).ids, dtype=torch.int32) for each in texts])
