"""The section "What is watched" of docs/restrictions.md, from the table of guards: `python -m tests.watched` writes it
anew, from the root of the project.
"""

import re
from pathlib import Path

from gapless.guards.table import GUARDS

PAGE = Path(__file__).parent.parent / "docs" / "restrictions.md"
_TITLE = "## What is watched\n"
_INTRODUCTION = """
Each of these would silently give other numbers than the plain loop. The pipeline checks for them, and raises an error
that names the fix; `error.guard` is the name in the first column. `print(pipe)` names the guards that can't check in
that pipeline. The tables are generated from the code.
"""
_HEADER = "| guard | watches for | when | cost | does not notice |\n|---|---|---|---|---|\n"


def section() -> str:
    """A table for each group."""
    parts = [_TITLE, _INTRODUCTION]
    for title, guards in GUARDS.items():
        rows = [(each.name, each.protects, each.looks, each.costs, each.blind_to) for each in guards]
        parts.append(f"\n### {title}\n\n{_HEADER}" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "".join(parts)


def page(text: str) -> str:
    """The page with its section made anew."""
    made = section().replace("\\", "\\\\")
    return re.sub(rf"^{_TITLE}.*?(?=^## )", f"{made}\n", text, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
