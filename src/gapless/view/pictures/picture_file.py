"""A picture in a file: SVG, or PDF and PNG made of it by cairosvg or by a browser, whichever is there."""

import shutil
import subprocess
import tempfile
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gapless.errors import ConfigError, GaplessError
from gapless.schedule.timeline import Timeline
from gapless.view import page

from .look import Look
from .svg import render, size_of

SUFFIXES = (".svg", ".pdf", ".png")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_HEADLESS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
_FINE = 2  # pixels of a PNG for one of the drawing
_LONG = 60.0  # seconds for a browser


def draw(path: str | Path, *timelines: Timeline, title: str = "", **look: Any) -> None:
    """Draws timelines on one time axis into a file: .html, an interactive page, or .svg, .pdf or .png, for a paper, a
    slide or a README. A page takes a title alone. PDF and PNG need cairosvg (`pip install cairosvg`) or an installed
    Chromium or Chrome.

    title      above the picture
    width      in millimetres
    font       a font family
    theme      "light" or "dark"
    greyscale  greys with hatches in place of colours
    labels     False: no numbers on the actions
    headings   False: no name and figures above each timeline
    """
    if isinstance(path, Timeline):
        raise ConfigError("draw takes the file first, and then the timelines: draw('schedule.svg', timeline)")
    for each in timelines:
        if not isinstance(each, Timeline):
            raise ConfigError(
                f"draw takes timelines, and this is a {type(each).__name__}: simulate(schedule) makes one, and "
                "pipe.step(...).timeline is one with Pipeline(..., timeline=True)"
            )
    if Path(path).suffix.lower() == ".html":
        if look:
            raise ConfigError(f"{', '.join(look)}: a page has no such option; leave it out, or draw an .svg")
        page.write(path, timelines, title or None, ranked=not any(timeline.unit for timeline in timelines))
        return
    kind = suffix_of(path)
    if strange := sorted(look.keys() - {each.name for each in fields(Look)}):
        known = ", ".join(each.name for each in fields(Look))
        raise ConfigError(f"a picture has no option {strange[0]!r}: it takes title, {known}")
    picture = render(timelines, title=title, hover=kind == ".svg", look=Look(**look))
    if kind == ".svg":
        Path(path).write_text(picture, encoding="utf-8", newline="\n")
    elif find_spec("cairosvg") is not None:
        _with_cairo(picture, Path(path), kind)
    else:
        _with_browser(picture, Path(path), kind)


def suffix_of(path: str | Path) -> str:
    """That of a picture."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{Path(path).name!r:.80} has no suffix of a picture: name it .svg, .pdf or .png")
    return suffix


def _with_cairo(picture: str, path: Path, kind: str) -> None:
    import cairosvg  # type: ignore[import-not-found]  # an extra of the user's

    if kind == ".pdf":
        cairosvg.svg2pdf(bytestring=picture.encode(), write_to=str(path))
    else:
        cairosvg.svg2png(bytestring=picture.encode(), write_to=str(path), scale=_FINE)


def _with_browser(picture: str, path: Path, kind: str) -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise ConfigError(
            f"{path.name!r:.80}: a {kind[1:].upper()} needs cairosvg or Chromium, and neither is installed: "
            "pip install cairosvg, or write an .svg"
        )
    width, height = size_of(picture)
    with tempfile.TemporaryDirectory() as folder:
        page, made = Path(folder, "picture.html"), Path(folder, f"picture{kind}")
        page.write_text(
            f"<!doctype html><meta charset=utf-8><style>@page{{size:{width}px {height}px;margin:0}}"
            f"body{{margin:0}}svg{{display:block;width:{width}px;height:{height}px}}</style>{picture}",
            encoding="utf-8",
        )
        wanted = [f"--print-to-pdf={made}", "--no-pdf-header-footer"]
        if kind == ".png":
            wanted = [f"--screenshot={made}", f"--window-size={width},{height}", f"--force-device-scale-factor={_FINE}"]
        words = [browser, *_HEADLESS, f"--user-data-dir={folder}", *wanted, page.as_uri()]
        try:
            ran = subprocess.run(words, capture_output=True, timeout=_LONG, check=False)
        except subprocess.TimeoutExpired:
            raise GaplessError(
                f"{Path(browser).name} took over {_LONG:g} s to draw {path.name}: pip install cairosvg, or write "
                "a .png or an .svg"
            ) from None
        if not made.exists():
            said = ran.stderr.decode(errors="replace").strip().splitlines()
            raise GaplessError(f"{Path(browser).name} could not draw {path.name}: {said[-1] if said else 'no word'}")
        shutil.move(made, path)
