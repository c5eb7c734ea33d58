"""Where a plan cuts a traced graph, as a value: without torch, so that a plan is read without it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gapless.errors import ConfigError


@dataclass(frozen=True)
class GraphCuts:
    """The cuts between stages, and by what their graph is known again.

    after       the nodes after which the graph is cut, by their numbers
    num_nodes   of the graph
    parameters  the names of those that each stage uses, buffers among them
    """

    after: tuple[int, ...]
    num_nodes: int
    parameters: tuple[tuple[str, ...], ...]

    def check(self, num_stages: int) -> None:
        """It makes so many stages."""
        bounds = (-1, *self.after, self.num_nodes)
        if {len(self.after) + 1, len(self.parameters)} != {num_stages} or any(a >= b for a, b in pairwise(bounds)):
            raise ConfigError(
                f"the plan has {num_stages} stages, but cuts a graph of {self.num_nodes} nodes after "
                f"{list(self.after)} and lists the parameters of {len(self.parameters)}"
            )

    @property
    def homes(self) -> dict[str, set[int]]:
        """The stages that use each parameter."""
        homes: dict[str, set[int]] = {}
        for stage, names in enumerate(self.parameters):
            for name in names:
                homes.setdefault(name, set()).add(stage)
        return homes

    def to_json(self) -> dict[str, Any]:
        return {"after": list(self.after), "nodes": self.num_nodes, "parameters": [*map(list, self.parameters)]}

    @classmethod
    def from_json(cls, data: Any) -> "GraphCuts":
        parameters = tuple(tuple(map(str, names)) for names in data["parameters"])
        return cls(tuple(map(int, data["after"])), int(data["nodes"]), parameters)
