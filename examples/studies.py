"""Writes docs/studies.md, and the page of every study, from the figures in docs/results.

    python examples/studies.py

No figure of these pages is typed by hand: run a study with `--folder docs/results`, then this.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from study import Study

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ("multilingual", "deep", "large_batch", "few_labels", "same_curve")
TOP = """# Studies

GPipe's experiments at a scale that a laptop can repeat. Each study is one command. It needs no download and gives the
same figures with the same seeds. `--quick` tries it in seconds, and `--help` lists its options. The same command
continues a study that was stopped.

```sh
pip install 'gapless[train,hf,studies]'
{commands}
```

Every study trains with `gapless.Pipeline` on CPU devices of one process. The models are small and trained for minutes:
read the figures as trends, not as what these methods can reach. `python examples/studies.py` generates this page from
the files in `docs/results`.
"""


def pages(folder: Path) -> dict[str, str]:
    """The text of every file that is made, by its path in docs."""
    found, parts, commands = {}, [], []
    for name in NAMES:
        study: Study = importlib.import_module(name).STUDY
        commands.append(f"{study.command} --folder runs/studies")
        file = folder / f"{name}.json"
        if file.exists():
            figures = json.loads(file.read_text("utf-8"))
            found[f"results/{name}.html"] = study.page(figures)
            parts.append(study.section(figures))
        else:
            parts.append(f"## {study.title}\n\n{study.question} It has not been run yet.")
    return {**found, "studies.md": "\n".join([TOP.format(commands="\n".join(commands)), *map("{}\n".format, parts)])}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python examples/studies.py",
        description="Write docs/studies.md and the studies' pages from the figures in docs/results.",
        epilog="example: python examples/studies.py",
    )
    parser.parse_args(arguments)
    for path, text in pages(DOCS / "results").items():
        (DOCS / path).write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote docs/{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
