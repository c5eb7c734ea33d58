"""The docs live: their commands are run and their output compared, their Python executed, their links followed.

```console   lines after `$` are run, beside the examples; what follows is what they print; a line `...` stands for any
             number of lines
```python    executed, the blocks of a file one after the other
```text, sh  only read
"""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gapless
from gapless.cli import main
from tests import reference, watched
from tests.programs import Programs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES = list(dict.fromkeys(PAGES))
_HEAVY = re.compile(r"(gapless (?:train|plan|checkpoint) [^|<>&;$]*?|python [^|<>&;$]*)(?: \| head -(\d+))?")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(page.read_text("utf-8")) if found == language]


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it is said to print."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    assert parts[0] == "", "a console block starts with a command"
    return [(command, printed) for command, _, printed in (part.partition("\n") for part in parts[1:])]


def matches(printed: str, said: str) -> bool:
    pattern = re.escape(said.strip("\n") + "\n").replace(re.escape("\n...\n"), r"\n(?:.*\n)*?")
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=name)
def test_commands_print_what_the_page_says(
    page: Path,
    tmp_path: Path,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {"COLUMNS": "100", "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for block in blocks(page, "console"):
        for command, said in commands(block):
            if heavy := _HEAVY.fullmatch(command):  # it loads torch, and needs no shell
                words = shlex.split(heavy[1].removeprefix("python "))
                ended = programs.run(*words, cwd=tmp_path, environment=environment)
                printed = ended.err + ended.out  # progress is not shown, and what is wrong comes alone
                printed = "".join(printed.splitlines(keepends=True)[: int(heavy[2]) if heavy[2] else None])
            elif light := re.fullmatch(r"gapless ([^|<>&;$]*)", command):
                main(shlex.split(light[1]))
                printed = "".join(capsys.readouterr())
            else:
                printed = in_a_shell(command, tmp_path, environment)
            assert matches(printed, said), f"{command}\nprints\n{printed}\nbut the page says\n{said}"


def in_a_shell(command: str, folder: Path, environment: dict[str, str]) -> str:
    run = subprocess.run(
        re.sub(r"^gapless ", f"{sys.executable} -m gapless ", command),
        shell=True,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    return run.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_section_is_there_twice(page: Path) -> None:
    found = re.findall(r"^## .+$", _BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE)
    assert len(found) == len(set(found)), found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, section in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not section or section in sections(file), f"{target}#{section}"


def sections(page: Path) -> list[str]:
    """Of its titles what a link to them has: lower case, without punctuation, - for a space."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_table_of_contents_is_one() -> None:
    """The sections and pages of the site, of its first page, and the sections that README links to."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    site = re.findall(r"^  - (\w[\w-]*):$|: ([\w-]+\.md)$", nav, re.MULTILINE)[1:]
    first = (ROOT / "docs" / "index.md").read_text("utf-8")
    listed = re.findall(r"^## (.*)$|^- \[[^]]+\]\(([\w-]+\.md)\)", first, re.MULTILINE)
    assert listed[: len(site)] == site
    linked = re.findall(r"docs/index\.md#([\w-]+)", (ROOT / "README.md").read_text("utf-8"))
    assert linked == [section.lower() for section, page in site if section]


def test_lines_are_not_too_long() -> None:
    """But for tables, whose rows can't be broken, code, and pages that are made from the code."""
    made = ("reference.md", "config.md", "studies.md", "results.md")
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        prose = re.sub(r"^( *)```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        prose = re.sub(r"<!-- results: begin -->.*?<!-- results: end -->", "", prose, flags=re.DOTALL)
        long = [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")]
        assert page.name in made or not long, (page.name, long)


def test_every_schedule_has_a_section() -> None:
    from gapless.schedule.recipes import RECIPES

    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "schedules.md").read_text("utf-8"), re.MULTILINE)
    assert [title for title in titles if title in RECIPES] == list(RECIPES)


def test_the_bubbles_for_numbers_of_microbatches_are_those_that_are_simulated() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` ((?:\| [\d.]+% ){4})\|$", (ROOT / "docs" / "schedules.md").read_text("utf-8"), re.M
    )
    assert [name for name, _ in rows] == ["1f1b", "zb-h1", "zb-v"]
    for name, said in rows:
        found = (gapless.compare([name], devices=8, microbatches=count).best.bubble for count in (8, 16, 32, 64))
        assert said == "".join(f"| {float(each):.1%} " for each in found)


def test_what_is_watched_is_made_from_the_table_of_guards() -> None:
    found = watched.PAGE.read_text("utf-8")
    assert found == watched.page(found), "make it anew: python -m tests.watched"
    assert watched.section() in found


def test_the_reference_is_made_from_the_docstrings() -> None:
    made = (ROOT / "docs" / "reference.md").read_text("utf-8")
    assert made == reference.page(), "make it anew: python -m tests.reference > docs/reference.md"


@pytest.mark.parametrize("call", [gapless.Pipeline, gapless.Pipeline.step, gapless.Pipeline.stream, gapless.make_plan])
def test_every_option_is_described(call: object) -> None:
    names = inspect.signature(call).parameters  # type: ignore[arg-type]
    described = re.findall(r"^ *([\w, ]+?) {2,}\S", inspect.getdoc(call) or "", re.MULTILINE)
    told = {name for names in described for name in names.split(", ")}
    assert set(names) - told - {"self"} == set()
