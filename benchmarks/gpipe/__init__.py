"""The tables of GPipe and of zero bubble: largest, offload, throughput, breakdown, bubbles and overlap are
benchmarks. In order:

giants      the models of GPipe's tables, of any size and without data: what they hold and how many operations they take
largest     GPipe's table of the largest model per device
offload     the same with the host's memory, and ranks that try whether a model fits
throughput  GPipe's tables of normalised throughput
breakdown   where the time of a step goes, as measured
bubbles     zero bubble's bubble rates for published times
overlap     an optimizer step that does not wait, against the span of its schedule

published.toml has the numbers of the papers.
"""

import tomllib
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, Any] = tomllib.loads((Path(__file__).parent / "published.toml").read_text("utf-8"))
