"""GPipe's two cures for very deep Transformers, with and without: smaller networks at the start, and clipped logits.

    pip install 'gapless[studies]'
    python examples/deep.py --folder runs/studies

An encoder-decoder of many layers learns to translate names of all languages of pycountry's catalogues into English,
character by character, at several learning rates, without a warm-up and without clipping of gradients: what keeps it
from diverging are the cures alone.
"""

import itertools
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from catalogues import PADDING, Corpus, corpus
from study import Found, Report, Results, Study, curve, main, middles, option, parameters_of, spread, train, whole
from torch import Tensor

import gapless
from gapless.view import curves
from gapless.zoo.transformer import Transformer, translation_loss

LOST = 20.0  # a loss above it: diverged; a model that knows nothing has about 5


@dataclass(frozen=True)
class Settings:
    depth: int = option(12, "layers of the encoder, and as many of the decoder")
    width: int = option(32, "of the model, a multiple of 4")
    updates: int = option(100, "of each run")
    batch: int = option(32, "names in a minibatch")
    seeds: int = option(2, "runs of each way and rate")
    rates: str = option("0.002,0.016", "learning rates, with commas between them")
    standards: str = option("*", "catalogues, as a pattern such as iso639*")


WAYS = {
    "neither": {},
    "scaled start": {"scaled_by_depth": True},
    "clipped logits": {"clip_logits": 10.0},
    "both": {"scaled_by_depth": True, "clip_logits": 10.0},
}
LOSS: Any = {"loss": translation_loss, "loss_weight": lambda target: (target != PADDING).sum()}
Batch = tuple[tuple[Tensor, Tensor], Tensor]


class Pipes:
    """A traced pipeline for logits that are clipped and one for those that are not. Tracing a deep model takes longer
    than a short run, so a run puts its own first weights into the pipeline that is there.
    """

    def __init__(self, settings: Settings, known: Corpus) -> None:
        self._settings, self._known = settings, known
        self._pipes: dict[Any, tuple[gapless.Pipeline, Transformer]] = {}

    def fresh(self, options: dict[str, Any], seed: int) -> tuple[gapless.Pipeline, Transformer]:
        torch.manual_seed(seed)
        model = Transformer(
            vocab=self._known.vocabulary, width=self._settings.width, depth=self._settings.depth, heads=4, **options
        )
        key = options.get("clip_logits")
        if key not in self._pipes:
            pipe = gapless.Pipeline(model, devices=2, microbatches=2, schedule="1f1b", **LOSS)
            self._pipes[key] = pipe, model
        pipe, held = self._pipes[key]
        held.load_state_dict(model.state_dict())
        held.zero_grad()
        return pipe, held

    def close(self) -> None:
        for pipe, _ in self._pipes.values():
            pipe.close()


def learn(
    settings: Settings, results: Results, known: Corpus, pipes: Pipes, way: str, rate: float, seed: int
) -> dict[str, Any]:
    pairs = [pair for each in known.learn.values() for pair in each]
    asked = [pair for each in known.ask.values() for pair in each]

    def batch(number: int, among: Any = pairs, size: int = settings.batch) -> Batch:
        generator = torch.Generator().manual_seed(gapless.seed_of(seed, number, 0, 0))
        chosen = torch.randint(len(among), (size,), generator=generator).tolist()
        return known.batch([among[place].both_ways()[0] for place in chosen])

    pipe, model = pipes.fresh(WAYS[way], seed)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=rate)
    losses = train(results, pipe, optimizer, batch, settings.updates, lost=LOST)
    held_out = None
    if len(losses) == settings.updates and losses[-1] < LOST:
        with torch.no_grad():
            inputs, target = batch(0, asked, 256)
            held_out = translation_loss(model.eval()(*inputs), target).item()
        model.train()
    points = curve(losses, settings.updates)
    return {
        "held_out": held_out,
        "stopped_at": None if held_out is not None else len(losses),
        "curve": points,
        "parameters": parameters_of(model),
    }


