"""What the code of a forward asks of the world outside is seen, however it is called; ordinary code asks nothing."""

import datetime
import functools
import pathlib
import random
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gapless.stage.graphs.code_run import CodeRun
from gapless.stage.graphs.graph_assumptions import Unchanged, why_not
from gapless.stage.graphs.graph_sharing import Likenesses
from gapless.stage.random.draws import UncapturableError
from gapless.zoo.gpt import gpt

GENERATOR, OWN = np.random.default_rng(), random.Random(3)
SCALE, TABLE = 2.0, {"depth": [1, 2]}


def now_and_then() -> float:
    return OWN.uniform(0.0, 1.0)


def closed_over() -> Callable[[], Any]:
    source = np.random.default_rng(4)
    return lambda: source.normal()


SOURCES: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "a random.Random of one's own": now_and_then,
    "time": time.perf_counter,
    "datetime": datetime.datetime.now,
    "numpy": lambda: np.random.rand(3),
    "numpy, beside a type of it": lambda: isinstance(np.random.rand(3), np.ndarray),
    "numpy's time": lambda: np.datetime64("now"),
    "numpy, elsewhere": lambda: (lambda module: module)(np),
    "a generator of numpy": lambda: GENERATOR.normal(),
    "one in a closure": closed_over(),
    "urandom": uuid.uuid4,
    "a file": lambda: pathlib.Path(__file__).read_text("utf-8"),
}


class Asks(nn.Module):
    """Through a helper of a helper."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(3, 3), functools.partial(self.helper, ask)

    def helper(self, ask: Callable[[], Any]) -> Any:
        return [each() for each in [ask]]

    def forward(self, x: Tensor) -> Any:
        self.ask()
        return self.linear(x)


@pytest.mark.parametrize("ask", SOURCES.values(), ids=SOURCES)
def test_what_is_asked_of_the_outside_is_seen_and_ends_the_capture(ask: Callable[[], Any]) -> None:
    layer = Asks(ask)
    likenesses = Likenesses([layer], quiet=True)
    with pytest.raises(UncapturableError, match="and a graph would repeat what it got"), likenesses.capturing():
        layer(torch.ones(2, 3))
    assert sys.getprofile() is None


def test_ordinary_layers_ask_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    more = {"num_hidden_layers": 1, "num_key_value_heads": 2}
    made = {
        name: getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes, **more))
        for name in ("Llama", "Mistral", "Qwen2", "Bert")
    }
    made["GPT2"] = transformers.GPT2Model(transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=16))
    made["zoo"] = gpt(vocab=16, width=8, depth=1, heads=2, context=8)
    for name, model in made.items():
        for _ in range(2):
            code = CodeRun()
            with code:
                model.train()(torch.ones(1, 8, dtype=torch.long))
                assert not any(isinstance(each, np.ndarray | np.integer) for each in model.parameters())
        assert code.source is None, (name, code.source)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE * len(TABLE["depth"])


def test_what_helpers_read_of_their_modules_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    module, code = sys.modules[__name__], CodeRun()
    with code:
        (lambda x: [scaled(each) for each in x])([torch.ones(2)])
    before = Unchanged([code])
    assert before == Unchanged([code])
    monkeypatch.setattr(module, "SCALE", 3.0)
    assert before != Unchanged([code])
    monkeypatch.setattr(module, "SCALE", 2.0)
    assert before == Unchanged([code])
    monkeypatch.setattr(module, "scaled", lambda x: x)
    assert before != Unchanged([code])


def test_a_layer_with_a_generator_is_not_captured() -> None:
    layer = nn.Linear(2, 2)
    assert why_not([layer], []) is None
    layer.source = np.random.default_rng()  # type: ignore[assignment]
    assert why_not([layer], []) == "its Linear draws random numbers, and a graph would repeat them"
