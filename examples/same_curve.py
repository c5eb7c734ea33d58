"""Synchronous pipelines learn what plain training learns, bit for bit: every schedule, every number of devices.

    python examples/same_curve.py --folder runs/studies

A GPT with dropout, and a GPT-2 and a Llama from Hugging Face, each trained for 100 steps on the source of Python's
standard library. The reference is the loop in this file. It calls the model and torch, and nothing of the pipeline:
before each layer it sets the seed that the docs name, since dropout has to draw something.
"""

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from study import Found, Report, Results, Study, curve, main, middles, numbers, option
from torch import Tensor, nn

import gapless
from gapless.train.data.sources import standard_library
from gapless.view import curves
from gapless.zoo.gpt import gpt, next_token_loss

CONTEXT, BATCH, VOCAB = 32, 16, 256
LINE = ("naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
TWICE = ("interleaved", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v", "auto")  # two stages for each device
ALL = (*LINE, *TWICE)  # all that are synchronous but `optimal`, which searches for minutes
SOME, FEW = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"), ("1f1b", "zb-v")


@dataclass(frozen=True)
class Settings:
    steps: int = option(100, "updates of each run")
    depth: int = option(5, "blocks of the GPT; its layers are three more")
    devices: str = option("2,4,8", "numbers of devices, with commas between them")
    microbatches: int = option(4, "parts of a minibatch of 16 sequences")
    schedules: str = option("some", "names, `all`, or `some`: all on 4 devices, and a few on other numbers of them")
    hub: str = option("gpt2,llama", "models of Hugging Face, with commas between them")
    hub_depth: int = option(2, "their layers")

    def places(self, layers: int | None) -> list[tuple[int, str]]:
        """Devices and schedules; `layers` limits the number of stages, and None is a graph that is cut anywhere."""
        found = []
        for count in numbers("devices", self.devices, int):
            names: Sequence[str] = self.schedules.split(",")
            if self.schedules == "all":
                names = ALL
            elif self.schedules == "some":
                names = SOME if (count == 4) != (layers is not None) else ALL if layers else FEW
            found += [(count, name) for name in names if not layers or count * (1 + (name in TWICE)) <= layers]
        return found

    @property
    def runs(self) -> int:
        """How many there are of all models, the plain loops aside."""
        return len(self.places(self.depth + 3)) + len(self.hub.split(",")) * len(self.places(None))


@dataclass(frozen=True)
class Curve:
    """What a run gives to compare: per step the bits of all losses, and at the end those of all weights."""

    losses: list[float]
    bits: list[str]
    weights: str


def batches(steps: int) -> Iterator[Tensor]:
    """Windows of Python source, of one byte more than the context."""
    text, generator = standard_library(), torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)].long()


def _digest(tensors: Sequence[Tensor], length: int = 16) -> str:
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(each.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:length]


# -- the models, each with its inputs and its plain loop ---------------------------------------------------------------


class OwnGpt:
    """The GPT of the zoo, a sequence of layers, with dropout."""

    words = "GPT with dropout"

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        self.model: nn.Sequential = gpt(width=32, depth=settings.depth, heads=4, context=CONTEXT, dropout=0.1)
        self.places = settings.places(len(self.model))
        self.loss: Callable[[Any, Any], Tensor] | None = next_token_loss

    def given(self, windows: Tensor) -> tuple[Any, Any]:
        return windows[:, :-1], windows[:, 1:]

    def plain(self, model: nn.Module, windows: Tensor, step: int, microbatch: int) -> Tensor:
        hidden = windows[:, :-1]
        assert isinstance(model, nn.Sequential)
        for number, layer in enumerate(model):
            torch.manual_seed(gapless.seed_of(0, step, microbatch, number))
            hidden = layer(hidden)
        return next_token_loss(hidden, windows[:, 1:])


class FromHub:
    """A model of Hugging Face, without dropout, with its own loss."""

    def __init__(self, words: str, model: nn.Module, settings: Settings) -> None:
        self.words, self.model, self.loss = words, model, None
        self.places = settings.places(None)

    def given(self, windows: Tensor) -> tuple[Any, Any]:
        return {"input_ids": windows, "labels": windows}, None

    def plain(self, model: nn.Module, windows: Tensor, step: int, microbatch: int) -> Tensor:
        loss: Tensor = model(input_ids=windows, labels=windows).loss
        return loss


Subject = OwnGpt | FromHub


def subjects(settings: Settings) -> Iterator[Subject]:
    """All models of the study."""
    yield OwnGpt(settings)
    for name in settings.hub.split(","):
        torch.manual_seed(0)
        yield FromHub(*_hub(name, settings.hub_depth), settings)


