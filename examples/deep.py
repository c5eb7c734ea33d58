"""GPipe's two cures for very deep Transformers, with and without: smaller networks at the start, and clipped logits.

    pip install 'gapless[studies]'
    python examples/deep.py --folder runs/studies

An encoder-decoder of very many thin layers learns to translate names of all languages of pycountry's catalogues into
English, character by character, at a high learning rate, without a warm-up and without clipping of gradients: nothing
but the cures helps it. A shallow model, trained in the same way, shows what depth costs.
"""

import itertools
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from catalogues import PADDING, Corpus, corpus
from study import (
    SURE,
    Found,
    Report,
    Results,
    Study,
    curve,
    main,
    middles,
    more_than_chance,
    numbers,
    option,
    parameters_of,
    spread,
    train,
    whole,
)
from torch import Tensor

import gapless
from gapless.view import curves
from gapless.zoo.transformer import Transformer, translation_loss

LOST = 20.0  # a loss above it: diverged; a model that knows nothing has about 5


@dataclass(frozen=True)
class Settings:
    depth: int = option(48, "layers of the encoder, and as many of the decoder")
    shallow: int = option(4, "those of the shallow model")
    width: int = option(16, "of the model, an even number")
    updates: int = option(160, "of each run")
    batch: int = option(16, "names in a minibatch")
    seeds: int = option(3, "runs of each way and rate")
    rates: str = option("0.02", "learning rates, with commas between them")
    clip: float = option(5.0, "the most that a clipped logit may be, either way")
    standards: str = option("*", "catalogues, as a pattern such as iso639*")

    def model(self, way: str) -> dict[str, Any]:
        """The options of a way's transformer."""
        return {
            "width": self.width,
            "heads": 2,
            "depth": self.shallow if way == SHALLOW else self.depth,
            "scaled_by_depth": way in (SCALED, BOTH),
            "clip_logits": self.clip if way in (CLIPPED, BOTH) else None,
        }


SHALLOW, NEITHER, SCALED, CLIPPED, BOTH = "shallow", "deep", "deep, scaled start", "deep, clipped logits", "deep, both"
WAYS = (SHALLOW, NEITHER, SCALED, CLIPPED, BOTH)
CURES = {SCALED: "A scaled start", CLIPPED: "Clipping logits", BOTH: "The pair of cures"}
LOSS: Any = {"loss": translation_loss, "loss_weight": lambda target: (target != PADDING).sum()}
Batch = tuple[tuple[Tensor, Tensor], Tensor]


class Pipes:
    """A traced pipeline for each depth, with logits that are clipped or not. Tracing a deep model takes longer than a
    short run, so a run puts its own first weights into the pipeline that is there.
    """

    def __init__(self, settings: Settings, known: Corpus) -> None:
        self._settings, self._known = settings, known
        self._pipes: dict[Any, tuple[gapless.Pipeline, Transformer]] = {}

    def fresh(self, way: str, seed: int) -> tuple[gapless.Pipeline, Transformer]:
        torch.manual_seed(seed)
        options = self._settings.model(way)
        model = Transformer(vocab=self._known.vocabulary, **options)
        key = options["depth"], options["clip_logits"]
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

    pipe, model = pipes.fresh(way, seed)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=rate)
    losses = train(results, pipe, optimizer, batch, settings.updates, lost=LOST)
    held_out = largest = None
    if len(losses) == settings.updates and losses[-1] < LOST:
        with torch.no_grad():
            inputs, target = batch(0, asked, 256)
            logits = model.eval()(*inputs)
            held_out, largest = translation_loss(logits, target).item(), logits.abs().max().item()
        model.train()
    points = curve(losses, settings.updates)
    return {
        "held_out": held_out,
        "largest_logit": largest,
        "stopped_at": None if held_out is not None else len(losses),
        "curve": points,
        "parameters": parameters_of(model),
    }


def name_of(way: str, rate: float, seed: int) -> str:
    """Of a run, in the results."""
    return f"{way}, rate {rate:g}, seed {seed + 1}"


def run(settings: Settings, results: Results) -> None:
    known = corpus(longest=16, characters=400, standards=settings.standards)
    pipes = Pipes(settings, known)
    try:
        for seed, rate, way in itertools.product(range(settings.seeds), numbers("rates", settings.rates, float), WAYS):
            results.run(name_of(way, rate, seed), partial(learn, settings, results, known, pipes, way, rate, seed))
    finally:
        pipes.close()


