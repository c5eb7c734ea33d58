"""Pipeline-parallel training on PyTorch: exact, verified and simulated before it runs, and
visible while it runs.

The names below load when they are first used: looking at schedules never imports torch.

The packages, from the lowest to the highest; each says in its own `__init__` what its files are:

errors    what users are told; `units`: bytes and seconds as people write them; `user_file`: reading a user's file;
          `slow_work`: says what takes long
guards    what would silently make numbers wrong: one table
schedule  theory, without torch: actions, schedules, costs, verify and simulate
view      drawings of schedules and timelines
explore   a local page with sliders that redraw schedules
stage     tensors on one device
model     whole models, as layers or traced
plan      how to cut a model, and which schedule to run
run       runs a schedule: on threads, or on a process per device
checkpoint files on disk that training resumes from
distributed a process group that ranks can make again
pipeline  what users call: Pipeline and make_plan
zoo       models as people write them
train     training from a config
hf        Hugging Face's Trainer on a pipeline
cli       the command line
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gapless._version import __version__

if TYPE_CHECKING:
    from gapless.errors import GaplessError as GaplessError
    from gapless.model.reference import plain_step as plain_step
    from gapless.pipeline.pipeline import Pipeline as Pipeline
    from gapless.pipeline.planning import make_plan as make_plan
    from gapless.pipeline.planning import measure_links as measure_links
    from gapless.pipeline.result import Result as Result
    from gapless.run.streams.replicas.async_replicas import AsyncReplicas as AsyncReplicas
    from gapless.schedule.action import Schedule as Schedule
    from gapless.schedule.costs import Costs as Costs
    from gapless.schedule.lower.consecutive_steps import join_steps as join_steps
    from gapless.schedule.recipes import make_schedule as make_schedule
    from gapless.schedule.simulate import simulate as simulate
    from gapless.schedule.timeline import Timeline as Timeline
    from gapless.schedule.timeline import costs_of as costs_of
    from gapless.schedule.verify import verify as verify
    from gapless.stage.auxiliary import aux_loss as aux_loss
    from gapless.stage.offload.optimizer_state import offload_optimizer as offload_optimizer
    from gapless.stage.random.seeds import seed_of as seed_of
    from gapless.stage.split.deferred import defer as defer
    from gapless.view.comparison import compare as compare
    from gapless.view.comparison import schedules as schedules
    from gapless.view.pictures.picture_file import draw as draw

_HOMES = {
    "AsyncReplicas": "gapless.run.streams.replicas.async_replicas",
    "Costs": "gapless.schedule.costs",
    "GaplessError": "gapless.errors",
    "Pipeline": "gapless.pipeline.pipeline",
    "Result": "gapless.pipeline.result",
    "Schedule": "gapless.schedule.action",
    "Timeline": "gapless.schedule.timeline",
    "aux_loss": "gapless.stage.auxiliary",
    "compare": "gapless.view.comparison",
    "costs_of": "gapless.schedule.timeline",
    "defer": "gapless.stage.split.deferred",
    "draw": "gapless.view.pictures.picture_file",
    "join_steps": "gapless.schedule.lower.consecutive_steps",
    "make_plan": "gapless.pipeline.planning",
    "make_schedule": "gapless.schedule.recipes",
    "measure_links": "gapless.pipeline.planning",
    "offload_optimizer": "gapless.stage.offload.optimizer_state",
    "plain_step": "gapless.model.reference",
    "schedules": "gapless.view.comparison",
    "seed_of": "gapless.stage.random.seeds",
    "simulate": "gapless.schedule.simulate",
    "verify": "gapless.schedule.verify",
}

__all__ = [
    "AsyncReplicas",
    "Costs",
    "GaplessError",
    "Pipeline",
    "Result",
    "Schedule",
    "Timeline",
    "__version__",
    "aux_loss",
    "compare",
    "costs_of",
    "defer",
    "draw",
    "join_steps",
    "make_plan",
    "make_schedule",
    "measure_links",
    "offload_optimizer",
    "plain_step",
    "schedules",
    "seed_of",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gapless' has no attribute {name!r}")
    # `gapless.simulate` and `gapless.verify` are functions whose modules have the same name one level down.
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
