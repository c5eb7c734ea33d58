"""Batches to train on, in an order that the seed decides and that can be taken up anywhere.

    pass 0   a permutation of all windows, drawn with the seed          pass 1   another one, with the next seed
    batch 0  the first `minibatch` of them; batch 1 the next ...        what is left over is left out

The position is the pass and the batch in it, and how many windows there are, since among others it would be another.
Every rank of a pipeline gets the same batch, every replica its share: the samples of a batch are cut in as many parts
as there are replicas, so the order does not depend on them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.guards.batches_and_losses import RESUMED_DATA
from gapless.stage.batch import microbatch as mb
from gapless.train.config import user_code as own
from gapless.train.config.config import Config
from gapless.train.config.keys import Part
from gapless.train.data.sources import Corpus
from gapless.units import show_count

Batch = tuple[Any, Any]  # inputs and target, as `Pipeline.step` takes them
Position = Mapping[str, int]


class Feed(ABC):
    """Batches, and where in them the next one is. `share`: which replica this is, and of how many."""

    def __init__(self, config: Config, share: tuple[int, int]) -> None:
        self._config, self._share = config, share
        self._pass = self._batch = 0
        self.samples = config.data.minibatch  # in the batch that came last, with those of other replicas

    def __iter__(self) -> "Feed":
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """This replica's samples."""

    @abstractmethod
    def peek(self) -> Batch:
        """The samples of all replicas that come next."""

    @property
    def position(self) -> dict[str, int]:
        """Of the batch that comes next."""
        return {"pass": self._pass, "batch": self._batch}

    def seek(self, position: Position) -> None:
        """The next batch is the one that was next there."""
        self._pass, self._batch = position["pass"], position["batch"]

    def _check_passes(self) -> None:
        most = self._config.data.passes
        if most is not None and self._pass >= most:
            raise StopIteration


class WindowFeed(Feed):
    """Windows of a corpus. `span` are the first and the last of them that are used, as shares of all.

    vocab     the first number that is no token of the model
    """

    def __init__(
        self, corpus: Corpus, config: Config, share: tuple[int, int], span: tuple[float, float], vocab: int | None
    ) -> None:
        super().__init__(config, share)
        self._corpus, self._vocab, self._minibatch = corpus, vocab, config.data.minibatch
        self._ends = list(accumulate(corpus.windows)) or [0]
        total = self._ends[-1]
        self._first = round(span[0] * total)
        self._count = round(span[1] * total) - self._first
        if self._count < self._minibatch:
            raise ConfigError(
                f"data: {corpus.name} has {show_count(self._count, 'window')} of {corpus.context:,} tokens"
                f"{'' if span == (0.0, 1.0) else ' here'}, but a minibatch has {self._minibatch:,}: use more data, "
                "or a smaller minibatch or context"
            )
        self._order: tuple[int, Tensor] = -1, torch.empty(0)

    @property
    def position(self) -> dict[str, int]:
        return {**super().position, "windows": self._count}

    def seek(self, position: Position) -> None:
        if (before := position.get("windows", self._count)) != self._count:
            raise RESUMED_DATA.refusal(
                f"data: {self._corpus.name} had {before:,} windows to train on when the run was saved, and has "
                f"{self._count:,} now",
                f"{RESUMED_DATA.way_out}, with the same part held out for evaluation",
            )
        super().seek(position)

    def peek(self) -> Batch:
        return self._pair(self._windows(self._chosen()))

    def __next__(self) -> Batch:
        rank, ranks = self._share
        found = self._pair(self._windows(self._chosen().tensor_split(ranks)[rank]))
        self._batch += 1
        return found

    def _chosen(self) -> Tensor:
        """The windows of the batch that comes next."""
        if self._batch == self._count // self._minibatch:
            self._pass, self._batch = self._pass + 1, 0
        self._check_passes()
        if self._order[0] != self._pass:
            drawn = torch.Generator().manual_seed(self._config.train.seed + self._pass)
            self._order = self._pass, torch.randperm(self._count, generator=drawn)
        first = self._batch * self._minibatch
        return self._order[1][first : first + self._minibatch]

    def _windows(self, chosen: Tensor) -> Tensor:
        numbers = chosen + self._first
        pieces = torch.bucketize(numbers, torch.tensor(self._ends), right=True)
        starts = torch.tensor([0, *self._ends])[pieces]
        found = torch.empty(len(chosen), self._corpus.context + 1, dtype=torch.long)
        for piece in pieces.unique().tolist():
            here = pieces == piece
            found[here] = self._corpus.rows(piece, (numbers - starts)[here] * self._corpus.context)
        if self._vocab is not None and len(chosen) and (largest := int(found.max())) >= self._vocab:
            raise ConfigError(
                f"data: {self._corpus.name} has the token {largest:,}, but the model knows {self._vocab:,} tokens: "
                "make its vocabulary larger, or use the tokenizer it was made for"
            )
        return found

    def _pair(self, windows: Tensor) -> Batch:
        if self._config.model.name == "huggingface":  # such models take the labels themselves
            ids = windows[:, :-1].contiguous()
            return {"input_ids": ids, "labels": ids.clone()}, None
        return windows[:, :-1], windows[:, 1:]


