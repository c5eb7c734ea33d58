"""Train a small GPT on real text, the source of Python's standard library, as a pipeline of 4 stages on CPU threads.

    python examples/train_gpt.py --seconds 60 --page demo/training.html

It prints the loss as it falls, and at the end what the schedule promised beside what was measured.
"""

import argparse
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch

import gapless
from gapless.zoo.gpt import gpt, next_token_loss

CONTEXT = 64


def standard_library(most: int = 4_000_000) -> torch.Tensor:
    """Bytes of Python source, file after file."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) > most:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(text: torch.Tensor, size: int, seed: int = 0):
    """Random windows of the text, and the same windows one byte later."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator)
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long to train (default 60)")
    parser.add_argument("--schedule", default="zb-h1", help="any name from `gapless schedules` (default zb-h1)")
    parser.add_argument("--page", default="demo/training.html", help="where the page with the timelines goes")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = gpt(vocab=256, width=64, depth=8, heads=4, context=CONTEXT)
    pipe = gapless.Pipeline(
        model, devices=["cpu"] * 4, schedule=options.schedule, microbatches=8, loss=next_token_loss, timeline=True
    )
    print(pipe)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    text = standard_library()
    print(f"\n{len(text):,} bytes of Python source; training for {options.seconds:.0f} s\n")

    timelines = []
    begin = shown = time.perf_counter()
    with pipe:
        for step, (inputs, target) in enumerate(batches(text, size=16), start=1):
            result = pipe.step(inputs, target)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            timelines = [*timelines[-8:], result.timeline]
            now = time.perf_counter()
            last = now - begin > options.seconds
            if step == 1 or now - shown > 5 or last:
                shown = now
                print(f"step {step:5}   loss {float(result.loss):.3f}   {(now - begin) / step * 1000:5.0f} ms per step")
            if last:
                break

    costs = gapless.costs_of(timelines)
    measured = replace(sorted(timelines, key=lambda t: t.makespan)[len(timelines) // 2], costs=costs, name="measured")
    predicted = gapless.simulate(measured.schedule, costs, "predicted from the measured costs")
    promised = f"{100 * predicted.bubble:.1f}% predicted for devices of their own"
    print(f"\nbubble: {100 * measured.bubble:.1f}% measured, {promised}")
    print("(4 devices share this machine's cores here, so an action takes longer while others run)")
    Path(options.page).parent.mkdir(parents=True, exist_ok=True)
    gapless.draw(options.page, measured, predicted)
    print(f"wrote {options.page}")


if __name__ == "__main__":
    main()
