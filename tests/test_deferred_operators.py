"""A handler that defers a weight gradient is no use to a layer or a trace that never asks it: the lists in
`stage.split.interception` and `model.traced.operators` that decide who asks know every such handler.
"""

import inspect
import re
from functools import cache
from typing import Any

from torch import Tensor, nn

from gapless.model.traced import operators
from gapless.stage.split import interception
from gapless.stage.split.call_table import TABLE

# The files of handlers that let no weight gradient wait; a handler in any other file does.
WITHOUT_WEIGHTS = {
    "gapless.stage.norm.batchnorm_calls",
    "gapless.stage.guards.data_writes",
    "gapless.stage.guards.grad_fields",
    "gapless.stage.random.random_calls",
    "gapless.stage.split.call_mode",
    "gapless.stage.split.call_table",
}
DEFERRED = {function for function, handler in TABLE.items() if handler.__module__ not in WITHOUT_WEIGHTS}


def called(module: type) -> set[str]:
    """The functions of torch.nn.functional that a class calls, or those it inherits from."""
    parents = [parent for parent in module.__mro__ if parent.__module__.startswith("torch.nn.modules.")]
    return {name for parent in parents for name in re.findall(r"\bF\.(\w+)\(", _source(parent))}


@cache
def _source(module: type) -> str:
    """Its methods, one by one: to find a class in a file, Python reads the file as a whole."""
    methods = [part for part in vars(module).values() if inspect.isfunction(part)]
    return "".join(inspect.getsource(method) for method in methods)


def test_layers_of_torch_that_call_a_deferred_function_run_inside_the_mode() -> None:
    names = {function.__name__ for function in DEFERRED}
    modules: list[Any] = [each for each in vars(nn).values() if inspect.isclass(each) and issubclass(each, nn.Module)]
    found = {module for module in modules if names & called(module)}
    assert {nn.Linear, nn.Embedding, nn.Conv1d, nn.ConvTranspose3d} <= found
    assert [module for module in found if not issubclass(module, interception._HEAVY)] == []


def test_a_trace_asks_for_every_deferred_function() -> None:
    methods = {function for function in DEFERRED if getattr(Tensor, function.__name__, None) is function}
    functions = DEFERRED - methods  # a trace has one operator for both
    assert set(operators._HEAVY) == functions
    assert functions <= {operators._KNOWN.get(function, function) for function in operators.PYTHON.values()}
