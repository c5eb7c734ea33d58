"""Every schedule by name: a recipe is a small function from (devices, microbatches, ...) to a schedule.

request         what is asked of a recipe
head_start      so many forwards, then one for each backward: rows of 1f1b and its kin
line            naive, gpipe, 1f1b, eager-1f1b: one stage per device, whole backwards
loop            interleaved, looped-bfs: several stages per device
zero_bubble     zb-h1, zb-h2: weight gradients fill what would be bubbles
vee             zb-v, v-half, v-min, dualpipe-v: down the devices and back up
building_block  the repeated block that v-half and v-min are made of
pipedream       pipedream, 2bw: no flush
auto            searched for given costs and memory: `greedy` list scheduling, then `justification`
optimal         proven best, by a solver
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.errors import ConfigError, ScheduleError, did_you_mean
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.recipes import auto, line, loop, pipedream, vee, zero_bubble
from gapless.schedule.recipes.request import Request
from gapless.schedule.timeline import Objective

if TYPE_CHECKING:
    from gapless.schedule.recipes.optimal.optimal import Optimum, SolverProgress


@dataclass(frozen=True)
class Recipe:
    """What the table of schedules says of a recipe, and the function that makes it.

    stages_per_device: the numbers it takes; None for any number, 2 by default
    """

    name: str
    placement: str
    bubble: str
    peak: str
    note: str
    build: Callable[[Request], Schedule]
    stages_per_device: tuple[int, ...] | None = (1,)
    synchronous: bool = True

    @property
    def is_searched(self) -> bool:
        """Whether it is the outcome of a search, which may take a while."""
        return self.name in ("auto", "optimal")


def _plain(function: Callable[[int, int], Schedule]) -> Callable[[Request], Schedule]:
    return lambda request: function(request.devices, request.microbatches)


def _looped(function: Callable[[int, int, int], Schedule]) -> Callable[[Request], Schedule]:
    return lambda request: function(request.devices, request.microbatches, request.stages_per_device or 2)


def _costed(function: Callable[[int, int, Costs], Schedule]) -> Callable[[Request], Schedule]:
    return lambda request: function(request.devices, request.microbatches, request.costs)


def solve(request: Request, progress: "Callable[[SolverProgress], None] | None" = None) -> "Optimum":
    """The exact answer to what `auto` is asked, with its answer as the hint."""
    from gapless.schedule.recipes.optimal.optimal import optimal

    _check(RECIPES["optimal"], request)
    hint = auto.auto(request)
    return optimal(
        request.placements,
        request.microbatches,
        request.costs,
        memory_limit=request.limit,
        objective=request.objective,
        hint=hint,
        time_limit=request.time_limit,
        progress=progress,
    )


_TABLE = (
    Recipe("naive", "line", "M(K-1)(f+b)", "1", "one microbatch at a time", _plain(line.naive)),
    Recipe("gpipe", "line", "(K-1)(f+b)", "M", "every forward, then every backward", _plain(line.gpipe)),
    Recipe("1f1b", "line", "(K-1)(f+b)", "K-r", "the default of most libraries", _plain(line.one_forward_one_backward)),
    Recipe(
        "eager-1f1b", "line", "(K-1)(f+b)", "2(K-r)-1", "hides hop latency", _plain(line.eager_one_forward_one_backward)
    ),
    Recipe("interleaved", "loop", "(K-1)(f+b)/v", "K+(K-1)/v", "v times the traffic", _looped(loop.interleaved), None),
    Recipe("looped-bfs", "loop", "(K-1)(f+b)/v", "M", "breadth first", _looped(loop.looped_bfs), None),
    Recipe("zb-h1", "line", "(K-1)(f+i-w)", "K", "1f1b's memory, a third of its bubble", _plain(zero_bubble.zb_h1)),
    Recipe(
        "zb-h2", "line", "span max(0, (K-1)(f+i-2w))", "2K-1", "pays off with pipe.training", _plain(zero_bubble.zb_h2)
    ),
    Recipe("zb-v", "vee", "(K-1)f/2 at f=i=w, M>=3K/2", "K", "span bubble 0 at equal costs", _plain(vee.zb_v), (2,)),
    Recipe("v-half", "vee", "about half of 1f1b's", "(K+2)/2", "half the memory", _costed(vee.v_half), (2,)),
    Recipe("v-min", "vee", "about 2/3 of 1f1b's", "(K+4)/3", "a third of the memory", _costed(vee.v_min), (2,)),
    Recipe("dualpipe-v", "vee", "as zb-v, run serially", "K+1/2", "F and B may overlap", _plain(vee.dualpipe_v), (2,)),
    Recipe(
        "auto",
        "line, vee or loop",
        "searched from the costs",
        "the limit",
        "the best found for these costs and this memory",
        auto.auto,
        (1, 2),
    ),
    Recipe(
        "optimal",
        "line, vee or loop",
        "the least of all these",
        "the limit",
        "proven, for small K and M; needs gapless[optimal]",
        lambda request: solve(request).schedule,
        (1, 2),
    ),
    Recipe(
        "pipedream",
        "line or replicated",
        "0 in steady state",
        "K-r",
        "no flush; stashed weights; M counts minibatches",
        lambda request: pipedream.pipedream(request.devices, request.microbatches, request.replicas),
        synchronous=False,
    ),
    Recipe(
        "2bw",
        "line",
        "0 in steady state",
        "K-r",
        "no flush; two versions of the weights; needs M >= K",
        lambda request: pipedream.two_buffered_weights(request.devices, request.microbatches, request.minibatches),
        synchronous=False,
    ),
)
MOST_ACTIONS = 20_000_000

RECIPES = {recipe.name: recipe for recipe in _TABLE}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; a name that is nearly one is told which."""
    if isinstance(name, Schedule):
        raise ScheduleError("here a schedule is given by its name, as '1f1b'; gapless.simulate takes one of your own")
    if name in RECIPES:
        return RECIPES[name]
    if name.endswith((".txt", ".csv", ".json")):
        raise ScheduleError(
            f"{name[:60]!r} is a file, and here a schedule is given by its name: `gapless show` and `simulate` read "
            "files, and Schedule.parse(text) makes a schedule for Pipeline"
        )
    hint = did_you_mean(name, RECIPES, "`gapless schedules` lists them.", 0.4)
    raise ScheduleError(f"there is no schedule named {name[:60]!r}; {hint}")


