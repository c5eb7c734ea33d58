"""A grid never lies: every action is in it, or it says that columns are too wide for that."""

import random
import re
from itertools import groupby

import pytest

import gapless
from gapless.view import text

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half")


def cases() -> list[tuple[str, int, int, int]]:
    chance = random.Random(5)
    return [
        (chance.choice(NAMES), 2 * chance.randint(1, 4), 8 * chance.randint(1, 5), chance.randint(24, 300))
        for _ in range(24)
    ]


@pytest.mark.parametrize(("name", "devices", "microbatches", "width"), cases())
def test_every_action_is_drawn_or_a_line_says_what_a_column_is(
    name: str, devices: int, microbatches: int, width: int
) -> None:
    timeline = gapless.simulate(gapless.make_schedule(name, devices=devices, microbatches=microbatches))
    *rows, last = [*text.grid(timeline, width).splitlines(), ""]
    said = " ".join([*rows[devices:], last]).strip()
    for device, row in enumerate(rows[:devices]):
        cells = row[len(str(devices - 1)) + 1 :]
        if not said:
            found = re.findall("[FBIWR][0-9]*", re.sub(r"(?<=[ ·])[0-9]+(?=[FBIWR])", "", f" {cells}"))
            kinds = [each[0] for each in found]
            assert kinds == [str(action.kind) for action in timeline.schedule.rows[device]]
            numbers = {
                kind: {len(each) > 1 for each in group} for kind, group in groupby(sorted(found), lambda each: each[0])
            }
            assert all(len(both) == 1 for both in numbers.values())
            assert "F-" not in cells
        else:
            column = float(timeline.makespan) / max(10, width - len(str(devices - 1)) - 1)
            assert column > min(end - start for _, start, end in timeline.all_spans)
            assert said.startswith(f"1 column = {column:.3g} of time")
            for number, shown in enumerate(cells):
                assert shown in "FBIWR·"
                times = dict.fromkeys("FBIWR", 0.0)
                for action, start, end in timeline.spans(device):
                    both = min(float(end), (number + 1) * column) - max(float(start), number * column)
                    times[str(action.kind)] += max(0.0, both)
                times["·"] = column - sum(times.values())
                assert times[shown] >= max(times.values()) - 1e-9
