"""Random numbers, and other state of the process."""

from .guard import Guard

UNSEEN_DRAWS = Guard(
    "unseen draws",
    "draws of scripted functions and custom operators that begin after the first step: they need a run of their own",
    "in every step",
    "asking torch's default generators for their state, before and after the forwards of a stage",
    "let the layer do so from the first step on",
    "draws that begin at the moment when another stage draws; draws of a stage while one of your threads keeps moving "
    "the generators",
)
BACKWARD_DRAWS = Guard(
    "draws in a backward",
    "random numbers of hooks and of custom autograd functions: those of the plain loop can't be had in a backward",
    "in every step",
    "a torch function mode around the first backward of a stage",
    "draw in the forward and keep what was drawn, or give each hook a torch.Generator of its own",
    "scripted functions; stages with compiled layers",
)
SHARED_GENERATORS = Guard(
    "generators of two stages",
    "a torch.Generator of your own that two stages, or a forward and a backward, draw from: in an order of the clock",
    "in every step",
    "looking up who drew from a generator first, at each draw from it",
    "give the layers of each stage a generator of their own, or draw from torch's default one, which gapless seeds for "
    "every layer",
    "compiled layers",
)
COMPILED_DRAWS = Guard(
    "draws in a compiled loss",
    "random numbers of a loss that torch.compile has compiled, which can't be seeded",
    "in every step",
    "asking torch's default generators for their state, around calls that compile",
    "leave it uncompiled",
)
PROCESS_SETTINGS = Guard(
    "settings of the process",
    "default dtype, deterministic algorithms, TF32, number of threads and other settings that a layer sets: they hold "
    "for the layers of other threads too",
    "in every step",
    "one look at a thread-local, where such a setting is set",
    "set it for the whole model before the step, or run the stages in processes of their own, with mesh=",
    "functions of torch's C module that were imported by name; backwards on a GPU; backwards of stages with compiled "
    "layers",
)
CALLERS_MODES = Guard(
    "modes of the caller",
    "function modes, dispatch modes and saved-tensor hooks that are entered around a step: the threads of the devices "
    "do not have them",
    "in every step",
    "three questions to torch when a step begins",
    "enter it in the forward of the layers that need it",
)
GRAD_MODE = Guard(
    "grad mode of a layer",
    "a layer that leaves gradients switched on or off for those after it: the layers of other stages run in other "
    "threads",
    "in every step",
    "one question to torch before and after the forwards of a stage",
    "switch it inside the layer, with torch.no_grad()",
)
