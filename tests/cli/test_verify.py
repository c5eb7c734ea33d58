"""`gapless verify`: a file is right, or all that is wrong with it is shown."""

import json
from pathlib import Path

from tests.cli.conftest import Command


def test_a_correct_file(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(gapless("show zb-v --format text").out)
    code, out, err = gapless("verify", str(file))
    assert (code, err) == (0, "")
    assert out == (
        "mine: correct (4 devices, 8 stages, 8 microbatches, 192 actions)\n"
        "it can't hang: 12 channels, at most 1 receive buffer each\n"
        "messages that wait for a free buffer: at most 6 per channel\n"
        "every stage runs its backwards in microbatch order: gradients are bit-identical to the plain loop\n"
    )
    file.write_text(gapless("show zb-v --forward-only --format text").out)
    assert "gradients" not in gapless("verify", str(file)).out


def test_violations_are_marked_in_the_drawn_schedule(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0: 0F0 0B0 0F1 0B1\n1: 1F1 1F0 1B0 1B1\n")
    code, out, err = gapless("verify", str(file))
    assert code == 2
    assert out == (
        "0: 0F0 [0B0] 0F1 0B1\n"
        "1: [1F1] 1F0 1B0 1B1\n"
        "\n"
        "device 0: 0B0 waits for 1I0 on device 1, which itself waits before 1F1\n"
        "    0: 0F0 0B0 0F1 0B1\n"
        "           ^^^\n"
        "device 1: 1F1 waits for 0F1 on device 0, which itself waits before 0B0\n"
        "    1: 1F1 1F0 1B0 1B1\n"
        "       ^^^\n"
    )
    assert err == "gapless: 2 violations in mine (2 devices, 2 stages, 2 microbatches, 8 actions)\n"


def test_backwards_out_of_order_are_correct_but_told(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0: 0F0 0F1 0I1 0W1 0I0 0W0\n")
    code, out, _ = gapless("verify", str(file))
    assert code == 0
    assert "mine: correct" in out
    assert "2 backwards are out of microbatch order: their gradients wait for their turn, in memory" in out


def test_json_for_programs(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0: 0F0 0B0\n1: 1F0 1B0\n")
    assert json.loads(gapless("verify --json", str(file)).out) == {
        "schedule": "mine",
        "ok": True,
        "in_order": True,
        "violations": [],
        "warnings": [],
        "buffers": [
            {"source": 0, "target": 1, "kind": "activation", "buffers": 1, "unsent": 0},
            {"source": 1, "target": 0, "kind": "gradient", "buffers": 1, "unsent": 0},
        ],
    }
    file.write_text("0: 0F0\n1: 1F0 1B0\n")
    code, out, _ = gapless("verify --json", str(file))
    assert code == 2
    assert json.loads(out)["violations"] == [
        {"rule": "complete", "device": 0, "position": 1, "message": "0B0 is missing"}
    ]


def test_ten_thousand_violations_are_counted_and_the_first_ones_shown(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0: " + " ".join(f"0F{m}" for m in range(10_001)) + " 0B0\n")
    code, out, err = gapless("verify", str(file))
    assert code == 2
    assert len(out.splitlines()) < 40
    assert out.endswith("and 9990 more\n")
    assert err == "gapless: 10,000 violations in mine (1 device, 1 stage, 10,001 microbatches, 10,002 actions)\n"
