"""A guard: what it protects, when it looks, what that costs, what it says.

raise SHARED_BUFFERS.refusal(f"several stages change the buffer {name}")      fact: way out
"""

from dataclasses import dataclass
from typing import Literal

from gapless.errors import ConfigError, GaplessError

Looks = Literal["when the model is traced", "before the first step", "in every step", "now and then"]


@dataclass(frozen=True)
class Guard:
    """One thing that is watched. Texts are for users: `blind_to` is what it can't notice."""

    name: str
    protects: str
    looks: Looks
    costs: str
    way_out: str = ""
    blind_to: str = ""

    def refusal(self, fact: str, way_out: str | None = None, kind: type[GaplessError] = ConfigError) -> GaplessError:
        """The error that it raises; `way_out` is its own unless given."""
        error = kind(self.message(fact, way_out))
        error.guard = self.name
        return error

    def message(self, fact: str, way_out: str | None = None) -> str:
        """What it says."""
        way_out = self.way_out if way_out is None else way_out
        return f"{fact}{'; ' if ': ' in fact else ': '}{way_out}" if way_out else fact
