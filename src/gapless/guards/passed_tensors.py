"""Tensors between layers."""

from .guard import Guard

SHARED_MEMORY = Guard(
    "tensors that share memory",
    "tensors that go to the next stage together and share memory in a way that can't be reproduced there",
    "in every step",
    "comparing the addresses of these tensors",
    "clone() one of them",
)
CHANGED_VIEWS = Guard(
    "views that are changed in place",
    "an input from another stage that is a view there and is changed in place: its gradients would be added in "
    "another order",
    "in every step",
    "one comparison for each input that is a view",
    "make the layer return a new tensor",
)
CHANGED_INPUTS = Guard(
    "inputs that are changed in place",
    "an input that a layer changes in place, although a second run of its forward needs it unchanged",
    "in every step",
    "comparing version counters of inputs",
    "make it return a new tensor",
)
CAPTURED_ACTIONS = Guard(
    "captured actions",
    "a CUDA graph that repeats an outdated state of its layers, their tensors or torch's settings, or what its code "
    "once got from Python's `random`, NumPy, a clock or a file",
    "in every step",
    "comparing addresses, numbers and settings of a stage once per step, and Python's profiler during a capture; a "
    "graph is captured again, or given up",
    blind_to="state more than 3 levels deep in objects; Python code in a backward",
)