class FunctionFeed(Feed):
    """What a function of the user's gives: where a pass over the data ends, it is called again, with the seed of the
    next pass.
    """

    def __init__(self, part: Part, config: Config, files: own.Files, share: tuple[int, int]) -> None:
        super().__init__(config, share)
        self._part, self._function = part, own.load(part, config, files)
        self._batches: Iterator[Batch] | None = None
        self._peeked: Batch | None = None
        self._checked = False

    def seek(self, position: Position) -> None:
        """What was there before is gone through again, unless the function takes `skip`."""
        super().seek(position)
        self._batches = self._peeked = None

    def peek(self) -> Batch:
        if self._peeked is None:
            self._peeked = self._taken()
        return self._peeked

    def __next__(self) -> Batch:
        batch, self._peeked = self.peek(), None
        self._batch += 1
        self.samples = mb.batch_size(batch[0])
        rank, ranks = self._share
        return batch if ranks == 1 else share_of(batch, rank, ranks)

    def _taken(self) -> Batch:
        while True:
            self._check_passes()
            if self._batches is None:
                self._batches = self._begun()
            batch = next(self._batches, None)
            if batch is not None:
                break
            if self._batch == 0:
                raise ConfigError(f"{self._part.key}: {self._part.name} gave no batch in pass {self._pass + 1}")
            self._pass, self._batch, self._batches = self._pass + 1, 0, None
        asked = self._config.data.minibatch
        if not self._checked and (size := mb.batch_size(batch[0])) != asked:
            raise ConfigError(f"data.minibatch is {asked}, but the first batch of {self._part.name} has {size} samples")
        self._checked = True
        return batch

    def _begun(self) -> Iterator[Batch]:
        """The batches of this pass, from the one that is next."""
        config, done = self._config, self._batch
        offered = {"minibatch": config.data.minibatch, "seed": config.train.seed + self._pass, "skip": done}
        skips = done > 0 and "skip" in own.fitting(self._function, self._part, **offered)
        found = self._each(own.call(self._function, self._part, config, **offered), done if skips else 0)
        for number in range(0 if skips else done):
            if next(found, None) is None:
                raise RESUMED_DATA.refusal(
                    f"{self._part.key}: {self._part.name} gave {done:,} batches in pass {self._pass + 1} before, but "
                    f"only {number:,} now"
                )
        return found

    def _each(self, found: Any, done: int) -> Iterator[Batch]:
        key, name = self._part.key, self._part.name
        try:
            with own.importable(self._config):
                iterator = iter(found)
        except TypeError:
            raise ConfigError(
                f"{key}: {name} returned {_shown(found)}, but it must return an iterable of batches (inputs, target)"
            ) from None
        number = done
        while True:
            number += 1
            with own.importable(self._config), own.told(f"{key}: batch {number} of {name}"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ConfigError(
                    f"{key}: batch {number} of {name} is {_shown(batch)}, but it must be a pair (inputs, target)"
                )
            _check_target(self._config, f"{key}: batch {number} of {name}", *batch)
            yield batch[0], batch[1]


def make_feeds(
    config: Config, files: own.Files, *, share: tuple[int, int] = (0, 1), vocab: int | None = None
) -> tuple[Feed, Feed | None]:
    """What is trained on, and what is evaluated on: other data, or what is held out at the end of it."""

    def made(part: Part, corpus: Corpus | None, *span: float) -> Feed:
        if corpus is None:
            return FunctionFeed(part, config, files, share)
        return WindowFeed(corpus, config, share, (span[0], span[1]), vocab)

    evaluated, other = config.evaluate.every is not None, config.validation
    trained = 1.0 - (config.evaluate.held_out if evaluated and other is None else 0.0)
    corpus = _corpus_of(config.data, config, files)
    feed = made(config.data, corpus, 0.0, trained)
    if not evaluated:
        return feed, None
    if other is None:
        return feed, made(config.data, corpus, trained, 1.0)
    return feed, made(other, _corpus_of(other, config, files), 0.0, 1.0)


def _corpus_of(part: Part, config: Config, files: own.Files) -> Corpus | None:
    """What windows are cut from; None for a function of the user's."""
    if part.is_own:
        return None
    offered = {"tokenizer": config.data.tokenizer, "folder": config.folder}
    corpus = own.call(own.load(part, config, files), part, config, **offered)
    assert isinstance(corpus, Corpus)
    return corpus


def share_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """A replica's share of the samples."""
    inputs, target = (None if each is None else mb.split(each, ranks)[rank] for each in batch)
    return inputs, target


def _check_target(config: Config, batch: str, inputs: Any, target: Any) -> None:
    """A loss that we know takes one target for each sample; of one's own nothing can be said."""
    if config.loss is None or config.loss.is_own:
        return
    if target is None:
        raise ConfigError(f"{batch} has the target None, but the loss {config.loss.name} needs one")
    size = mb.batch_size(inputs)
    found = [tensor.size(0) for tensor in mb.flatten(target)[0] if tensor.dim()]
    if found and size not in found:
        raise ConfigError(
            f"{batch} has {size} samples in its inputs and {found[0]} in its target: the first dimension counts them"
        )


def with_shape(batch: Batch) -> str:
    """To tell of a batch with which something failed."""
    inputs, target = batch
    shown = f" with inputs that are {_shown(inputs)}"
    return shown if target is None else f"{shown} and a target that is {_shown(target)}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.40}"
