"""The model of a pipeline as its user sees it: under its own names, whatever the stages are."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.checkpoint.saveable import Saveable
from gapless.model.uses import own_parameters
from gapless.pipeline.arguments.checks import check_data
from gapless.pipeline.arguments.habits import explained, not_here
from gapless.pipeline.arguments.training_arguments import Asked
from gapless.pipeline.arguments.training_habits import refuse_clipping
from gapless.pipeline.options import Options
from gapless.pipeline.overlapped_training import OverlappedTraining
from gapless.pipeline.saved.pretrained_folder import save_folder
from gapless.pipeline.saved.saved_model import SavedModel
from gapless.pipeline.saved.saved_pipeline import SavedPipeline
from gapless.pipeline.shares import shares_of
from gapless.pipeline.short_tracebacks import public_calls
from gapless.pipeline.staged_model import StagedModel
from gapless.pipeline.streaming import check_drained
from gapless.run.held_memory import HeldMemory, held_memory
from gapless.run.streams.stream import Stream
from gapless.run.world import World


@public_calls("Pipeline")
class HeldModel:
    """What a pipeline lets its user do with the model. Whoever asks means the model as it is now: an edit since the
    last step is taken over first.
    """

    _world: World
    _staged: StagedModel
    _streams: weakref.WeakSet[Stream]
    _nothing: nn.Parameter
    _options: Options
    _close: Callable[[], object]
    steps: int
    timeline: bool
    _training: OverlappedTraining | None = None

    @property
    def partition(self) -> tuple[int, ...]:
        """The number of layers in each stage; empty for a model that has not been traced yet."""
        return self._staged.partition

    def module(self) -> nn.Module:
        """The plain model, with the trained weights."""
        self._follow()
        return self._staged.module

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process. A rank without any gets an empty one, since optimizers need one."""
        mine = [parameter for _, parameter in self.named_parameters()]
        yield from mine or ([] if self._world.one_process else [self._nothing])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process, under the model's own names."""
        self._follow()
        return ((name, each) for name, each in self._staged.module.named_parameters() if self._staged.holds(each))

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """The state of the model, independent of stages. Under a mesh every rank gets all of it, on the CPU; with
        `whole=False`, only its own part.
        """
        self._follow(whole=True)
        self._check_made()
        return self._world.state(self._staged.module, whole)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads a state of the model. Under a mesh every rank takes its part, from a whole state or from its own."""
        self._follow()
        self._check_made()
        loaded = self._world.load(self._staged.module, state, strict)
        for stream in self._streams:
            stream.reloaded()
        return loaded

    def save(self, folder: str | Path, optimizer: Any, scheduler: Any = None, extra: Any = None) -> None:
        """Writes a checkpoint. It appears whole or not at all, and any number of devices or ranks can load it. It also
        holds the number of steps and the random state.

        folder     where to write it
        optimizer  the one made of `parameters()`
        scheduler  its learning-rate scheduler
        extra      your own data: numbers, strings, tensors, lists and dicts of them
        """
        self.saveable().save(folder, optimizer=optimizer, scheduler=scheduler, extra=extra)

    def load(self, folder: str | Path, optimizer: Any = None, scheduler: Any = None) -> Any:
        """Continues from a checkpoint and returns its `extra`. Without an optimizer, only the model is loaded."""
        extra = self.saveable().load(folder, optimizer=optimizer, scheduler=scheduler)
        for stream in self._streams:
            stream.reloaded()
        return extra

    def save_pretrained(self, folder: str | Path, max_shard_size: int = 5_000_000_000) -> None:
        """Writes a Hugging Face model for `from_pretrained`, whole or not at all. Under a mesh every rank writes the
        tensors that it has.

        folder          a new one
        max_shard_size  most bytes in a file, unless a single tensor has more
        """
        self._follow(whole=True)
        self._check_made()
        with self._world.gathered("saving the model") as gathering:
            module = self._staged.module
            save_folder(gathering, folder, module, self._world.state(module, whole=False), max_shard_size)

    def saveable(self) -> Saveable:
        """This pipeline in the form that checkpoints are made from."""
        self._follow(whole=True)
        self._check_made()
        return SavedPipeline(SavedModel(self._world, self._staged, self._options), self, self._nothing)

    @property
    def stopping(self) -> bool:
        """Under a mesh: whether some rank got SIGTERM. The next step would then end the process, on every rank. Between
        the steps of one minibatch (`sync=False`) it stays False, so that the minibatch is finished first.
        """
        return self._world.stopping

    @explained
    def training(
        self,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        scheduler: Any = None,
        skip_nonfinite: bool = True,
        scaler: Any = None,
    ) -> OverlappedTraining:
        """Trains with an optimizer step that does not wait: a device that has its gradients updates its own weights and
        starts the next minibatch. Results are bit-identical to `step`, `clip_grad_norm_` and `optimizer.step()`.

        optimizer       made of `parameters()`
        max_norm        clip the norm of all gradients to this
        scheduler       its learning-rate scheduler, stepped after each update
        skip_nonfinite  if the loss or the norm is not finite: no update, and the scheduler does not step
        scaler          a torch.amp.GradScaler: scales the losses and unscales gradients before they are clipped. It is
                        updated with each step; if gradients overflow, neither the optimizer nor the scheduler steps
        """
        self._settle()
        if self._training is not None:
            self._training.close()
        asked = Asked(max_norm, scheduler, skip_nonfinite, scaler)
        self._training = OverlappedTraining(self, self._world, self._staged, self._options, optimizer, asked)
        return self._training

    def train(self, mode: bool = True) -> Self:
        """Puts the model into training mode. `evaluate` switches modes by itself."""
        self._follow()
        self._staged.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, those of the loss and of steps with `sync=False` too."""
        self._follow()
        self._world.zero_grad(self._staged.module, set_to_none)
        if isinstance(self._options.loss, nn.Module):
            self._options.loss.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, over all stages, and the loss if it has parameters. Returns the total norm
        before clipping.
        """
        self._settle()
        if self._training is not None and self._training.is_open:
            raise refuse_clipping()
        module = self._staged.module
        parameters = [*module.parameters(), *own_parameters(self._options.loss, module)]
        return self._world.clip(parameters, max_norm, norm_type)

    def shares(self, batches: Sequence[tuple[Any, Any]]) -> list[float | Fraction]:
        """The `weight` of each step of one update: the share of each (inputs, target) in what all of them count, over
        all replicas.
        """
        self._options.schedules.check_steps()
        return shares_of(self._world, self._staged, batches, partial(self._beside, batches))

    def memory(self, optimizer: Any = None) -> HeldMemory:
        """The memory of the devices in bytes, by stages of this process; print it for a table. Pass the optimizer to
        include its state.
        """
        self._check_made()
        looking: AbstractContextManager[dict[Any, int]] = nullcontext({})
        with looking if self._training is None else self._training._looking() as copies:
            return held_memory(self._staged.stages, self._staged.schedule, optimizer, copies)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent in calls that compiled layers: the cold start."""
        return sum(stage.calls.compile_seconds for stage in self._staged.stages.values())

    def close(self) -> None:
        """Ends the threads. The model and its gradients stay."""
        try:
            if self._training is not None:
                self._training.close()
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        raise not_here(self, name)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline has threads, so it can't be copied or pickled: do that with its model or state_dict()"
        )

    def __repr__(self) -> str:
        return "\n".join([*self._staged.described(), *self._world.described()])

    def _check_made(self) -> None:
        """What is on the meta device until the first batch comes has no values to give, and takes none."""
        if not self._staged.stages:
            check_data(self._staged.module, "give the pipeline an example=, and its stages are made at once")

    def _follow(self, *, whole: bool = False) -> None:
        """Whoever asks for the parameters means those of the model as it is; inside a step nothing may change."""
        check_drained(self._streams, whole=whole)
        self._settle()
        if not self._world.busy:
            self._staged.follow()

    def _beside(self, batches: Sequence[tuple[Any, Any]]) -> AbstractContextManager[object]:
        """A call while steps are under way, if it can be."""
        beside = None if self._training is None else self._training._beside(batches)
        if beside is None:
            self._follow()
        return beside or self._world.call("sharing out an update")

    def _settle(self) -> None:
        """Steps that are under way come to their end first."""
        if self._training is not None:
            self._training.settle()


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """All of its modules, each of which goes back to its own mode."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