def make_schedule(
    name: str,
    *,
    devices: int,
    microbatches: int,
    stages_per_device: int | None = None,
    costs: Costs | None = None,
    memory_limit: Number | str | None = None,
    objective: Objective = "makespan",
    replicas: Sequence[int] | None = None,
    minibatches: int = 8,
    time_limit: float = 60.0,
) -> Schedule:
    """The schedule of that name.

    devices            how many
    microbatches       in a minibatch; for pipedream, minibatches
    stages_per_device  the default is what the schedule needs
    costs              for schedules that are made from costs, such as `auto` and the V schedules
    memory_limit       for `auto` and `optimal`: in units of the costs' `activation`, or "2x" for twice 1f1b's peak
    objective          for `auto` and `optimal`: "makespan", or "span" for the longest time of a single device
    replicas           for pipedream: how many devices run each stage
    minibatches        how many of them a schedule without a flush is made for
    time_limit         seconds that `optimal` may take

    >>> print(make_schedule("1f1b", devices=2, microbatches=2))
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1
    """
    request = Request(
        devices,
        microbatches,
        stages_per_device,
        costs or Costs(),
        memory_limit,
        objective,
        replicas,
        minibatches,
        time_limit,
    )
    return build(name, request)


def build(name: str, request: Request) -> Schedule:
    """The schedule of that name, once what is asked of it makes sense."""
    recipe = find_recipe(name)
    _check(recipe, request)
    return recipe.build(request)


def _check(recipe: Recipe, request: Request) -> None:
    for word in ("devices", "microbatches", "minibatches"):
        if (value := getattr(request, word)) < 1:
            raise ConfigError(f"{word} is {value}, but a schedule needs at least 1")
    if request.replicas is not None and recipe.name != "pipedream":
        raise ConfigError(f"{recipe.name} has no replicated stages; only pipedream takes replicas")
    if request.objective not in ("makespan", "span"):
        raise ConfigError(f"objective is {request.objective!r}, but it must be makespan or span")
    if not request.time_limit > 0:
        raise ConfigError(f"time_limit is {request.time_limit} seconds, but a search needs more than 0")
    asked, allowed = request.stages_per_device, recipe.stages_per_device
    if asked is not None and (asked < 1 or (allowed is not None and asked not in allowed)):
        takes = " or ".join(map(str, allowed)) if allowed else "at least 1"
        raise ConfigError(f"{recipe.name} takes {takes} stage{'' if allowed == (1,) else 's'} per device, not {asked}")
    stages = request.devices * (asked or max(allowed or (2,)))
    refuse_too_many(stages * request.microbatches * (2 * request.minibatches if recipe.name == "2bw" else 3))
    _ = request.limit  # one that makes no sense is told by recipes that need none, too


def refuse_too_many(actions: int) -> None:
    """Before they are made: a size with a few digits too many would fill the memory."""
    if actions > MOST_ACTIONS:
        raise ConfigError(f"that would be about {actions:,} actions; a schedule has up to {MOST_ACTIONS:,}")