def run(settings: Settings, results: Results) -> None:
    known = corpus(longest=16, characters=400, standards=settings.standards)
    pipes = Pipes(settings, known)
    try:
        for seed, rate, way in itertools.product(range(settings.seeds), _rates(settings.rates), WAYS):
            name = f"{way}, rate {rate:g}, seed {seed + 1}"
            results.run(name, partial(learn, settings, results, known, pipes, way, rate, seed))
    finally:
        pipes.close()


def _rates(words: str) -> list[float]:
    return [float(each) for each in words.split(",")]


def _cell(runs: list[Found]) -> str:
    losses = [run["held_out"] for run in runs if run["held_out"] is not None]
    lost = f"{len(runs) - len(losses)} of {len(runs)} diverged" if len(losses) < len(runs) else ""
    return ", ".join([*([spread(losses)] if losses else []), *([lost] if lost else [])])


def report(found: Found) -> Report:
    settings = found["settings"]
    rates = _rates(settings["rates"])
    seeds = whole(found, lambda seed: [f"{way}, rate {rate:g}, seed {seed + 1}" for way in WAYS for rate in rates])
    runs = {
        (way, rate): [found["runs"][f"{way}, rate {rate:g}, seed {seed + 1}"] for seed in seeds]
        for way in WAYS
        for rate in rates
    }
    rows = [(way, *(_cell(runs[way, rate]) for rate in rates)) for way in WAYS]
    lost = {way: sum(run["held_out"] is None for rate in rates for run in runs[way, rate]) for way in WAYS}
    total = len(rates) * len(seeds)
    finished = {
        (way, rate): statistics.fmean(run["held_out"] for run in each)
        for (way, rate), each in runs.items()
        if all(run["held_out"] is not None for run in each)
    }
    answer = [f"Diverged, of {total} runs each: " + ", ".join(f"{way} {count}" for way, count in lost.items()) + "."]
    if finished:
        least = {way: min((loss for (name, _), loss in finished.items() if name == way), default=None) for way in WAYS}
        told = ", ".join(f"{way} {'none finished' if loss is None else f'{loss:.3f}'}" for way, loss in least.items())
        answer.append(f"The least held-out loss at any rate: {told}.")
        top = max(rates)
        plain, cured = (finished.get((way, top)) for way in ("neither", "both"))
        if plain is not None and cured is not None:
            better = "better" if cured < plain else "no better"
            answer.append(
                f"At the highest rate the two cures are {better} than neither: {cured:.3f} against {plain:.3f}."
            )
    panels = [
        curves.Panel(way, f"rate {rate:g}", [run["curve"] for run in runs[way, rate]]) for rate in rates for way in WAYS
    ]
    parameters = next(iter(found["runs"].values()))["parameters"]
    layers = 2 * settings["depth"]
    return Report(
        answer,
        [(("cures", *(f"rate {rate:g}" for rate in rates)), rows)],
        [
            "Held-out loss in nats per character: mean and standard deviation.",
            f"Runs of each way: {len(seeds)} of {settings['seeds']} that were planned.",
            f"The Transformer has {layers} layers, half of them in the encoder, and {parameters:,} parameters.",
            f"A run has {settings['updates']} updates of {settings['batch']} names. Adam, no warm-up, no clipping.",
            "Scaled start: the feed-forward networks begin with weights divided by the depth. Clipped logits: to 10.",
            f"A run has diverged when its loss is above {LOST:g} or not a number.",
        ],
        middles(settings["updates"]),
        panels,
        ("update", "training loss"),
    )


STUDY = Study(
    name="deep",
    title="Very deep Transformers, with and without GPipe's two cures",
    question="Do a smaller start of the feed-forward networks and clipped logits keep deep models from diverging?",
    settings=Settings(),
    quick=Settings(depth=1, width=4, updates=2, batch=2, seeds=1, rates="0.001", standards="iso4217"),
    run=run,
    report=report,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
