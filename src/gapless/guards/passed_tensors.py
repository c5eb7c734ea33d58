"""Tensors between layers."""

from .guard import Guard

SHARED_MEMORY = Guard(
    "tensors that share memory",
    "tensors that go to the next stage together and share memory in a way that could not be made there again",
    "in every step",
    "comparing the addresses of the tensors that are handed on",
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
    "an input that a layer changes in place and a second run of its forward needs as it was",
    "in every step",
    "comparing version counters of inputs",
    "make it return a new tensor",
)
CAPTURED_ACTIONS = Guard(
    "captured actions",
    "a CUDA graph that would repeat what its layers, their tensors or torch's settings no longer are, or what their "
    "code was told by Python's `random`, NumPy, a clock or a file",
    "in every step",
    "comparing addresses, numbers and settings of a stage once per step, and Python's profiler during a capture; a "
    "graph is captured again, or given up",
    blind_to="what objects hold more than 3 levels deep; Python code in a backward",
)
