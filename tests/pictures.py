"""The pictures of the README and the docs, each drawn by its command in docs/gallery.md.

`python -m tests.pictures`, from the root of the project, draws them again.
"""

import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gapless.cli import main

DOCS = Path(__file__).parent.parent / "docs"
FOLDER = DOCS / "pictures"


def commands() -> dict[str, list[str]]:
    """The words of each command, by the name of its picture."""
    page = (DOCS / "gallery.md").read_text("utf-8")
    found = re.findall(r"^```sh\ngapless (.*)\n```\n\n!\[.*\]\(pictures/(.*)\)$", page, re.MULTILINE)
    assert len(found) == page.count("```sh")
    return {name: shlex.split(words) for words, name in found}


def pictures() -> Iterator[tuple[str, str]]:
    """Each with its name, without the words on hover, which are most of a file."""
    with tempfile.TemporaryDirectory() as folder:
        for name, words in commands().items():
            assert words[words.index("--figure") + 1] == name
            assert main([str(Path(folder, word)) if word == name else word for word in words]) == 0
            yield name, re.sub(r"><title>[^<]*</title></\w+>", "/>", Path(folder, name).read_text("utf-8"))


if __name__ == "__main__":
    for file, picture in pictures():
        (FOLDER / file).write_text(picture, encoding="utf-8", newline="\n")
        print(f"wrote {FOLDER / file}", file=sys.stderr)
