"""What a user iterates over: minibatches go in, and for each of them, in order, its result comes out.

    with pipe.stream(optimizer=...) as stream:
        for result in stream.run(loader):
            ...

Results come as soon as their loss is there, while later minibatches are under way already and earlier ones are still
going back. When a loader ends the flow stays as it is, for the next one; `drain`, and the end of the context, finish
what is under way. Going on after that has the bits of a flow that was never drained.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.errors import ConfigError, GaplessError, TransportError
from gapless.guards.between_ranks import STREAM_CASTS
from gapless.run.streams.stream_device import END, Fed, StreamDevice
from gapless.run.streams.stream_runner import LEAVES, Stopped, StreamRunner, counts, is_whole, met, why_stopped
from gapless.run.streams.stream_state import State, loading, state_of
from gapless.stage.autocast import autocast_is_on
from gapless.stage.settings import settings


class Passed(NamedTuple):
    """A minibatch that has come to the end of the model, on its way back now."""

    minibatch: int
    loss: Tensor


class Stream:
    """Minibatches that follow each other through the stages without a flush. `Pipeline.stream` makes one."""

    def __init__(
        self,
        runner: StreamRunner,
        devices: Sequence[StreamDevice],
        cut: Callable[[Any, "Stream"], Sequence[Fed]],
        held: Callable[[], AbstractContextManager[object]],
        in_flight: int,
        saveable: Callable[["Stream"], Any],
    ) -> None:
        """`cut` makes microbatches of what a loader gives; `held` keeps others from using the stages."""
        self._runner, self._devices, self._cut, self._held, self._saveable = runner, devices, cut, held, saveable
        self._in_flight = in_flight
        self._fed = self._passed = devices[0].at
        self._ready: deque[Passed] = deque()  # said before a drain, and not handed out yet
        self._running = ExitStack()
        self._settings: tuple[Any, ...] = ()
        self._runs = 0  # of which the last one gets the results
        self._stopped: Sequence[Stopped] = ()
        self.is_running = False
        self.owner: object = None  # a pipeline that nobody else keeps would be closed

    @property
    def fed(self) -> int:
        """How many minibatches it has been given."""
        return self._fed

    @property
    def minibatches(self) -> int:
        """How many minibatches all stages have learned from; under a mesh and while it runs, this rank's stage. With
        replicas (`dp`) this counts groups of minibatches. Where replicas take turns, an incomplete group counts too.
        """
        self.check_whole()
        return min(device.at for device in self._devices)

    def run(self, loader: Iterable[Any]) -> Iterator[Passed]:
        """Trains on every minibatch of the loader and yields a result for each, in order. If you left an earlier run,
        minibatches that were in flight still train the model, but their results are dropped.
        """
        batches, more = iter(loader), True
        self.check_whole()
        self._check_caller()
        earlier = self._fed
        self._runs = run = self._runs + 1
        try:
            while more or self._passed < self._fed:
                if run != self._runs:
                    raise ConfigError(
                        "another run of this stream has begun, and the results are its own: end one first"
                    )
                while more and self._fed - self._passed < self._in_flight:
                    batch = next(batches, END)
                    more = batch is not END
                    if more:
                        self._feed(batch)
                if self._passed < self._fed:
                    result = self._next()
                    if self._passed > earlier:
                        yield result
        except GeneratorExit:
            raise
        except BaseException as error:  # the loader's, or the caller is to leave
            self._leave(error)
            raise

    def _check_caller(self) -> None:
        """Under what the caller has set, minibatches run; what is under way under other settings is finished first."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise ConfigError("a stream computes gradients, but they are switched off here: run it outside no_grad")
        if autocast_is_on() and torch.is_autocast_cache_enabled():
            raise STREAM_CASTS.refusal("autocast keeps casts of weights that a stream updates")
        if self.is_running and settings() != self._settings:
            self.drain()

    def _start(self, *, ends: bool = False) -> None:
        if not self.is_running:
            with ExitStack() as entered:
                entered.enter_context(self._held())
                met(self._runner, self._check_weights, lambda _: {"end of the stream": ends})
                self._settings = settings()
                self._running = entered.pop_all()
            self.is_running = True
            for device in self._devices:
                device.ends = ends
            self._runner.start(self._devices)

    def _check_weights(self) -> None:
        """As they were left."""
        for device in self._devices:
            device.versions.check()

    def _feed(self, batch: Any) -> None:
        parts = self._cut(batch, self)
        self._start()
        self._runner.compare(self._fed, batch)
        for part in parts:
            self._runner.feed(part)
        self._fed += 1

    def _next(self) -> Passed:
        if not self._ready:
            minibatch, loss = self._runner.hear()
            if loss is None:
                self._drain()
                raise TransportError(
                    f"the pipeline was closed while its stream was under way, and {counts(self._stopped)}: leave the "
                    "loop, or drain the stream, before you close it"
                )
            self._ready.append(Passed(self._devices[0].rule.shown(minibatch), loss))
        self._passed += 1
        return self._ready.popleft()

    def drain(self) -> None:
        """Finishes all minibatches in flight, so that all stages have made the same updates. Raises the error of a
        failure. Where replicas take turns, the gradients of an incomplete group wait for the rest of it.
        """
        self._drain()

    def _drain(self, why: str = "") -> None:
        if self.is_running:
            fed = self._fed
            self._runner.feed(END)
            try:
                with self._running:
                    self._stopped = self._runner.finish(fed, why)
            except BaseException as error:
                self._stopped = self._runner.broken_off()
                error.add_note(f"gapless: {counts(self._stopped)}")
                raise
            finally:
                self.is_running = False
                for device in self._devices:
                    device.versions.put_back()
                    device.stage.rest()
                self._fed = self._devices[0].at
                self._ready.extend(self._said())
                self._passed = self._fed - len(self._ready)
            self._check_stopped(why)

    def _check_stopped(self, why: str) -> None:
        """Raises what has failed here, or else why the flow has stopped earlier than it was asked to."""
        failures = [device.failure for device in self._devices if device.failure is not None]
        rule = self._devices[0].rule
        error = why_stopped(self._stopped, failures, why, len(self._stopped) if rule.in_turns else rule.stages)
        if failures or error is not None or any(each.why for each in self._stopped):
            self._ready.clear()
            self._passed = self._fed
            for device in self._devices:
                device.failure = None
        if error is not None:
            raise error

    def _leave(self, error: BaseException) -> None:
        """What is under way is finished, and the error of the caller's own says where the model is then."""
        why = f"failed: {type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt | SystemExit):
            why = LEAVES if isinstance(error, SystemExit) and not error.code else "was interrupted"
        if not self.is_running:
            return
        try:
            self._drain(why)
        except Exception as another:
            if another is not error:
                error.add_note(f"gapless: when the stream was drained: {another}")
        error.add_note(f"gapless: {counts(self._stopped)}")

    def state_dict(self, *, versions: bool = True, whole: bool = True) -> State:
        """All but the model's own state, in dicts and lists of tensors, numbers and strings; the stream is drained
        first. It has the versions of the weights that are still needed, unless `versions` is False. As in torch,
        tensors are not copied. Under a mesh every rank gets all of it, copied to the CPU, or without `whole` its own
        part.
        """
        self.drain()
        self.check_whole()
        own = partial(state_of, self._devices, versions=versions)
        if not whole:
            return own()
        with self._held():
            return self._runner.gathered(met(self._runner, own))

    def load_state_dict(self, state: Mapping[str, Any], *, versions: bool = True) -> None:
        """Resumes from a state. Load the model's own state before. Without `versions`, or if the state has none, the
        stream restarts from the newest weights, and no later minibatch uses older ones.
        """
        self.drain()
        with self._held():
            fits = partial(self.loading, state, versions=versions)
            load = met(self._runner, fits, lambda _: {"minibatches": state["minibatches"]})
        load()
        self._stopped = ()
        self._ready.clear()
        self._fed = self._passed = self._devices[0].at

    def loading(self, state: Mapping[str, Any], *, versions: bool) -> Callable[[], None]:
        """Raises if a state does not fit; what is returned takes it over."""
        return loading(self._devices, state, versions=versions)

    def save(self, folder: str | Path, extra: Any = None) -> None:
        """Writes a checkpoint: the model, all of `state_dict`, the random state, and `extra`. It appears whole or not
        at all.
        """
        self.saveable().save(folder, extra=extra)

    def load(self, folder: str | Path, *, versions: bool = True) -> Any:
        """Resumes from a checkpoint, and returns its `extra`. `versions` is as in `load_state_dict`."""
        return self.saveable().load(folder, versions=versions)

    def saveable(self) -> Any:
        """As `gapless.checkpoint.Checkpoints` takes it; the stream is drained first."""
        self.drain()
        return self._saveable(self)

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of all versions of the weights, for each stage."""
        return [device.versions.num_bytes for device in self._devices]

    @property
    def update_seconds(self) -> list[float]:
        """Processor time spent in updates, for each stage."""
        return [device.update_seconds for device in self._devices]

    @property
    def is_broken(self) -> bool:
        """Whether a failure has left the stages with different numbers of updates."""
        return self._is_uneven and all(device.versions.untouched for device in self._devices)

    @property
    def _is_uneven(self) -> bool:
        return not self.is_running and bool(self._stopped) and not is_whole(self._stopped)

    def reloaded(self) -> None:
        """The model was: what a failure has left of it is gone."""
        self._stopped = ()

    def _said(self) -> Iterator[Passed]:
        while not self._runner.said.empty():
            minibatch, loss = self._runner.said.get()
            if loss is not None:
                yield Passed(self._devices[0].rule.shown(minibatch), loss)

    def check_whole(self) -> None:
        """Raises if the stages have made different updates, and names them."""
        if self._is_uneven:
            raise GaplessError(
                f"the stream failed in the middle of an update, and {counts(self._stopped)}: resume from a state that "
                "was saved before"
            )

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._leave(error)
            return
        self._drain()
        if any(device.rule.in_turns for device in self._devices) and self._stopped and is_whole(self._stopped):
            # A group that waits for its rest goes into the weights as it is; the next minibatch begins another one.
            self._start(ends=True)
            self._drain()