def _hub(name: str, depth: int) -> tuple[str, nn.Module]:
    """What it is, and a small one of it. Its weights are new: nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    if name == "gpt2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_embd": 32, "n_layer": depth, "n_head": 4, "n_positions": CONTEXT + 1}
        return "Hugging Face GPT-2", GPT2LMHeadModel(GPT2Config(**common, **rates, **sizes))
    if name == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": depth, "num_attention_heads": 4}
        config = LlamaConfig(**common, **sizes, num_key_value_heads=2, max_position_embeddings=CONTEXT + 1)
        return "Hugging Face Llama", LlamaForCausalLM(config)
    raise ValueError(f"hub has {name!r}, but it takes gpt2 and llama, with a comma between them")


# -- two ways to train -------------------------------------------------------------------------------------------------


def plain_loop(subject: Subject, settings: Settings) -> Curve:
    """Gradient accumulation on one device, as anybody would write it."""
    model = copy.deepcopy(subject.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    found = Curve([], [], "")
    for step, windows in enumerate(batches(settings.steps)):
        losses = []
        for number, part in enumerate(windows.tensor_split(settings.microbatches)):
            loss = subject.plain(model, part, step, number)
            (loss * (len(part) / len(windows))).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        _note(found, losses)
    return Curve(found.losses, found.bits, _digest(list(model.parameters())))


def pipelined(subject: Subject, settings: Settings, devices: int, schedule: str) -> Curve:
    """The same training as a pipeline."""
    model = copy.deepcopy(subject.model).train()
    found = Curve([], [], "")
    with gapless.Pipeline(
        model, devices=devices, schedule=schedule, microbatches=settings.microbatches, loss=subject.loss
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.003)
        for windows in batches(settings.steps):
            result = pipe.step(*subject.given(windows))
            optimizer.step()
            optimizer.zero_grad()
            _note(found, list(result.losses))
    return Curve(found.losses, found.bits, _digest(list(model.parameters())))


def _note(found: Curve, losses: Sequence[Tensor]) -> None:
    found.losses.append(torch.stack(list(losses)).mean().item())
    found.bits.append(_digest(losses, 8))


# -- the study ---------------------------------------------------------------------------------------------------------


def run(settings: Settings, results: Results) -> None:
    """The runs that tell most come first: a study that is stopped has something of each model."""
    plan = [(subject, *place) for subject in subjects(settings) for place in subject.places]
    for subject, devices, schedule in sorted(plan, key=lambda each: (each[2] not in FEW, each[2] not in SOME)):
        plain = results.run(f"{subject.words}, plain loop", partial(reference, settings, subject))
        name = f"{subject.words}, {devices} devices, {schedule}"
        results.run(name, partial(compared, settings, subject, plain, devices, schedule))


def reference(settings: Settings, subject: Subject) -> dict[str, Any]:
    got = plain_loop(subject, settings)
    return {"curve": curve(got.losses, settings.steps), "bits": got.bits, "weights": got.weights}


def compared(settings: Settings, subject: Subject, plain: Found, devices: int, schedule: str) -> dict[str, Any]:
    got = pipelined(subject, settings, devices, schedule)
    same = [ours == theirs for ours, theirs in zip(got.bits, plain["bits"], strict=True)]
    return {
        "model": subject.words,
        "devices": devices,
        "schedule": schedule,
        "curve": curve(got.losses, settings.steps),
        "first_other_step": same.index(False) + 1 if False in same else None,
        "same_weights": got.weights == plain["weights"],
    }


def verdict(run: Found) -> str:
    """A cell of the table."""
    if run["first_other_step"] is not None:
        return f"differs from step {run['first_other_step']}"
    return "identical" if run["same_weights"] else "losses identical, weights differ"


def report(found: Found) -> Report:
    runs, settings = found["runs"], found["settings"]
    steps = settings["steps"]
    made = [run for run in runs.values() if "schedule" in run]
    same = sum(verdict(run) == "identical" for run in made)
    models = list(dict.fromkeys(run["model"] for run in made))
    places = list(dict.fromkeys((run["schedule"], run["devices"]) for run in made))
    cells = {(run["model"], run["schedule"], run["devices"]): verdict(run) for run in made}
    rows = [
        (schedule, str(devices), *(cells.get((model, schedule, devices), "") for model in models))
        for schedule, devices in sorted(places, key=lambda place: (ALL.index(place[0]), place[1]))
    ]
    plain = runs[f"{models[0]}, plain loop"]
    panels = [curves.Panel("plain loop", models[0], [plain["curve"]])]
    panels += [
        curves.Panel(run["schedule"], f"{run['devices']} devices: {verdict(run)}", [run["curve"]])
        for run in made
        if run["model"] == models[0]
    ]
    return Report(
        [
            f"{same} of {len(made)} runs are bit-identical to the plain loop: the losses of all microbatches "
            f"in all {steps} steps, and the weights after the last."
            + ("" if same == len(made) else " The others are named in the table.")
        ],
        [(("schedule", "devices", *models), rows)],
        [
            "The reference is a loop in the same file. It does not use the pipeline's code.",
            "Both set the documented seed before each layer that draws, so dropout draws the same numbers.",
            f"A minibatch has {BATCH} sequences of {CONTEXT} bytes, in {settings['microbatches']} microbatches.",
            "The optimizer is AdamW. The devices are CPU threads of one process, with one intra-op thread each.",
            f"{len(made)} of {Settings(**settings).runs} planned runs. A combination without a row was not run yet.",
            "An empty cell was not run. The GPT has too few layers for two stages on each of 8 devices.",
        ],
        middles(steps),
        panels,
        ("step", "training loss"),
    )


STUDY = Study(
    name="same_curve",
    title="The same curve for every number of devices and every schedule",
    question="Does a synchronous pipeline train exactly as one device does?",
    settings=Settings(),
    quick=Settings(2, depth=1, devices="2", schedules="1f1b,zb-v", hub="gpt2", hub_depth=1),
    run=run,
    report=report,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
