"""Gradients that the replicas have not exchanged yet, because their steps said `sync=False`.

Each replica has its own until a step exchanges them. An optimizer that uses them earlier makes the replicas' weights
differ, and nothing fails: it is noticed by the weights, which must not change meanwhile.
"""

from collections.abc import Iterable

from torch import nn

from gapless.errors import ConfigError


class Pending:
    """The steps since the last exchange, and the weights as they were then."""

    def __init__(self) -> None:
        self.steps = 0
        self._versions: list[tuple[nn.Parameter, int]] = []

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """One more step without an exchange; these are the weights that it has used."""
        self.steps += 1
        self.note(parameters)

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """The weights are rightly what they are."""
        if self.steps:
            self._versions = [(parameter, parameter._version) for parameter in parameters]

    def clear(self) -> None:
        self.steps, self._versions = 0, []

    def check_weights(self) -> None:
        """Raises if somebody has changed the weights since."""
        changed = sum(parameter._version != version for parameter, version in self._versions)
        if changed:
            raise ConfigError(
                f"{changed} of {len(self._versions)} parameters changed after {self._words()}, before the "
                "replicas exchanged gradients, so their weights differ now: load them again, and make the last step "
                "before optimizer.step() one with sync=True"
            )

    def check_nothing(self, call: str) -> None:
        """Raises if a call needs gradients that are complete."""
        if self.steps:
            raise ConfigError(
                f"{call} came after {self._words()}, whose gradients the replicas have not exchanged yet: make the "
                "last step before it one with sync=True, or drop them with the pipeline's zero_grad()"
            )

    def _words(self) -> str:
        return f"{self.steps} step{'s' if self.steps > 1 else ''} with sync=False"
