"""`python -m benchmarks plan` runs to its end in a small size. No test asserts a speed."""

import pytest
import torch

from benchmarks.planner import fit as plan_fit
from benchmarks.planner import plan
from gapless.plan.profile.meter import has_expandable_segments


@pytest.mark.slow
def test_every_part_runs_and_is_reported() -> None:
    result = plan.run(quick=True, rounds=1, seconds=0.01)
    found = result.found
    rows = found["prediction"]["rows"]
    assert [row["model"] for row in rows] == ["emulated, even", "gpt, vocabulary 256"]
    # Bytes do not depend on how busy the machine is.
    assert -0.05 < rows[1]["bytes_difference"] < 0.1
    (cut,) = found["cuts"]["rows"]
    for partition in (cut["planned"], cut["best"]):
        assert sum(map(int, partition.split("|"))) == cut["layers"]
    (place,) = found["choice"]["rows"]
    assert place["slower"] >= 0
    assert place["picked"] == min(place["predicted"], key=place["predicted"].__getitem__)
    report = result.text
    assert "within -5% and +10%" in report
    assert "to the best" in report
    assert "the pick within 3% of the quickest" in report


def test_each_stream_counts_at_its_own_peak_and_the_caller_s_by_what_stays() -> None:
    caller, one, other = 0, 7, 8
    history = [
        {"action": "alloc", "stream": caller, "size": 1000},
        {"action": "alloc", "stream": one, "size": 300},
        {"action": "free_requested", "stream": one, "size": 300},
        {"action": "free_completed", "stream": one, "size": 300},
        {"action": "alloc", "stream": other, "size": 200},
        {"action": "alloc", "stream": one, "size": 100},
        {"action": "alloc", "stream": caller, "size": 50},
        {"action": "free_requested", "stream": caller, "size": 50},
    ]
    assert plan_fit._peaks(history, caller) == 1000 + 300 + 200


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_allocator_is_set_and_set_back() -> None:
    gpu = torch.device("cuda", 0)
    before = has_expandable_segments(gpu)
    with plan_fit._expandable_segments("cuda:0"):
        assert has_expandable_segments(gpu)
    assert has_expandable_segments(gpu) == before
