"""The page of the explorer: the page of timelines, which opens empty, with a panel of sliders in front."""

from dataclasses import dataclass
from functools import cache

from gapless.explore.question import NAMES, Question
from gapless.schedule.recipes import RECIPES
from gapless.view import legend, page
from gapless.view.figures import Units
from gapless.view.template import filled, source

_CHOSEN = ("1f1b", "zb-v")


@dataclass(frozen=True)
class Slider:
    """A number that can be moved; where it is at `off`, if it has that, nothing is asked."""

    name: str
    label: str
    low: float
    high: float
    step: float
    what: str
    most: float  # that can be typed
    off: float | None = None
    word: str = ""  # shown at `off`

    @property
    def start(self) -> float:
        """Where it stands when the page opens."""
        value = getattr(Question, self.name)
        return float(self.off or 0) if value is None else float(value)


_STAGES = "Only interleaved, looped-bfs and auto can choose."
SLIDERS = (
    Slider("devices", "devices", 1, 32, 1, "How many devices there are.", 64),
    Slider("microbatches", "microbatches", 1, 128, 1, "Into how many parts the minibatch is cut.", 512),
    Slider("stages_per_device", "stages per device", 0, 8, 1, _STAGES, 8, 0, "own"),
    Slider("forward", "forward", 0, 4, 0.05, "Time of a forward on one device.", 1000),
    Slider("input_grad", "backward: input", 0, 4, 0.05, "Time of the input gradient.", 1000),
    Slider("weight_grad", "backward: weight", 0, 4, 0.05, "Time of the weight gradient.", 1000),
    Slider("recompute", "recompute", 0, 4, 0.05, "Time to recompute activations; 0 keeps them.", 1000, 0, "off"),
    Slider("latency", "latency", 0, 2, 0.01, "Time of a hop between devices.", 1000),
    Slider("memory_limit", "memory limit", 0, 64, 0.5, "Activations that a device may hold.", 1000, 0, "none"),
)


@cache
def render() -> str:
    """The page as text. It has no timeline: its script asks for them."""
    return page.assemble(
        page.shared(Units(), [], "overview"),
        title="gapless explore",
        subtitle="Move a slider, and every schedule is made and simulated again.",
        style=source("timeline.css") + source("explore.css", "gapless.explore"),
        script=source("explore.js", "gapless.explore"),
        front=filled(
            "panel.html", "gapless.explore", sliders=SLIDERS, recipes=[RECIPES[name] for name in NAMES], chosen=_CHOSEN
        ),
        key=legend.KINDS[:5],
    )
