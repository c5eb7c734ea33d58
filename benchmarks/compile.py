"""What compiling brings: the step of a GPT with compiled layers against the eager one, through the same pipeline.

example: python -m benchmarks compile --width 512 --bf16
"""

from typing import Annotated, Any

import torch

from benchmarks.planner.subjects import small_gpt
from benchmarks.runner.findings import BenchmarkResult, duel, of_rounds
from benchmarks.runner.parameters import Between, Devices, Microbatches, Rounds, Steps
from benchmarks.runner.rounds import Progress, fight, silent, timed
from gapless import Pipeline
from gapless.units import show_count


def run(
    *,
    devices: Devices = 2,
    microbatches: Microbatches = 4,
    depth: Annotated[int, "blocks of the GPT"] = 8,
    width: Annotated[int, "its width, a multiple of 4, and of 128 from 512 on"] = 256,
    vocab: Annotated[int, "its vocabulary"] = 256,
    samples: Annotated[int, "sequences in a microbatch"] = 4,
    length: Annotated[int, "tokens in a sequence"] = 128,
    dropout: Annotated[float, "dropout of the blocks", Between(0, 0.99)] = 0.0,
    bf16: Annotated[bool, "train under autocast to bfloat16"] = False,
    backend: Annotated[str, "backend of torch.compile"] = "inductor",
    steps: Steps = 2,
    rounds: Rounds = 5,
    progress: Progress = silent,
) -> BenchmarkResult:
    """On the GPU if there is one: both times, the gain, and what had to be spent on compiling before. Of the two
    warm-up rounds the first one compiles.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = small_gpt(width, depth, vocab, length, heads=max(4, width // 128), dropout=dropout)
    inputs, target = (each.to(device) for each in model.batch(microbatches * samples))
    common: dict[str, Any] = {"devices": [device] * devices, "microbatches": microbatches, "loss": model.loss}

    def step(pipe: Pipeline) -> None:
        pipe.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            pipe.step(inputs, target)
        if device.type == "cuda":
            torch.cuda.synchronize()

    layers = list(model.layers)
    with Pipeline(layers, **common) as eager, Pipeline(layers, compile={"backend": backend}, **common) as compiled:
        ours, theirs = (timed(lambda pipe=pipe: step(pipe), steps) for pipe in (compiled, eager))  # type: ignore[misc]
        found = fight(ours, "eager", theirs, rounds, progress, warmup=2)
        found |= {"compile_seconds": compiled.compile_seconds}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    precision = "bfloat16 by autocast" if bf16 else "float32"
    title = f"gpt of {show_count(depth, 'layer')}, width {width}, dropout {dropout:g}, {precision}, {name}\n{devices} "
    title += f"devices, {microbatches} microbatches of {samples} x {length} tokens, after "
    title += f"{found['compile_seconds']:.1f} s of compiling"
    figure = of_rounds("faster than eager layers by", found["gains"], "x", "more", "at least 1 on a GPU")
    return duel(title, {**found, "device": name}, figure, ours="compiled")
