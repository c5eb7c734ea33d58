"""Timelines to draw."""

from dataclasses import replace

import pytest

from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from tests.open_pages import Opener, Shown

__all__ = ["COSTS", "EVIL", "NAMES", "Opener", "Shown", "timeline_of"]

NAMES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
COSTS = Costs(forward=1, input_grad=1.25, weight_grad=0.7, latency=0.05, kept_for_weight_grad=0.5)
EVIL = '</script><img src=x onerror="alert(1)">\'"&lt;{{script}}\u2028<svg onload=alert(2)>'


def timeline_of(name: str, devices: int = 4, microbatches: int = 8, costs: Costs = COSTS, label: str = "") -> Timeline:
    return simulate(make_schedule(name, devices=devices, microbatches=microbatches), costs, label)


@pytest.fixture(scope="session")
def eight() -> list[Timeline]:
    return [timeline_of(name) for name in NAMES]


def later(timeline: Timeline, by: int) -> Timeline:
    """The same, but begun so much later."""
    both = (timeline.starts, timeline.ends)
    starts, ends = (tuple(tuple(time + by for time in row) for row in rows) for rows in both)
    return replace(timeline, starts=starts, ends=ends)
