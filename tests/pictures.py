"""The pictures of the README and the docs: `python -m tests.pictures`, from the root of the project.

docs/pictures/1f1b-and-zb-v.svg   what the schedule alone gains on 8 devices; the figures are the simulator's
"""

from pathlib import Path

from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.view.pictures import svg
from gapless.view.text import percent

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
DEVICES, MICROBATCHES = 8, 32


def pictures() -> dict[str, str]:
    """Each by the name of its file."""
    before, after = (
        simulate(make_schedule(name, devices=DEVICES, microbatches=MICROBATCHES)) for name in ("1f1b", "zb-v")
    )
    title = (
        f"{DEVICES} devices, {MICROBATCHES} microbatches: idle time {percent(before.bubble, 0)} → "
        f"{percent(after.bubble)}, in the same memory"
    )
    assert max(before.peak) == max(after.peak)
    return {"1f1b-and-zb-v.svg": svg.render([before, after], title=title, hover=False)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8", newline="\n")
        print(f"wrote {FOLDER / name}")
