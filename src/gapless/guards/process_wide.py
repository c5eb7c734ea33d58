"""Random numbers, and other state of the process."""

from .guard import Guard

UNSEEN_DRAWS = Guard(
    "unseen draws",
    "scripted functions and custom operators that start to draw random numbers after the first step",
    "in every step",
    "reading the state of torch's default generators before and after the forwards of a stage",
    "let the layer do so from the first step on",
    "draws that start while another stage draws; draws of a stage while one of your threads uses the generators",
)
BACKWARD_DRAWS = Guard(
    "draws in a backward",
    "random numbers in hooks and custom autograd functions, which can't be made equal to those of the plain loop",
    "in every step",
    "a torch function mode around the first backward of a stage",
    "draw in the forward and keep what was drawn, or give each hook its own torch.Generator",
    "scripted functions; stages with compiled layers",
)
SHARED_GENERATORS = Guard(
    "generators of two stages",
    "your own torch.Generator, if two stages, or a forward and a backward, draw from it: timing decides the order",
    "in every step",
    "a look-up at each draw",
    "give the layers of each stage a generator of their own, or draw from torch's default one, which gapless seeds for "
    "every layer",
    "compiled layers",
)
COMPILED_DRAWS = Guard(
    "draws in a compiled loss",
    "random numbers in a loss compiled by torch.compile, which can't be seeded",
    "in every step",
    "reading the state of torch's default generators around calls that compile",
    "leave it uncompiled",
)
PROCESS_SETTINGS = Guard(
    "settings of the process",
    "default dtype, deterministic algorithms, TF32, number of threads and other settings that a layer changes: they "
    "affect the layers of other threads too",
    "in every step",
    "one thread-local look-up when such a setting changes",
    "set it for the whole model before the step, or run each stage in its own process, with mesh=",
    "functions of torch's C module that were imported by name; backwards on a GPU; backwards of stages with compiled "
    "layers",
)
CALLERS_MODES = Guard(
    "modes of the caller",
    "function modes, dispatch modes and saved-tensor hooks around a step, which the threads of the devices do not have",
    "in every step",
    "three calls of torch when a step begins",
    "enter it in the forward of the layers that need it",
)
GRAD_MODE = Guard(
    "grad mode of a layer",
    "a layer that leaves gradients switched on or off for the layers after it, which may run in other threads",
    "in every step",
    "one call of torch before and after the forwards of a stage",
    "switch it inside the layer, with torch.no_grad()",
)
