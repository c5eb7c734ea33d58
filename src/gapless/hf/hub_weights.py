"""The weights of a Hugging Face model, under the names of the model, wherever transformers has them from.

as they are       one tensor of a file
under others      models were renamed since they were saved
in other pieces   experts that were saved one by one are one tensor now, and the like
not at all        a new head: initialised as the model does it, each module with a seed of its own
"""

import copy
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import conversion_mapping, core_model_loading

from gapless.errors import CheckpointError, ConfigError, first_of, printable
from gapless.model.materialise import alone
from gapless.model.shards import FILE, INDEX, Shards
from gapless.units import show_count

# What PEFT puts into the names of a model.
_ADAPTED = re.compile(r"^base_model\.model\.|\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
_SHOWN = 4


class HubWeights(Mapping[str, Tensor]):
    """Read when they are asked for, and theirs who asks. All names and shapes are compared at once."""

    is_fresh = True

    def __init__(self, model: Any, folder: Path, seed: int) -> None:
        self._model, self._seed = model, seed
        state = model.state_dict(keep_vars=True)
        self._names = {name: tensor.shape for name, tensor in state.items()}
        twins: dict[int, list[str]] = {}  # names of one tensor
        self._twins = {name: twins.setdefault(id(tensor), []) for name, tensor in state.items()}
        for name, those in self._twins.items():
            those.append(name)
        self._converters: dict[str, Any] = {}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}  # by the first name that comes of them
        self._first: dict[str, str] = {}
        self._made: dict[str, Tensor] = {}  # of conversions that make several at once
        self.open(folder)

    def open(self, folder: Path) -> None:
        """Those of another folder from now on, such as a checkpoint's."""
        stored = any((folder / name).is_file() for name in (FILE, INDEX))
        self._shards: Shards | dict[str, Tensor] = Shards(folder) if stored else {}
        mapping = conversion_mapping.get_model_conversion_mapping(self._model)
        renamings = [each for each in mapping if isinstance(each, core_model_loading.WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, core_model_loading.WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._sources, self._first, self._made = {}, {}, {}
        self._find(renamings, converters)
        if stored:
            self._check(folder)
        with torch.no_grad():  # what is no parameter has memory in every process
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                if not tensor.is_meta and not isinstance(tensor, torch.nn.Parameter) and name in self._first:
                    tensor.copy_(self[name])

    def __getitem__(self, name: str) -> Tensor:
        asked, name = name, self._stored_as(_ADAPTED.sub("", name))
        if name in self._made:
            return self._made.pop(name)
        if (first := self._first.get(name)) is not None:
            return self._read(name, first)
        if name in self._names:
            return self._initialised(name)
        if _ADAPTED.match(asked):
            raise ConfigError(
                f"{asked} is an adapter that PEFT has left without values: pass peft_config= to gapless.hf.empty_model "
                "in place of calling get_peft_model, and an initialisation that does not need the weights"
            )
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _stored_as(self, name: str) -> str:
        """One of the names of a tied weight that the files have, or this one."""
        return next((each for each in self._twins.get(name, ()) if each in self._first), name)

    def _find(self, renamings: Any, converters: Any) -> None:
        """Which tensors of the files each weight of the model comes from; those that come from none are left out."""
        prefix = self._model.base_model_prefix
        for key in sorted(self._shards, key=core_model_loading.dot_natural_key):
            name, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, self._names)
            if name not in self._names and key in self._names:
                name, pattern = core_model_loading.rename_source_key(key, [], [], prefix, self._names)
            self._sources.setdefault(name, []).append((key, pattern))
            self._first[name] = name
            patterns = self._converters[pattern].target_patterns if pattern is not None else []
            for other in patterns[1:]:
                self._first[name.replace(patterns[0], other)] = name

    def _check(self, folder: Path) -> None:
        assert isinstance(self._shards, Shards)
        wrong = [
            f"{name} ({tuple(shape)} there, {tuple(self._names[name])} in the model)"
            for name, ((key, pattern), *_) in self._sources.items()
            if name in self._names
            and pattern is None
            and (shape := self._shards.stored[key].shape) != self._names[name]
        ]
        if wrong:
            raise CheckpointError(
                f"{printable(folder)} is for another model: {show_count(len(wrong), 'tensor')} of another shape, "
                f"{_some(wrong)}"
            )
        missing = [name for name in self._names if self._stored_as(name) not in self._first]
        unexpected = [name for name in self._first if name not in self._names]
        for names, words, ignored in (
            (missing, "are missing, and are initialised anew", "_keys_to_ignore_on_load_missing"),
            (unexpected, "are not in the model, and are not used", "_keys_to_ignore_on_load_unexpected"),
        ):
            told = _without(names, getattr(self._model, ignored, None))
            if told and len(told) == len(self._names) > 1:
                raise CheckpointError(f"{printable(folder)} has weights of another model, such as {unexpected[0]}")
            if told:
                count = show_count(len(told), "weight")
                warnings.warn(f"{printable(folder)}: {count} {words}: {_some(told)}", stacklevel=5)

    def _read(self, name: str, first: str) -> Tensor:
        sources, pattern = self._sources[first], self._sources[first][0][1]
        if pattern is None:
            return self._shards[sources[0][0]]
        converter = copy.deepcopy(self._converters[pattern])
        for key, its in sources:
            converter.add_tensor(first, key, its, self._shards[key])
        made = converter.convert(first, model=self._model, config=self._model.config)
        self._made |= {key: each[0] if isinstance(each, list) else each for key, each in made.items()}
        if name not in self._made:
            raise CheckpointError(f"{name} can't be made from {_some([key for key, _ in sources])}")
        return self._made.pop(name)

    def _initialised(self, name: str) -> Tensor:
        """As the model starts it."""
        path, _, own = name.rpartition(".")
        module = self._model.get_submodule(path)
        made = alone(module)
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.default_generator.manual_seed(self._seed ^ zlib.crc32(path.encode()))
            self._model._init_weights(made)
        found: Tensor = getattr(made, own)
        return found.detach()


def _without(names: Iterable[str], patterns: Any) -> list[str]:
    ignored = [re.compile(each) for each in patterns or ()]
    return [name for name in names if not any(each.search(name) for each in ignored)]


def _some(names: list[str]) -> str:
    return first_of([*map(printable, names)], _SHOWN)
