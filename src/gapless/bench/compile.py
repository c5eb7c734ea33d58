"""What compiling brings: the step of a GPT with compiled layers against the eager one, through the same pipeline."""

import contextlib
from typing import Any

import torch

from gapless.bench.rounds import Progress, median, ratio, silent, take_turns, timed
from gapless.pipeline.pipeline import Pipeline
from gapless.zoo.gpt import gpt, next_token_loss

TARGET = 1.0


def run(
    *,
    devices: int,
    microbatches: int,
    depth: int,
    width: int,
    vocab: int,
    samples: int,
    length: int,
    dropout: float,
    bf16: bool,
    backend: str,
    steps: int,
    rounds: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = gpt(vocab=vocab, width=width, depth=depth, heads=max(4, width // 128), context=length, dropout=dropout)
    ids = torch.randint(vocab, (microbatches * samples, length + 1), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    inputs, target = ids[:, :-1], ids[:, 1:]
    common: dict[str, Any] = {
        "devices": [device] * devices,
        "microbatches": microbatches,
        "loss": next_token_loss,
    }

    def step(pipe: Pipeline) -> None:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            pipe.step(inputs, target)
        if device.type == "cuda":
            torch.cuda.synchronize()

    with Pipeline(model, **common) as eager, Pipeline(model, compile={"backend": backend}, **common) as compiled:
        contestants = {
            "eager": timed(lambda: step(eager), steps),
            "compiled": timed(lambda: step(compiled), steps),
        }
        seconds = take_turns(contestants, rounds, progress, warmup=2)
        cold = compiled.compile_seconds
    return {
        "benchmark": "compile",
        "model": f"gpt of {depth} layers, width {width}, dropout {dropout:g}",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "devices": devices,
        "microbatches": microbatches,
        "samples": samples,
        "length": length,
        "precision": "bfloat16 by autocast" if bf16 else "float32",
        "seconds": median(seconds["compiled"]),
        "eager_seconds": median(seconds["eager"]),
        "ratio": ratio(seconds["eager"], seconds["compiled"]),
        "target": TARGET,
        "compile_seconds": cold,
        "rounds": seconds,
    }


def report(found: dict[str, Any]) -> str:
    tokens = f"{found['samples']} x {found['length']} tokens"
    return "\n".join(
        [
            f"{found['model']}, {found['precision']}, {found['device']}",
            f"{found['devices']} devices, {found['microbatches']} microbatches of {tokens}",
            "",
            f"eager     {1000 * found['eager_seconds']:8.1f} ms a step",
            f"compiled  {1000 * found['seconds']:8.1f} ms, after {found['compile_seconds']:.1f} s of compiling",
            f"faster by {found['ratio']:8.2f}  median of the rounds; meant: at least {found['target']:g} on a GPU",
        ]
    )
