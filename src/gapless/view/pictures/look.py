"""How a picture looks: its width, its letters, its theme, and greys with hatches for those who print."""

from dataclasses import dataclass
from typing import Literal

from gapless.errors import ConfigError
from gapless.schedule.action import TRANSFERS, Kind
from gapless.view import legend

_PIXELS = 96 / 25.4  # of a millimetre, as browsers have it
_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,sans-serif'
_ODD = set("<>{};\"'\\")


@dataclass(frozen=True)
class Look:
    """What may be chosen of a picture.

    width      in millimetres, as a paper has it; None: 1200 pixels
    font       a font family in place of the system's
    theme      "light" or "dark"
    greyscale  greys with hatches in place of colours
    labels     numbers of microbatches on the actions
    headings   the name and the figures above each timeline
    """

    width: float | None = None
    font: str = ""
    theme: Literal["light", "dark"] = "light"
    greyscale: bool = False
    labels: bool = True
    headings: bool = True

    def __post_init__(self) -> None:
        if self.width is not None and not 40 <= self.width <= 2000:
            raise ConfigError(f"width is {self.width:g} mm, but a picture is from 40 to 2000 mm wide")
        if self.theme not in ("light", "dark"):
            raise ConfigError(f"theme is {self.theme!r}, but it must be 'light' or 'dark'")
        if _ODD & set(self.font):
            raise ConfigError(f"font is {self.font!r}, but it must be the name of a font family, such as Helvetica")

    @property
    def pixels(self) -> int | None:
        """Its width as drawings count it."""
        return None if self.width is None else round(self.width * _PIXELS)

    @property
    def family(self) -> str:
        return f'"{self.font}",{_FONT}' if self.font else _FONT

    def style(self, shades: set[tuple[Kind, int, int]]) -> str:
        """The rules of a style sheet, for the shades that are used."""
        dark = self.theme == "dark"
        rules = (_STYLE + (_DARK if dark else "")).replace("INK", legend.INK).replace("FAMILY", self.family)
        if self.greyscale:
            for shade in sorted_of(shades):
                rules += f".{shade_class(*shade)}{{fill:{_GREYS[shade[0]][0]};stroke:#333;stroke-width:.5}}"
            rules += "".join(f".{name}{{fill:url(#{name});pointer-events:none}}" for name, _ in self._hatches(shades))
            return rules + _PRINTED
        return rules + "".join(
            f".{shade_class(*shade)}{{fill:{legend.shade(*shade, dark=dark)}}}" for shade in sorted_of(shades)
        )

    def patterns(self, shades: set[tuple[Kind, int, int]]) -> str:
        """The lines on kinds, in greys."""
        return "".join(
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse"><path class="hatch" d="{lines}"/>'
            "</pattern>"
            for name, lines in self._hatches(shades)
        )

    def hatch_of(self, kind: Kind) -> str:
        """The class of the lines on a kind; nothing if it has none."""
        return f"h{legend.KINDS.index(kind)}" if self.greyscale and _GREYS[kind][1] else ""

    def _hatches(self, shades: set[tuple[Kind, int, int]]) -> list[tuple[str, str]]:
        kinds = {kind for kind, _, _ in shades}
        return [
            (self.hatch_of(each), _GREYS[each][1]) for each in legend.KINDS if each in kinds and self.hatch_of(each)
        ]


def shade_class(kind: Kind, tint: int, step: int) -> str:
    """The name of a fill in the style sheet."""
    return f"k{legend.KINDS.index(kind)}-{tint}-{step}"


def sorted_of(shades: set[tuple[Kind, int, int]]) -> list[tuple[Kind, int, int]]:
    """In an order that is always the same."""
    return sorted(shades, key=lambda shade: shade_class(*shade))


_RISING, _FALLING, _LINES, _BARS = "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", "M-1 -1L7 7M5 -1L7 1M-1 5L1 7", "M0 3H6", "M3 0V6"
_GREYS: dict[Kind, tuple[str, str]] = {  # of each kind a grey, and the lines on it
    Kind.FORWARD: ("#ffffff", ""),
    Kind.BACKWARD: ("#bdbdbd", ""),
    Kind.INPUT_GRAD: ("#e0e0e0", _RISING),
    Kind.WEIGHT_GRAD: ("#c6c6c6", _LINES),
    Kind.RECOMPUTE: ("#f2f2f2", _BARS),
    Kind.OFFLOAD: ("#ececec", ""),
    Kind.LOAD: ("#d4d4d4", ""),
    Kind.UPDATE: ("#9a9a9a", ""),
    Kind.VERDICT: ("#6a6a6a", ""),
    **dict.fromkeys(TRANSFERS, ("#dddddd", _FALLING)),
}

_STYLE = """
text{font:12px FAMILY;font-variant-numeric:tabular-nums;fill:#171a21}
.page{fill:#fff}.muted{fill:#5d6473}.name{font-size:14px;font-weight:650}.label{font-size:11px;font-weight:600;text-anchor:middle;fill:INK}
.tick{text-anchor:middle;fill:#5d6473}.grid{stroke:#eceef2}.title{font-size:20px;font-weight:650}
.inner{fill:url(#inner)}.outer{fill:url(#outer)}.inner-0{fill:#edeef2}.inner-1{stroke:#b9bfcc}.outer-0{fill:#f3f4f7}.outer-1{stroke:#d7dae2}
"""
_PRINTED = ".hatch{stroke:#333;stroke-width:.7;fill:none}.halo{stroke:#fff;stroke-width:3;paint-order:stroke}"
_DARK = """
text{fill:#e8eaef}.label{fill:INK}.page{fill:#14171c}.muted,.tick{fill:#9aa2b1}.grid{stroke:#262a33}
.inner-0{fill:#20242c}.inner-1{stroke:#4a5261}.outer-0{fill:#191d23}.outer-1{stroke:#323843}
"""
