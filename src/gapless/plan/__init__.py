"""From a model and a machine to a plan, in reading order:

profile   what the layers cost, and the machine that they run on
cut       which layers make which stage, and what a stage then costs
predict   what a step of these stages takes and holds
plan      the value: partition, schedule, microbatches and remat, with what they are predicted to take and to hold
explain   why the best plan is the best
search    every choice tried, judged by simulation under the memory limit
asynchronous  what else there is: without a flush, or not runnable yet
planner   measures a model, searches, and measures again where the best plan has microbatches of another size

`measure`, the functions for profiles, `replicate` and `Plan` are for programs; they are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.plan.asynchronous.replicate import replicate as replicate
    from gapless.plan.plan import Plan as Plan
    from gapless.plan.profile.file import parse_profile as parse_profile
    from gapless.plan.profile.file import read_profile as read_profile
    from gapless.plan.profile.file import write_profile as write_profile
    from gapless.plan.profile.measure import measure as measure

_HOMES = {
    "Plan": "plan",
    "measure": "profile.measure",
    "parse_profile": "profile.file",
    "read_profile": "profile.file",
    "replicate": "asynchronous.replicate",
    "write_profile": "profile.file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
