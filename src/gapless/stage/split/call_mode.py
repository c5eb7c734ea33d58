"""The one function mode: it sees the torch calls of a forward, and has those in its table answered.

It is there for three reasons, deferred weight gradients, seeded randomness and batch norm, and it costs a little on
every torch call, so it is installed only where a stage splits its backward, may draw or counts statistics. Where
another call uses a parameter whose calls are deferred, what would arrive at autograd's own accumulation is recorded too
(`deferred.divert`), and from the next step on that parameter is left to autograd. Only where that can't be, since
autocast has cast it or hooks wait for it, the forward starts again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from gapless.stage.autocast import decrement_nesting, increment_nesting, runs_low
from gapless.stage.norm.running_statistics import Statistics
from gapless.stage.offload.saved_storages import SavedStorages, hooks_of_others
from gapless.stage.random.draws import Draws, checkpoints_around, device_of, draws_by_tag, own_generator
from gapless.stage.random.hidden_draws import Touched

from .deferred import Records
from .kept_casts import KeptCasts

# A place for records, whether autocast has cast their parameters, and for what is kept until then, if that may leave.
Put = tuple[Records, bool, SavedStorages | None]
Handler = Callable[["Mode", Any, tuple[Any, ...], dict[str, Any]], Any]

_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_in_functorch: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_OPERATORS = frozenset((OpOverload, OpOverloadPacket))
_SEQUENCES = frozenset((list, tuple))
_HOLDERS = _SEQUENCES | {Parameter}  # what may be or hold a parameter


class Restart(BaseException):
    """The forward of a cell must start again: something was learnt that changes its beginning. `why` is what happened;
    `misdrawn`: and so what came after it has wrong numbers.
    """

    def __init__(self, why: str, *, misdrawn: bool = False) -> None:
        super().__init__(why)
        self.misdrawn = misdrawn


class Mode(KeptCasts, TorchFunctionMode):
    """What handlers work with. One per stage, entered for one forward at a time."""

    def __init__(self, draws: Draws, statistics: Statistics, table: Mapping[Any, Handler]) -> None:
        KeptCasts.__init__(self)
        self.draws = draws
        self.statistics = statistics
        self.alone = False  # the layers draw from torch's default generators, which are theirs alone meanwhile
        self.first_call: Touched | None = None  # so does a layer in its first call, which tells whether it must
        self.one_thread = False  # no other one of this process computes
        self.excluded: set[int] = set()  # parameters never deferred, by id
        self._partners: dict[int, set[int]] = {}  # weights and biases of one call, by id: they wait together
        self._pairs: set[tuple[int, int]] = set()  # the same, as they were met
        self._stands_for: dict[int, int] = {}  # leaves and the parameters in whose place they are, by id
        self._spread = 0  # how many were excluded when these were last told of each other
        self._records: Records | None = None
        self.defers_now = False  # whether this forward defers at all
        # Parameters used in this forward, by id; those that wait with whether autocast's cast of them was used.
        self.deferred: dict[int, tuple[Parameter, bool]] = {}
        self._plain: set[int] = set()
        self.waiting: Collection[int] = ()  # parameters, by id, whose gradients wait in this step
        self.second_use = False  # of one of these or of those deferred, by a call that autograd sees
        self.casts_all = False  # there is an autocast of the caller's, so all uses in this forward share one cast
        self.checkpoints = False  # a layer uses torch.utils.checkpoint
        self.casts_by_itself = False  # a layer has an autocast of its own
        self._table = table
        self._have_waited: set[int] = set()  # parameters that some forward has deferred, by id
        self.modules: Sequence[nn.Module] = ()  # of the stage
        self.leaves: Collection[int] = ()  # what this forward starts from, by id
        self.own: Collection[int] = ()  # parameters of this forward's layers, by id
        self.met_strangers = False  # a call of this forward was given another one
        self.weights: Collection[int] = ()  # of all stages, by id
        # The microbatch of this forward, its place in the step, whether remat runs it again, and those under way.
        self.at: tuple[int, int, bool, Collection[int]] = 0, 0, False, ()
        self.switched: dict[int, tuple[Tensor, bool]] = {}  # weights that it has frozen or thawed, by id
        self.saved: SavedStorages | None = None  # what this forward keeps may wait elsewhere
        self.behind = 0  # how often the `.data` of a weight or a buffer was asked for

    def begin(self, records: Records | None, kind: str) -> None:
        """A forward starts; it is to record into `records`, or it defers nothing."""
        self._records, self.defers_now = records, records is not None
        if self._stands_for and len(self.excluded) != self._spread:
            self._spread_exclusions()
        self.deferred = {}
        self._plain.clear()
        self.second_use = self.met_strangers = False
        self._kind = kind
        increment_nesting()  # as in `casts_are_kept`
        self.casts_all = decrement_nesting() > 0
        if self.cast_anew:
            self.own_casts, self._own = {}, {}
        if not self.statistics.idle:
            self.statistics.run()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.cast_anew and runs_low(func, self._kind) and (low := self._autocast_dtype()) is not None:
            args = tuple([self._cast_one(each, low) for each in args])
            kwargs = {key: self._cast_one(each, low) for key, each in (kwargs or {}).items()}
        given = (*args, *kwargs.values()) if kwargs else args
        holds = not _HOLDERS.isdisjoint(map(type, given))
        if holds:
            own = self.own
            for each in given:  # as in `_meet`; here every microsecond counts
                if type(each) is Parameter:
                    if id(each) not in own:
                        self.met_strangers = True
                elif type(each) in _SEQUENCES and not _HOLDERS.isdisjoint(map(type, each)):
                    self._meet(each)
        handler = self._table.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if type(func) in _OPERATORS and draws_by_tag(func):
            return self.draw(func, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if holds and self._records is not None:
            self._note(given, result)
        return result

    def _meet(self, given: Sequence[Any]) -> None:
        """Whether one of these is a parameter of another place."""
        for each in given:
            if type(each) is Parameter:
                self.met_strangers |= id(each) not in self.own
            elif type(each) in _SEQUENCES:
                self._meet(each)

    def _cast_one(self, arg: Any, low: torch.dtype) -> Any:
        """What autocast would do with its cache, with one that lasts for this forward."""
        if type(arg) is not Parameter or id(arg) not in self.cast_anew or arg.dtype != torch.float32:
            return arg
        if not torch.is_grad_enabled() or not torch.is_autocast_cache_enabled() or _in_functorch() is not None:
            return arg
        waits = self._unless_deferred & self._have_waited - self.excluded - self._plain
        if self._records is not None and id(arg) in waits:
            return arg
        made = self._own.get(id(arg))
        if made is None:
            made = self._own[id(arg)] = arg.to(low)
            self.own_casts[arg] = made.grad_fn
        return made

    def plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as it is; parameters in it are autograd's."""
        result = func(*args, **kwargs)
        if self._records is not None and not _HOLDERS.isdisjoint(map(type, (*args, *kwargs.values()))):
            self._note((*args, *kwargs.values()), result)
        return result

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any random call: with the stage's generators in place of torch's, or with one that the layer brings."""
        own = own_generator(kwargs)
        if own is not None:
            with self.draws.of_its_own(own):
                return self.plain(func, args, kwargs)
        if self.alone:
            return self.plain(func, args, kwargs)
        device = device_of(args, kwargs)
        if self.first_call is not None and device in self.first_call.devices:
            self.draws.count += 1
            with self.first_call.drawing(checkpoints_around() > 0):
                return self.plain(func, args, kwargs)
        self.refuse_checkpoint()
        with self.draws.swapped_in(device):
            return self.plain(func, args, kwargs)

    def _note(self, args: Sequence[Any], result: Any) -> None:
        """Parameters whose gradient flows through this result are no longer to be deferred in this forward."""
        needs_grad = result.requires_grad if type(result) is Tensor else _needs_grad(result)
        for arg in args:
            if type(arg) is Parameter:
                if arg.requires_grad and (needs_grad or _in_functorch() is not None):  # which hides it
                    self._plain.add(id(arg))
                    if id(arg) in self.deferred:
                        self.leave_to_autograd([arg])
                    elif id(arg) in self.waiting:
                        self.second_use = True
            elif type(arg) in _SEQUENCES and not _HOLDERS.isdisjoint(map(type, arg)):
                self._note(arg, result)

    def leave_to_autograd(self, parameters: Iterable[Parameter]) -> None:
        """These are deferred in this forward, and autograd was seen to reach them too. What was recorded so far can be
        added up with what arrives there, unless autocast has cast it, or a hook would be called for each part.
        """
        self.second_use = True
        self.exclude(parameters)
        for each in parameters:
            if self.deferred[id(each)][1] or each._backward_hooks or each._post_accumulate_grad_hooks:
                raise Restart("a weight is used in a second way")

    def stand_ins(
        self, x: Tensor, weight: Any, bias: Any, *, casts: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None, Put] | None:
        """What a call runs on whose weight gradients wait, and where they are put: the parameters without their
        history, and all of them as autocast would cast them, if it `casts` such calls. Where x needs no gradient, the
        weight's stand-in asks for one, so that there is a graph.

        None if they can't wait: only those of leaves do, used in no other way, with no checkpoint around that counts
        saved tensors.
        """
        records = self._records
        if records is None or type(weight) is not Parameter or not weight.requires_grad:
            return None
        if id(weight) in self.excluded or id(weight) in self._plain or not torch.is_grad_enabled():
            return None
        if bias is not None and (type(bias) is not Parameter or id(bias) in self.excluded or id(bias) in self._plain):
            return None
        if (self.alone or self.first_call is not None) and forward_ad._current_level >= 0:
            return None  # the derivative of a tangent reaches the weight too
        if (
            (_top_hooks(False) is not None and hooks_of_others())
            or _in_functorch() is not None
            or not weight.is_floating_point()
        ):
            return None
        low = torch.get_autocast_dtype(self._kind) if casts and torch.is_autocast_enabled(self._kind) else None
        # Autocast casts a parameter once, so contributions meet before the cast.
        summed_low = low is not None and weight.dtype == torch.float32 and torch.is_autocast_cache_enabled()
        if (id(weight), id(bias)) not in self._pairs:
            self._pair(weight, bias)
        for each in (weight,) if bias is None else (weight, bias):
            known = id(each) in self.deferred
            if summed_low and known and not self.casts_all:
                # A layer with an autocast of its own: whether both uses share a cast, only autocast knows.
                self.exclude([each])
                raise Restart("a layer uses a weight twice in an autocast of its own")
            if summed_low or not known:
                self.deferred[id(each)] = (each, summed_low)
        if low is None:
            w, b = weight.detach(), None if bias is None else bias.detach()
        else:
            x = x if x.dtype == torch.float64 else x.to(low)
            w, b = self._cast(weight, low), None if bias is None else self._cast(bias, low)
        if not x.requires_grad:
            w.requires_grad_()
        return x, w, b, (records, summed_low, self.saved)

    def _pair(self, weight: Parameter, bias: Parameter | None) -> None:
        """They wait together from now on."""
        self._pairs.add((id(weight), id(bias)))
        both = {id(weight)} if bias is None else {id(weight), id(bias)}
        self._have_waited.update(both)
        for each in both if bias is not None else ():
            self._partners.setdefault(each, set()).update(both)

    def exclude(self, parameters: Iterable[Parameter]) -> None:
        """Leaves the gradients of these to autograd, and of what can't wait without them."""
        for each in parameters:
            self.excluded.update(self._partners.get(id(each), (id(each),)))

    def stand_in(self, copies: Mapping[Parameter, Parameter]) -> None:
        """Leaves that take the place of parameters, as versions of them: what is excluded is so in every version."""
        self._stands_for.update((id(copy), id(of)) for copy, of in copies.items())
        self._spread_exclusions()

    def stands_in(self, leaf: Any) -> bool:
        """Whether it takes the place of a parameter."""
        return id(leaf) in self._stands_for

    def _spread_exclusions(self) -> None:
        """What was learnt of a leaf holds for the others that stand for the same parameter."""
        found = {of for copy, of in self._stands_for.items() if copy in self.excluded or of in self.excluded}
        self.excluded.update(found, (copy for copy, of in self._stands_for.items() if of in found))
        self._spread = len(self.excluded)

    def exclude_deferred(self) -> None:
        """Leaves to autograd what this forward has deferred so far."""
        if self.deferred:
            self.excluded.update(self.deferred)
            raise Restart("a layer asks for gradients in its forward")

    def refuse_checkpoint(self) -> None:
        """Called before a draw. A checkpoint replays torch's default generators, so inside one the draws must come from
        these.
        """
        if checkpoints_around():
            self.alone = True
            raise Restart("a layer draws inside of torch.utils.checkpoint")

    def run_alone(self, why: str) -> None:
        """Called before a layer does what needs torch's default generators, seeded, or no other thread beside it."""
        if self.first_call is not None:
            self.first_call.seen = True
        elif not self.alone:
            self.alone = True
            raise Restart(why)


def _needs_grad(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.requires_grad
    return isinstance(result, (tuple, list)) and any(_needs_grad(value) for value in result)
