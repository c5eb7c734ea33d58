"""How well a model translates: names that it has not learnt, its answers, and their grades by language."""

import statistics
from collections import Counter
from collections.abc import Sequence

import torch
from catalogues import END, START, Corpus, Task

from gapless.zoo.transformer import Transformer

DIRECTIONS = ("into English", "from English")


def questions(known: Corpus, most: int) -> list[Task]:
    """Held-out names of all languages, the same for all models, in both directions."""
    found = []
    for number, pairs in enumerate(known.ask.values()):
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(number)).tolist()
        found += [task for place in order[:most] for task in pairs[place].both_ways()]
    return found


@torch.no_grad()
def translated(model: Transformer, known: Corpus, tasks: Sequence[Task]) -> list[str]:
    """The most likely character, one after the other."""
    found: list[str] = []
    for start in range(0, len(tasks), 256):
        (source, _), _ = known.batch(tasks[start : start + 256])
        target = torch.full((len(source), 1), START)
        for _ in range(known.longest + 1):
            following = model(source, target)[:, -1].argmax(-1, keepdim=True)
            target = torch.cat([target, following], dim=1)
            if (target == END).any(dim=1).all():
                break
        found += [known.text(row) for row in target[:, 1:].tolist()]
    return found


def chrf(got: str, wanted: str, orders: int = 6, beta: float = 2.0) -> float:
    """chrF (Popović, 2015) of one name, from 0 to 100: character n-grams of up to six, recall counts twice."""
    precisions, recalls = [], []
    for order in range(1, orders + 1):
        ours, theirs = (
            Counter(text[place : place + order] for place in range(len(text) - order + 1)) for text in (got, wanted)
        )
        if ours or theirs:
            common = sum((ours & theirs).values())
            precisions.append(common / max(1, sum(ours.values())))
            recalls.append(common / max(1, sum(theirs.values())))
    precision, recall = (statistics.fmean(each) if each else 0.0 for each in (precisions, recalls))
    if not precision + recall:
        return 0.0
    return 100 * (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


def graded(answers: Sequence[str], tasks: Sequence[Task]) -> dict[str, dict[str, list[float]]]:
    """For each direction and language: mean chrF, and the share that is exactly right in percent."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {direction: {} for direction in DIRECTIONS}
    for answer, task in zip(answers, tasks, strict=True):
        grades = found[DIRECTIONS[task.target_language != "en"]].setdefault(task.language, [])
        grades.append((chrf(answer, task.target), 100.0 * (answer == task.target)))
    return {
        direction: {
            language: [round(statistics.fmean(each), 2) for each in zip(*grades, strict=True)]
            for language, grades in by.items()
        }
        for direction, by in found.items()
    }
