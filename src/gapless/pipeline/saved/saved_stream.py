"""A stream as checkpoints have it: the model, and what every stage has beside it, under the names of parameters."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from gapless.checkpoint.contents import Contents
from gapless.checkpoint.saveable import Opened, Saveable
from gapless.checkpoint.tree import Json
from gapless.errors import ConfigError
from gapless.pipeline.saved.saved_model import SavedModel
from gapless.run.streams.stream import Stream
from gapless.run.world import Gathering


class SavedStream(Saveable):
    """Of a stream that is drained."""

    def __init__(self, model: SavedModel, stream: Stream) -> None:
        self._model, self._stream, self._versions = model, stream, True

    @property
    def steps(self) -> int:
        return self._stream.minibatches

    def gathered(self, doing: str) -> AbstractContextManager[Gathering]:
        return self._model.world.gathered(doing)

    def load(self, folder: str | Path, *, optimizer: Any = None, scheduler: Any = None, versions: bool = True) -> Any:
        """Without `versions` it starts anew from the newest weights."""
        self._versions = versions
        return super().load(folder, optimizer=optimizer, scheduler=scheduler)

    def contents(self, gathering: Gathering, *, optimizer: Any, scheduler: Any, extra: Any) -> Contents:
        _refuse(optimizer, scheduler)
        made = self._model.contents("stream", self.steps, gathering)
        made.add("stream", self._stream.state_dict(whole=False))
        (made.add if self._model.world.one_process else made.add_same)("extra", extra)
        return made

    def taking(self, opened: Opened, gathering: Gathering, *, optimizer: Any, scheduler: Any) -> Callable[[], Any]:
        _refuse(optimizer, scheduler)
        take_model = self._model.taking(opened, "stream", gathering)
        state, extra = opened.decoded(self._needed(opened.tree("stream"))), opened.value("extra")
        self._stream.loading(state, versions=self._versions)

        def put_in_place() -> Any:
            take_model()
            self._stream.reloaded()
            self._stream.load_state_dict(state, versions=self._versions)
            return extra

        return put_in_place

    def _needed(self, tree: Json) -> Json:
        """Without the tensors of parameters that are elsewhere. The hashes of weights are left out too: those in the
        manifest say more.
        """
        own = {name for parameter, name in self._model.names().items() if self._model.holds(parameter)}
        stages = {}
        for number, stage in tree["stages"].items():
            made = {**stage, "weights": [""] * len(stage["parameters"])}
            if "optimizer" in stage:
                made["optimizer"] = {**stage["optimizer"], "state": _of(stage["optimizer"]["state"], own)}
            if "versions" in stage:
                made["versions"] = {version: _of(each, own) for version, each in stage["versions"].items()}
            stages[number] = made
        return {**tree, "stages": stages}


def _of(tree: Mapping[str, Json], names: set[str]) -> dict[str, Json]:
    return {name: each for name, each in tree.items() if name in names}


def _refuse(optimizer: Any, scheduler: Any) -> None:
    if optimizer is not None or scheduler is not None:
        raise ConfigError("a stream has its own optimizers and schedulers, and saves them: leave yours out")
