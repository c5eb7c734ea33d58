"""A forward that starts again leaves no trace of the run that did not count.

As far as a user can tell, a forward runs once per microbatch. Hardly any must start again: what a first call must tell
it tells without (`hidden_draws`), and so do weights that are used in a second way (`deferred.divert`). For the others:

    first forward       all that the layers hold is noted, and put back; it tells what changes
    later ones          what is known to change is noted: nothing, for most layers. Now and then all is, to learn more
    one starts again    what is known is put back, and all is noted before it runs again: nothing else may change, since
                        the run before has changed that too. This is refused, in the one step where it can happen
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import nn

from gapless.guards.held_state import RECOMPUTED_STATE, RESTARTED_FORWARDS
from gapless.guards.process_wide import UNSEEN_DRAWS
from gapless.guards.weights_and_gradients import WEIGHTS_ELSEWHERE
from gapless.stage.batch.aliases import OWN_CHANGED
from gapless.stage.norm.running_statistics import Statistics
from gapless.stage.saved_activations import Kept
from gapless.stage.split.call_mode import Restart

from .changing_buffers import Buffers, Marks, Taken, changed_late
from .state.held_objects import Was
from .state.layer_state import Held, for_replay, without_tensors
from .state.opaque_state import Opaque
from .state.shared_objects import SharedObjects
from .state.state_notes import Note, key_of

IN_PLACE_ON_LEAF = "leaf Variable that requires grad"
_ON_META = "device meta"  # what belongs to another process is there


class Undo:
    """What the layers of a cell hold. With `always`, every run may show that a buffer changes."""

    def __init__(self, parts: Sequence[Any], statistics: Statistics, shared: SharedObjects, *, always: bool) -> None:
        self.buffers = Buffers(parts, always=always)
        self._held, self._always = Held(parts, shared, always=always), always
        self._statistics = statistics
        self._taken: Taken = []
        self._notes: list[Note] = []
        self._counted: list[Note] = []  # what the first run has moved for good, as it was
        self._changed: list[Note] = []  # what the run that counts has changed, as it was
        self._again: tuple[str, Marks, list[Note]] | None = None
        self._miscounted = ""
        self._step = self._next_look = 0
        self.quiet_until = 0  # before this step there is nothing to note: nothing is known to change

    @property
    def changes_state(self) -> bool:
        """Whether what is no buffer was seen to change."""
        return self._held.changes

    def entered(self) -> Self:
        """A forward comes, which may take several runs."""
        self._again, self._miscounted = None, ""
        self._taken, self._notes, self._counted = [], [], []
        return self

    def begin(self, step: int) -> None:
        """A run of it starts."""
        self._step = step
        looks = step >= self._next_look
        first = {key_of(each.holder): each for each in self._counted}
        self._taken = self.buffers.taken(looks)
        self._notes = [first.get(key_of(each.holder), each) for each in self._held.taken(looks)]

    def start_again(self, why: Restart | RuntimeError, stage: int, *, guarded: bool) -> None:
        """The run does not count, unless this is an error of the user's. `guarded`: no layer gets a leaf."""
        if isinstance(why, RuntimeError):
            if _ON_META in str(why):
                raise WEIGHTS_ELSEWHERE.refusal(
                    f"a layer or the loss of stage {stage} uses the weights of a stage in another process, and their "
                    "values are not here"
                ) from why
            if guarded or not any(each in str(why) for each in (IN_PLACE_ON_LEAF, OWN_CHANGED)):
                raise why
            why = Restart("a layer changes its input in place")
        self.quiet_until = 0
        story = f"{why} for the first time, so stage {stage} had to run this forward again, and"
        counted = self._statistics.moved_once
        if why.misdrawn and self._statistics.has_counted:
            self._miscounted = story
        self._counted = [each for each in self._notes if id(each.holder) in counted]
        self.buffers.put_back(self._taken, but=counted)
        lost, notes = self._held.put_back(self._notes, but=counted), self._held.all(of_others=True)
        lost += [each.path for each in notes if isinstance(each.holder, Opaque) and each.holder.is_unknown]
        if lost:
            raise RESTARTED_FORWARDS.refusal(
                f"{story} {lost[0]}, which can't be put back where it was, may have moved a second time",
                f"{RESTARTED_FORWARDS.way_out}, or keep what it draws in a list or a number",
            )
        if not self._held.is_known:
            noted = {key_of(each.holder) for each in self._notes}
            notes = [each for each in notes if key_of(each.holder) not in noted]
        self._again = story, self.buffers.marks() if self._held.is_known else [], notes

    def end(self, *, drew_anew: bool) -> Taken:
        """The run counts. Returns what a second run for remat must start from. `drew_anew`: it was right to start again
        for what was drawn; otherwise it was somebody else who did.
        """
        if self._miscounted and drew_anew:
            raise UNSEEN_DRAWS.refusal(f"{self._miscounted} that has moved the statistics of a batch norm")
        if self._again is not None:
            story, marks, notes = self._again
            changed = [*self.buffers.changed_since(marks, but=self._statistics.moved), *self._held.twice(notes)]
            if changed:
                raise RESTARTED_FORWARDS.refusal(f"{story} that has changed {', '.join(changed[:3])} a second time")
        if self._step >= self._next_look:
            self._changed = self._held.learn(self._notes)
            self._next_look = max(self._step + 1, 2 * self._step)
        else:
            self._changed = self._notes
        self._notes = []
        taken = self.buffers.learn(self._taken)
        self.quiet_until = self._next_look if self.buffers.is_settled and not self._held.changes else 0
        return taken

    def note(
        self,
        kept: Kept,
        others: Iterable[Kept],
        begun: Sequence[tuple[nn.Module, str, Was]],
        changed: Sequence[Note] = (),
    ) -> None:
        """Keeps with a microbatch what layers held before its forward, for a second run, and what it has left, for the
        backward. `begun`: attributes that it was the first to change; what is kept of others lacks them.
        `changed`: what it has changed in objects.
        """
        found, lost = self._held.begun(begun, changed) if begun or changed else ([], [])
        if lost and self._always:
            raise RECOMPUTED_STATE.refusal(
                f"a forward has changed {lost[0]} in place for the first time, and remat needs to know what it was",
                "let the layer do so from its first call on, or make it a buffer",
            )
        if not self._held.changes:
            return
        self.quiet_until = 0
        kept.after = list(without_tensors(self._held.taken()))
        kept.before = list(for_replay([*self._changed, *found])) if self._always else []
        self._changed = []
        for each in others if found else ():
            each.after += without_tensors(found)
            each.before += for_replay(found)

    def replayed(self, kept: Kept) -> AbstractContextManager[None]:
        """Around a second run."""
        return self._held.replayed(kept.before)

    @contextlib.contextmanager
    def as_left(self, kept: Kept, stage: int) -> Iterator[None]:
        """Around the backward of a microbatch."""
        with self._held.as_left(kept.after) as changed:
            yield
        if changed:
            raise changed_late(stage, changed[0])
