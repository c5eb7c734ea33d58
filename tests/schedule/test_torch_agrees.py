"""An oracle that somebody else wrote: torch's own generators make the same orders, and torch accepts our CSV.

Left out, because torch is wrong there: the text of its 1F1B has the last rank off by one, and its simulator raises on
its own schedules. Its looped BFS runs backwards from the last microbatch to the first, ours from the first to the last.
"""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs

from gapless.schedule import lower
from gapless.schedule.action import Schedule
from gapless.schedule.recipes import RECIPES, make_schedule

# What torch can't say: updates, replicated stages.
EXPRESSIBLE = sorted(name for name, recipe in RECIPES.items() if recipe.synchronous and name not in ("auto", "optimal"))


def their_order(generator: type[Any], K: int, M: int, v: int) -> list[str]:
    """The rows torch makes, without its idle slots and with overlapped pairs written flat.

    The order functions need a handful of numbers and no process group, so the object is made without its constructor.
    """
    schedule: Any = object.__new__(generator)
    rounds = max(1, M // K)
    vars(schedule).update(
        pp_group_size=K,
        _n_microbatches=M,
        n_local_stages=v,
        num_stages=K * v,
        _num_stages=K * v,
        _stages=[None] * v,
        number_of_rounds=rounds,
        microbatches_per_round=M // rounds,
    )
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(K)]
    return [" ".join(str(part) for action in row if action for part in action.sub_actions or (action,)) for row in rows]


def our_order(name: str, K: int, M: int, v: int | None = None) -> list[str]:
    schedule = make_schedule(name, devices=K, microbatches=M, stages_per_device=v)
    return [" ".join(map(str, row)) for row in schedule.rows]


@pytest.mark.parametrize("K", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved_is_torch_s_where_the_devices_divide_the_microbatches(K: int, v: int) -> None:
    for M in range(K, 5 * K + 1, K):
        assert our_order("interleaved", K, M, v) == their_order(theirs.ScheduleInterleaved1F1B, K, M, v)


@pytest.mark.parametrize("K", range(1, 9))
def test_interleaved_is_torch_s_wherever_torch_has_equal_rounds(K: int) -> None:
    for M in range(1, 30):
        if M % max(1, M // K) == 0:
            assert our_order("interleaved", K, M, 2) == their_order(theirs.ScheduleInterleaved1F1B, K, M, 2)


@pytest.mark.parametrize("K", range(1, 11))
def test_zb_v_is_torch_s(K: int) -> None:
    for M in range(1, 3 * K + 4):
        assert our_order("zb-v", K, M) == their_order(theirs.ScheduleZBVZeroBubble, K, M, 2)


@pytest.mark.parametrize("K", range(1, 11))
def test_dualpipe_v_is_torch_s(K: int) -> None:
    for M in range(2 * K, 4 * K + 4):
        assert our_order("dualpipe-v", K, M) == their_order(theirs.ScheduleDualPipeV, K, M, 2)


@pytest.mark.parametrize("K", range(1, 6))
def test_looped_bfs_has_torch_s_forwards_and_its_backwards_in_the_other_direction(K: int) -> None:
    for M, v in ((1, 2), (5, 2), (4, 3)):
        for own, other in zip(
            our_order("looped-bfs", K, M, v), their_order(theirs.ScheduleLoopedBFS, K, M, v), strict=True
        ):
            mine, torchs = own.split(), other.split()
            assert mine[: M * v] == torchs[: M * v]
            for i in range(M * v, 2 * M * v, M):
                assert mine[i : i + M] == torchs[i : i + M][::-1]


class Loader(theirs._PipelineScheduleRuntime):
    """torch's CSV loader, with the few numbers it needs instead of a process group."""

    def __init__(self, schedule: Schedule) -> None:
        self.pp_group_size = schedule.num_devices
        self._num_stages = schedule.num_stages
        self._n_microbatches = schedule.num_microbatches
        self.pipeline_order = {}
        self._stages = []


def torch_rows(text: str) -> dict[int, list[Any]]:
    return {
        rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }


@pytest.mark.parametrize("name", EXPRESSIBLE)
@pytest.mark.parametrize(("K", "M"), [(1, 1), (2, 3), (4, 8), (5, 7), (3, 12), (6, 2)])
def test_torch_s_validator_and_lowering_accept_our_csv(name: str, K: int, M: int) -> None:
    for schedule in (
        make_schedule(name, devices=K, microbatches=M),
        lower.fuse(make_schedule(name, devices=K, microbatches=M)),
    ):
        rows = torch_rows(schedule.csv())
        mapping = theirs._validate_schedule(rows, K, schedule.num_stages, M)
        assert mapping == {stage: schedule.placement.device(stage, 0) for stage in range(schedule.num_stages)}
        assert [" ".join(map(str, rows[rank])) for rank in range(K)] == [
            " ".join(map(str, row)) for row in schedule.rows
        ]
        # This raises where sends and receives can't be laid out: torch's own check that nothing hangs.
        written = theirs._add_send_recv(rows, lambda stage: mapping[stage], schedule.num_stages)  # noqa: B023
        ours = lower.add_transfers(schedule)
        for rank in range(K):
            assert sorted(map(str, written[rank])) == sorted(map(str, ours.rows[rank]))


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_torch_s_csv_loader_accepts_our_files(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, devices=4, microbatches=8)
    file = tmp_path / "schedule.csv"
    file.write_text(schedule.csv())
    loader = Loader(schedule)
    theirs.PipelineScheduleMulti._load_csv(loader, str(file))
    assert {rank: [str(action) for action in row] for rank, row in loader.pipeline_order.items()} == {
        rank: [str(action) for action in row] for rank, row in enumerate(schedule.rows)
    }


def test_we_read_the_csv_that_torch_writes() -> None:
    rows = torch_rows(make_schedule("interleaved", devices=2, microbatches=4).csv())
    padded = "".join(",".join(["", *map(str, row), ""]) + "\n" for row in rows.values())
    assert Schedule.parse(padded) == make_schedule("interleaved", devices=2, microbatches=4)


def test_torch_s_validator_refuses_what_we_refuse() -> None:
    for text in ("0F0,0F1,0B0\n", "0B0,0F0\n", "0F0,0W0,0I0\n"):
        with pytest.raises(AssertionError):
            theirs._validate_schedule(torch_rows(text), 1, 1, Schedule.parse(text).num_microbatches)
