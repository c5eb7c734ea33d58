"""Which schedule a pipeline has that was asked for none."""

import pytest
import torch
from torch import nn

from gapless import Costs, Pipeline
from gapless.pipeline.arguments.schedule_arguments import ScheduleArguments

NOTHING = ScheduleArguments(None, None, None, None, "none", None, None)
GPUS = [torch.device("cuda", number) for number in range(4)]


def blocks(count: int) -> nn.Module:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(4, 4), nn.Linear(4, 4)
    model.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(count))
    return model


@pytest.mark.parametrize(
    ("count", "expected"),
    [(8, "zb-v"), (16, "zb-v"), (7, "1f1b"), (12, "1f1b"), (28, "1f1b"), (32, "zb-v"), (0, "1f1b")],
)
def test_gpus_have_zb_v_where_two_stages_are_no_more_work_than_one(count: int, expected: str) -> None:
    with torch.device("meta"):
        assert NOTHING.default(blocks(count), GPUS) == expected
        assert NOTHING.default([nn.Linear(2, 2) for _ in range(count)], GPUS) == expected
        assert NOTHING.default(nn.Sequential(*(nn.Linear(2, 2) for _ in range(count))), GPUS) == expected


def test_no_device_has_more_of_equal_layers_than_under_1f1b() -> None:
    for devices in range(2, 9):
        for count in range(1, 100):
            chosen = NOTHING.default([len] * count, [torch.device("cuda", number) for number in range(devices)])
            each = -(-count // (2 * devices)) * 2 if chosen == "zb-v" else -(-count // devices)
            assert each <= -(-count // devices)
            assert chosen == "zb-v" or count % (2 * devices)


@pytest.mark.parametrize(
    "asked",
    [
        {"microbatches": 6},
        {"partition": [4, 4, 4, 4]},
        {"replicas": [1, 1, 1, 1]},
        {"remat": "stage"},
        {"costs": Costs()},
        {"stages_per_device": 1},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_was_asked_for_may_not_suit_zb_v(asked: dict[str, object]) -> None:
    model = [len] * 16
    assert NOTHING._replace(microbatches=7).default(model, GPUS) == "zb-v"
    assert NOTHING._replace(**asked).default(model, GPUS) == "1f1b"  # type: ignore[arg-type]


def test_other_devices_have_1f1b() -> None:
    model = [len] * 16
    assert NOTHING.default(model, [torch.device("cpu")] * 4) == NOTHING.default(model, GPUS[:1]) == "1f1b"
    with Pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))), devices=2, loss=nn.MSELoss()) as pipe:
        assert pipe.schedule.name == "1f1b"