# -- what the figures say ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """All ways at one learning rate, with the same seeds: run by run, they saw the same names."""

    rate: float
    runs: dict[str, list[Found]]

    def losses(self, way: str) -> list[float]:
        """On held-out names, of the runs that have not diverged."""
        return [run["held_out"] for run in self.runs[way] if run["held_out"] is not None]

    def lost(self, way: str) -> int:
        return len(self.runs[way]) - len(self.losses(way))

    def against(self, way: str, other: str) -> list[float]:
        """How much more loss, in the pairs of runs of which none has diverged."""
        pairs = zip(self.runs[way], self.runs[other], strict=True)
        both = [(mine["held_out"], theirs["held_out"]) for mine, theirs in pairs]
        return [mine - theirs for mine, theirs in both if mine is not None and theirs is not None]

    def row(self, way: str) -> tuple[str, ...]:
        losses, differences = self.losses(way), self.against(way, NEITHER)
        logits = [run["largest_logit"] for run in self.runs[way] if run["largest_logit"] is not None]
        return (
            way,
            f"{self.rate:g}",
            spread(losses) if losses else "none",
            spread(differences) if differences and way != NEITHER else "",
            f"{max(logits):.1f}" if logits else "none",
            f"{self.lost(way)} of {len(self.runs[way])}",
        )

    def depth_costs(self) -> str:
        differences = self.against(NEITHER, SHALLOW)
        verdict = {1: "depth hurts", 0: "depth does not hurt by more than chance", -1: "depth helps"}
        said = verdict[more_than_chance(differences)] if len(differences) > 1 else "there are too few runs to tell"
        return f"Without cures, at a rate of {self.rate:g}, {said}.{_told(differences, 'of the shallow model')}"

    def cure(self, way: str) -> str:
        differences = self.against(way, NEITHER)
        verdict = {1: "makes it worse", 0: "makes no difference beyond chance", -1: "helps"}
        said = verdict[more_than_chance(differences)] if len(differences) > 1 else "has too few runs to tell"
        lost, before = self.lost(way), self.lost(NEITHER)
        told = f" Runs that diverge: {lost} instead of {before}." if lost != before else ""
        return f"{CURES[way]} {said}.{_told(differences, 'without cures')}{told}"


def _told(differences: list[float], other: str) -> str:
    if not differences:
        return ""
    word, sign = ("higher", 1) if statistics.fmean(differences) > 0 else ("lower", -1)
    amounts = [sign * each for each in differences]
    count = sum(each > 0 for each in amounts)
    return f" The loss is {word} by {spread(amounts)} than that {other}, in {count} of {len(amounts)} runs."


def report(found: Found) -> Report:
    settings, runs = found["settings"], found["runs"]
    rates = numbers("rates", settings["rates"], float)
    seeds = whole(found, lambda seed: [name_of(way, rate, seed) for way in WAYS for rate in rates])
    contests = [
        Contest(rate, {way: [runs[name_of(way, rate, seed)] for seed in seeds] for way in WAYS}) for rate in rates
    ]
    answer = [words for each in contests for words in (each.depth_costs(), *map(each.cure, CURES))]
    parameters = {way: runs[name_of(way, rates[0], seeds[0])]["parameters"] for way in (SHALLOW, NEITHER)}
    return Report(
        answer,
        [
            (
                ("model", "rate", "held-out loss", "against deep", "largest logit", "diverged"),
                [each.row(way) for each in contests for way in WAYS],
            )
        ],
        [
            "The loss is in nats per character of held-out names: mean and standard deviation. Less is better.",
            f"{len(seeds)} of {settings['seeds']} planned runs per model, all with the same seeds.",
            f"Deep: {2 * settings['depth']} layers, half of them in the encoder, {parameters[NEITHER]:,} parameters.",
            f"Shallow: {2 * settings['shallow']} layers of the same width, {parameters[SHALLOW]:,} parameters.",
            f"A run has {settings['updates']} updates of {settings['batch']} names.",
            "Adam, a high learning rate, no warm-up, no clipping of gradients.",
            "Scaled start: the feed-forward networks begin with weights divided by the depth.",
            f"Clipped logits: no logit is above {settings['clip']:g} or below -{settings['clip']:g}.",
            f"A run has diverged when its loss is above {LOST:g} or not a number.",
            f"More than chance: the mean difference is above {SURE} times its standard error.",
            "GPipe saw models diverge after thousands of updates. These runs are too short to show that.",
        ],
        middles(settings["updates"]),
        [
            curves.Panel(way, f"rate {each.rate:g}", [run["curve"] for run in each.runs[way]])
            for each in contests
            for way in WAYS
        ],
        ("update", "training loss"),
    )


STUDY = Study(
    name="deep",
    title="Very deep Transformers, with and without GPipe's two cures",
    question="Does depth hurt, and do a smaller start of the feed-forward networks and clipped logits help?",
    settings=Settings(),
    quick=Settings(depth=1, shallow=1, width=4, updates=2, batch=2, seeds=1, rates="0.001", standards="iso4217"),
    run=run,
    report=report,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
