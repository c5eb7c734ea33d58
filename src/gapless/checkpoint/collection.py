"""The checkpoints of a run: the last ones and the best are kept, and writing goes on while training does.

    run/
      step-00000050/
      step-00000100/
      latest -> step-00000100

`latest` is for people and other programs. What is loaded is the newest folder with its own name, so that a link can't
lead anywhere else.
"""

import math
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from gapless.checkpoint.contents import Contents, Copies
from gapless.checkpoint.disk import Disk, HeldFolder, aside, held_soon, make_folders, remove_leftovers, set_aside
from gapless.checkpoint.listing import LATEST, Saved, name_of, saved_in
from gapless.checkpoint.manifest import Manifest, UnreadableError, faults
from gapless.checkpoint.save import SaveUnderWay, begin, folder_of, met, not_shared, remove_if_there
from gapless.checkpoint.saveable import Saveable
from gapless.errors import CheckpointError, ConfigError, printable
from gapless.run.world import Gathering

Better = Literal["lower", "higher"]
_LOCK_WITHIN = 10.0  # seconds
_LEAST_URGENT = 19


class Trained(Protocol):
    """A pipeline or a stream."""

    def saveable(self) -> Saveable:
        """What of it goes into checkpoints."""


class Checkpoints:
    """The checkpoints of a run. Make it before the first step, under a mesh on every rank: it raises an error for a
    folder that not all ranks share, or that another process saves to.

    folder      of the run; created if needed
    trained     the pipeline, or the stream
    keep        how many of the latest are kept; None for all
    best        how many of the best are also kept, by the metric given to `save`
    better      which metrics are better: "lower" or "higher"
    background  `save` copies what it needs, and a thread writes it while training continues
    """

    def __init__(
        self,
        folder: str | Path,
        trained: Trained,
        *,
        keep: int | None = 3,
        best: int = 1,
        better: Better = "lower",
        background: bool = True,
        disk: Disk | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep is {keep}, but at least one checkpoint is kept; None keeps all")
        if best < 0:
            raise ConfigError(f"best is {best}, but it must be 0 or more")
        if better not in get_args(Better):
            raise ConfigError(f"better is {better!r}, but it must be one of {', '.join(map(repr, get_args(Better)))}")
        self.folder = folder_of(folder)
        self._trained, self._disk, self._background = trained, Disk() if disk is None else disk, background
        self._keep, self._best, self._better = keep, best, better
        self._copies = Copies()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        with trained.saveable().gathered("opening its checkpoints") as gathering:
            self._held = self._opened(gathering)

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self, optimizer: Any = None, scheduler: Any = None, extra: Any = None, *, metric: float | None = None
    ) -> Path:
        """Saves this step and returns the path. Waits for an earlier save first, and raises its error if it has failed.
        For a stream, pass only `extra` and `metric`.
        """
        self.wait()
        if self._copies.closed:
            raise CheckpointError(f"the Checkpoints of {printable(self.folder)} were closed: make a new object")
        saveable = self._trained.saveable()
        folder = self.folder / name_of(saveable.steps)

        def contents() -> Contents:
            if gathering.place == 0:
                self._check_newest(saveable.steps)
            made = saveable.contents(gathering, optimizer=optimizer, scheduler=scheduler, extra=extra)
            if metric is not None:
                number = float(metric)
                made.facts["metric"] = number if math.isfinite(number) else {"$float": repr(number)}
            return made

        with saveable.gathered("saving a checkpoint") as gathering:
            under_way = begin(self._disk, gathering, folder, contents, self._tidy)
            if not self._background:
                under_way.finish()
                return folder
            try:
                under_way.parts = self._copies.of(under_way.parts)
            except BaseException:
                under_way.cleanup.close()
                raise
        self._thread = threading.Thread(target=self._finish, args=(under_way,), name="gapless checkpoint")
        self._thread.start()
        return folder

    def _check_newest(self, step: int) -> None:
        """What is kept and loaded are the last steps: one before them would be removed at once."""
        later = [each for each in saved_in(self.folder, after=step) if not each.fault]
        if later:
            raise CheckpointError(
                f"{printable(self.folder)} has {later[-1].path.name}, but this is step {step}: load that one first, "
                "remove it, or save to another folder"
            )

    def _finish(self, under_way: SaveUnderWay) -> None:
        _let_others_go_first()
        try:
            under_way.finish()
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        """Waits until all saves are on disk. Raises the error of one that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def under_way(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _tidy(self, manifest: Manifest) -> None:
        """The new one is there: `latest` leads to it, and those that are not kept go."""
        disk = self._disk
        link = self.folder / aside(LATEST)
        if disk.link(link, name_of(manifest.step)):
            disk.rename(link, self.folder / LATEST)
            disk.sync_folder(self.folder)
        saved = [each for each in self.saved if not each.fault]  # the others stay, and take nobody's place
        kept = {each.path for each in (saved if self._keep is None else saved[-self._keep :])}
        kept |= {each.path for each in self._by_metric(saved)[: self._best]}
        for each in saved:
            if each.path not in kept:
                set_aside(disk, each.path)

    # -- what is there ----------------------------------------------------------------------------------------------

    @property
    def saved(self) -> list[Saved]:
        """All checkpoints, in the order of their steps."""
        return saved_in(self.folder)

    @property
    def latest(self) -> Path | None:
        """The newest; not one that is being written."""
        saved = self.saved
        return saved[-1].path if saved else None

    @property
    def best(self) -> Path | None:
        """The best by its metric; the newest of equally good ones."""
        found = self._by_metric(self.saved)
        return found[0].path if found else None

    def _by_metric(self, saved: Iterable[Saved]) -> list[Saved]:
        sign = 1 if self._better == "lower" else -1
        rated = [(each, each.metric) for each in saved if each.metric is not None and not math.isnan(each.metric)]
        return [each for each, _ in sorted(rated, key=lambda pair: (sign * pair[1], -pair[0].step))]

    def load(self, optimizer: Any = None, scheduler: Any = None) -> Any:
        """Resumes from the newest, and returns its `extra`."""
        self.wait()
        saved = self.saved
        if not saved:
            raise CheckpointError(f"{printable(self.folder)} has no checkpoint to resume from: start a new run")
        try:
            return self._trained.saveable().load(saved[-1].path, optimizer=optimizer, scheduler=scheduler)
        except CheckpointError as error:
            earlier = [each.path.name for each in saved[:-1] if not each.fault]
            newest = saved[-1]
            wrong = list(faults(newest.path))
            if not earlier or not (newest.fault or wrong):  # of another model, say
                raise
            if any(isinstance(each, UnreadableError) for each in (error, *wrong)):
                raise
            raise CheckpointError(f"{error}: remove it to resume from {earlier[-1]}") from None

    # -- the folder -------------------------------------------------------------------------------------------------

    def _opened(self, gathering: Gathering) -> ExitStack:
        """By all ranks: the first holds the folder, and all others see what it does there."""
        disk, folder, probe = self._disk, self.folder, self.folder / aside("shared")
        with ExitStack() as held:

            def opened() -> str:
                if gathering.place == 0:
                    make_folders(disk, folder)
                    held.enter_context(_held(folder))
                    remove_leftovers(disk, folder)
                    disk.make_folder(probe)
                return probe.name

            def seen(name: str) -> None:
                if not (folder / name).is_dir():
                    raise CheckpointError(not_shared(folder))

            try:
                name = met(gathering, "save", folder, opened)[0]
                met(gathering, "save", folder, partial(seen, name))
            finally:
                remove_if_there(disk, probe)
            return held.pop_all()

    def close(self) -> None:
        """Waits for saves, and lets other processes save to the folder."""
        try:
            self.wait()
        finally:
            self._copies.close()
            self._held.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as another:
            if error is None:
                raise
            error.add_note(f"gapless: and the save that was under way: {another}")  # nothing hides what came first


def _let_others_go_first() -> None:
    """Whatever trains: this thread takes what of the processors is left over."""
    if sys.platform != "linux":  # elsewhere priorities are those of processes, and the number is not one of them
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_URGENT)
        policy, urgent = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
        if urgent > 1:  # real time, which knows no niceness
            os.sched_setscheduler(0, policy, os.sched_param(urgent - 1))


def _held(folder: Path) -> HeldFolder:
    try:
        return held_soon(folder, _LOCK_WITHIN)
    except BlockingIOError:
        raise CheckpointError(
            f"another process is saving to {printable(folder)}: end it, or choose another folder for this run"
        ) from None
