"""What checkpoints of pipelines and of streams have in common: the model, the loss where it learns, and random numbers;
as they are written, and as they come back.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from gapless.checkpoint.contents import Contents
from gapless.checkpoint.random_state import random_state, set_random_state
from gapless.checkpoint.saveable import Opened
from gapless.errors import CheckpointError, first_of, printable
from gapless.guards.batches_and_losses import RESUMED_DATA
from gapless.model.shards import DTYPES
from gapless.pipeline.options import Options
from gapless.pipeline.staged_model import StagedModel
from gapless.run.world import Gathering, World

_MOST_SHOWN = 4


class SavedModel(NamedTuple):
    """The model of a pipeline, with what is needed to find its parts."""

    world: World
    staged: StagedModel
    options: Options

    @property
    def loss(self) -> nn.Module | None:
        """Where it has a state. The last stage trains it, and the others have copies."""
        loss = self.options.loss
        return loss if isinstance(loss, nn.Module) and loss.state_dict() else None

    def names(self) -> dict[nn.Parameter, str]:
        """Of all parameters that an optimizer may have."""
        loss = self.options.loss
        of_loss = loss.named_parameters() if isinstance(loss, nn.Module) else ()
        found = {each: f"loss: {name}" for name, each in of_loss}
        return {**found, **{each: name for name, each in self.staged.module.named_parameters()}}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this process trains it."""
        return (self.has_copy(parameter) and self.staged.has_last) or self.staged.holds(parameter)

    def has_copy(self, parameter: nn.Parameter) -> bool:
        """Whether it is the loss's, of which every process has a copy."""
        loss = self.options.loss
        return isinstance(loss, nn.Module) and any(each is parameter for each in loss.parameters())

    def contents(self, kind: str, step: int, gathering: Gathering) -> Contents:
        """Of this process, for others to add to. Everything in `facts` is the same on all ranks."""
        schedule = self.staged.schedule
        made = Contents(
            {
                "kind": kind,
                "step": step,
                "seed": self.options.seed,
                "schedule": schedule.name or "",
                "devices": len(self.world.devices),
                "stages": schedule.num_stages,
                "replicas": self.world.num_replicas,
                "microbatches": self.options.microbatches,
            }
        )
        state = self.world.state(self.staged.module, whole=False)
        made.add("model", state, _untrained(self.staged.module, state))
        if self.loss is not None and self.staged.has_last:
            made.add("loss", self.loss.state_dict(), _untrained(self.loss, self.loss.state_dict()))
        if (config := _config(self.staged.module)) is not None:
            made.add("config", config)
        made.add("random", {str(gathering.place): random_state()})
        return made

    def taking(self, opened: Opened, kind: str, gathering: Gathering) -> Callable[[], None]:
        """Checks that it is of this model, and reads what this process needs; what is returned puts it in place."""
        facts = opened.manifest.facts
        if facts["kind"] != kind:
            way = "stream.load" if facts["kind"] == "stream" else "pipe.load"
            raise CheckpointError(f"{opened.shown} was saved by a {facts['kind']}, not by a {kind}: load it with {way}")
        if facts["seed"] != self.options.seed:
            raise RESUMED_DATA.refusal(
                f"{opened.shown} was trained with seed={facts['seed']}, and this pipeline has "
                f"seed={self.options.seed}, so its random numbers would differ",
                f"make it with seed={facts['seed']}",
                CheckpointError,
            )
        module, loss = self.staged.module, self.loss
        state = _read(opened, "model", module.state_dict(keep_vars=True), self.world.state(module, whole=False))
        of_loss: Mapping[str, Any] = {}
        if loss is not None:
            known = loss.state_dict(keep_vars=True)
            of_loss = _read(opened, "loss", known, known)
        elif opened.tree("loss"):
            raise CheckpointError(
                f"{opened.shown} has a loss with weights of its own, and the loss of this pipeline has none: pass "
                "loss= as it was"
            )
        random = self._random(opened, gathering)

        def put_in_place() -> None:
            self.world.load(module, state, strict=True)
            if loss is not None:
                loss.load_state_dict(of_loss)
            set_random_state(random)

        return put_in_place

    def _random(self, opened: Opened, gathering: Gathering) -> Any:
        """This rank's, or where there were others, that of the first rank of its replica."""
        saved, count = opened.tree("random"), opened.manifest.facts["processes"]
        if count == len(gathering.ranks):
            return opened.decoded(saved[str(gathering.place)])
        first = self.world.replica * count // opened.manifest.facts["replicas"]
        return opened.decoded(saved.get(str(first), saved["0"]))


def _untrained(module: nn.Module, state: Iterable[str]) -> list[str]:
    """Buffers and the like, of which each replica has its own."""
    trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return [name for name in state if name not in trained]


def _config(module: nn.Module) -> str | None:
    """Of a model of Hugging Face's, so that an export has all that `from_pretrained` needs."""
    written = getattr(getattr(module, "config", None), "to_json_string", None)
    return str(written()) if callable(written) else None


def _read(opened: Opened, part: str, known: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a module: all of it is `known`, and what is `here` is read."""
    saved = opened.tree(part) or {}
    wrong = []
    if lacks := [name for name in known if name not in saved]:
        wrong.append(f"it has no {first_of(lacks, _MOST_SHOWN, 'others')}")
    if others := [name for name in saved if name not in known]:
        wrong.append(f"it has {first_of(others, _MOST_SHOWN, 'others')}, which the {part} has not")
    for name, own in known.items():
        entry = opened.entry(saved.get(name))
        if entry is not None and isinstance(own, Tensor):
            mine = DTYPES.get(own.dtype, str(own.dtype)), tuple(own.shape)
            if (entry.dtype, entry.shape) != mine:
                wrong.append(f"its {name} is {entry.dtype} {entry.shape}, and the {part}'s is {mine[0]} {mine[1]}")
    if wrong:
        more = f"; and {len(wrong) - _MOST_SHOWN} more differences" if len(wrong) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{opened.shown} is for another {part}: {printable('; '.join(wrong[:_MOST_SHOWN]))}{more}; make the "
            f"{part} as it was"
        )
    made: Any = OrderedDict()
    made._metadata = getattr(known, "_metadata", None)
    read: dict[Any, Any] = {}  # shared ones once
    for name in here:
        key = str(saved[name])
        if key not in read:
            own = known[name]
            read[key] = opened.decoded(saved[name], own if hasattr(own, "device_mesh") else None)
        made[name] = read[key]
    return made  # type: ignore[no-any-return]
