"""The studies of `examples/`: each works, goes on where it was stopped, and the docs are what its figures make."""

import html
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless

ROOT = Path(__file__).parent.parent
NEEDS = {"few_labels": "sklearn", "deep": "pycountry", "multilingual": "pycountry", "catalogues": "pycountry"}


@pytest.fixture(autouse=True)
def _beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def example(name: str) -> Any:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="pip install 'gapless[studies]'")
    return importlib.import_module(name)


@pytest.mark.parametrize(
    "name",
    [
        "same_curve",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("few_labels", "large_batch", "deep", "multilingual")),
    ],
)
def test_a_study_gives_figures_and_a_page_and_a_second_call_computes_nothing(name: str, tmp_path: Path) -> None:
    study, words = example(name).STUDY, ["--quick", "--folder", str(tmp_path)]
    main = example("study").main
    assert main(study, words) == 0
    figures, page = tmp_path / f"{name}.json", tmp_path / f"{name}.html"
    before = figures.read_bytes()
    assert study.title in html.unescape(page.read_text("utf-8"))
    assert main(study, words) == 0
    assert figures.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {figures.name, page.name}


def test_the_docs_are_made_from_the_figures() -> None:
    for path, text in example("studies").pages(ROOT / "docs" / "results").items():
        assert (ROOT / "docs" / path).read_text("utf-8") == text, "run: python examples/studies.py"


def test_a_pipeline_that_trains_otherwise_is_not_called_identical() -> None:
    same_curve = example("same_curve")
    settings = same_curve.Settings(steps=2, depth=1)
    subject = same_curve.OwnGpt(settings)
    plain = same_curve.plain_loop(subject, settings)
    assert same_curve.pipelined(subject, settings, 2, "1f1b") == plain
    other = same_curve.pipelined(subject, same_curve.Settings(steps=2, depth=1, microbatches=2), 2, "1f1b")
    assert other.bits != plain.bits
    assert other.weights != plain.weights
    told = same_curve.verdict({"first_other_step": 2, "same_weights": False})
    assert told == "differs from step 2"


def test_what_is_held_out_is_held_out_in_all_languages_under_all_of_its_names() -> None:
    known = example("catalogues").corpus(longest=40, characters=200, standards="iso3166-1")
    learnt, asked = ({pair.english for pairs in part.values() for pair in pairs} for part in (known.learn, known.ask))
    assert asked
    assert not learnt & asked
    assert all(pair.foreign != pair.english for pairs in known.learn.values() for pair in pairs)
    bolivia = {"bolivia", "bolivia, plurinational state of", "plurinational state of bolivia"}
    iran = {"iran", "iran, islamic republic of", "islamic republic of iran"}
    for names in (bolivia, iran):
        assert not (names & learnt and names & asked)
        assert len(names & (learnt | asked)) > 1
    (source, given), target = known.batch([next(iter(known.learn.values()))[0].both_ways()[0]])
    assert given[0, 1:].tolist() == [0 if token == 2 else token for token in target[0, :-1].tolist()]
    assert known.text(target[0].tolist()) == next(iter(known.learn.values()))[0].english
    assert source.shape == (1, 42)


def test_chrf_is_that_of_its_definition() -> None:
    chrf = importlib.import_module("grades").chrf
    assert chrf("paris", "paris") == 100
    assert chrf("", "paris") == chrf("xyz", "paris") == 0
    # "ab" for "abc": precision 1 for one and two characters, recall 2/3, 1/2 and 0 of three orders.
    precision, recall = (1 + 1 + 0) / 3, (2 / 3 + 1 / 2 + 0) / 3
    assert chrf("ab", "abc") == pytest.approx(100 * 5 * precision * recall / (4 * precision + recall))


def test_models_are_compared_at_equal_parameters_wide_first() -> None:
    multilingual = importlib.import_module("multilingual")
    sizes = multilingual.sizes_of("6x64x2,1x64x1,3x128x4,6x128x4")
    assert [tuple(map(str, pair)) for pair in multilingual.equals(sizes)] == [("T(3, 128, 4)", "T(6, 64, 2)")]


def test_the_group_that_gains_most_is_named_and_a_difference_within_chance_is_called_so() -> None:
    multilingual = importlib.import_module("multilingual")
    names = {"rich": 5000, "wealthy": 4000, "poor": 50, "poorer": 40}

    def figures(gains: dict[str, float]) -> Any:
        def run(grades: dict[str, float], parameters: int) -> dict[str, Any]:
            graded = {one: [grade, 0.0] for one, grade in grades.items()}
            return {"parameters": parameters, "grades": dict.fromkeys(multilingual.DIRECTIONS, graded)}

        runs = {
            "T(1, 8, 1)": run(dict.fromkeys(names, 10.0), 1),
            "T(2, 8, 1)": run({k: 10 + v for k, v in gains.items()}, 2),
        }
        runs[multilingual.COPY] = {**run(dict.fromkeys(names, 20.0), 0), "learnt": names}
        return multilingual.Figures({"settings": {"sizes": "1x8x1,2x8x1", "repeats": 1}, "runs": runs})

    poor = figures({"rich": 1.0, "wealthy": 2.0, "poor": 8.0, "poorer": 9.0})
    assert multilingual.most(poor, poor.groups) == "it rises most for the data-poorest (+8.5 ± 0.5 chrF)"
    rich = figures({"rich": 8.0, "wealthy": 6.0, "poor": 6.0, "poorer": 5.0})
    assert multilingual.most(rich, rich.groups) == (
        "it rises most for 2,000 names or more (+7.0 ± 1.0 chrF), not for the data-poorest (+5.5 ± 0.5). "
        "The next, less than 100, is within chance"
    )
    fallen = figures({"rich": -8.0, "wealthy": -6.0, "poor": -6.0, "poorer": -5.0})
    assert multilingual.most(fallen, fallen.groups) == "it does not rise"
    assert multilingual.rise(fallen)[0] == "From T(1, 8, 1) to T(2, 8, 1) quality rises for 0 of 2 groups of languages."


def test_a_gain_within_chance_is_not_called_help() -> None:
    few_labels = importlib.import_module("few_labels")  # the rule needs no digits
    assert few_labels.more_than_chance([0.06, -0.01, -0.01, -0.002]) == 0  # the mean is above 0, by one run of four
    assert few_labels.more_than_chance([0.05, 0.06, 0.04, 0.05]) == 1
    assert few_labels.more_than_chance([-0.05, -0.06, -0.04, -0.05]) == -1
    assert few_labels.answer([]) == "one run of each way does not tell."
    assert (
        few_labels.answer([0, 0, 0]) == "no. Fine-tuning is better by more than chance for none of 3 numbers of labels."
    )
    assert few_labels.answer([1, 0, -1]).startswith("partly. Fine-tuning is better by more than chance for 1 of 3")
    assert few_labels.answer([1, 1]).startswith("yes")
    assert few_labels.answer([0, -1]).endswith("It is worse for 1.")


def test_a_cure_helps_only_if_it_does_so_by_more_than_chance() -> None:
    deep = importlib.import_module("deep")
    losses: dict[str, list[float | None]] = {
        deep.SHALLOW: [2.0, 2.1, 2.2],
        deep.NEITHER: [3.0, 3.1, 3.2],
        deep.SCALED: [2.5, 2.61, 2.7],
        deep.CLIPPED: [3.2, 2.9, 3.2],
        deep.BOTH: [3.5, 3.61, None],  # the last has diverged
    }
    contest = deep.Contest(0.1, {way: [{"held_out": each} for each in some] for way, some in losses.items()})
    assert contest.depth_costs() == (
        "Without cures, at a rate of 0.1, depth hurts. "
        "The loss is higher by 1.000 ± 0.000 than that of the shallow model, in 3 of 3 runs."
    )
    assert contest.cure(deep.SCALED) == (
        "A scaled start helps. The loss is lower by 0.497 ± 0.006 than that without cures, in 3 of 3 runs."
    )
    assert contest.cure(deep.CLIPPED).startswith("Clipping logits makes no difference beyond chance.")
    assert contest.cure(deep.BOTH).startswith("The pair of cures makes it worse. The loss is higher by 0.505 ± 0.007 ")
    assert contest.cure(deep.BOTH).endswith(" in 2 of 2 runs. Runs that diverge: 1 instead of 0.")


def test_what_tests_a_digit_neither_teaches_it_nor_chooses_settings() -> None:
    few_labels = importlib.import_module("few_labels")
    targets = torch.arange(3 * 174) % 3
    learn, choose, test = few_labels.parted(targets)
    assert sorted(torch.cat([learn, choose, test]).tolist()) == list(range(len(targets)))  # each in one part
    for part, size in ((learn, 50), (choose, 40), (test, 84)):
        assert targets[part].bincount().tolist() == [size] * 3
    runs = [few_labels.new_digits(seed) for seed in range(5)]
    assert {digit for new in runs for digit in new} == set(range(10))


def test_more_labels_than_there_are_and_numbers_of_nothing_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """500 labels left no image for the test, and the page said NaN."""
    study, main = importlib.import_module("few_labels").STUDY, example("study").main
    for words, told in (
        (["--labels", "500"], "labels is '500', but there are 50 images of each digit to learn from: give less"),
        (["--labels", "few"], "labels is 'few', but it must be numbers with commas between them"),
        (["--labels", "2,0"], "labels is '2,0', but numbers must be above 0"),
        (["--seeds", "0", "--steps", "-1"], "--seeds 0 and --steps -1 can't be: numbers must be above 0"),
    ):
        assert main(study, ["--folder", str(tmp_path), *words]) == 2
        assert capsys.readouterr().err == f"python examples/few_labels.py: {told}\n"


def test_a_study_that_was_stopped_says_how_many_runs_it_was_meant_to_have() -> None:
    same_curve = example("same_curve")
    assert same_curve.Settings(devices="2,4", schedules="1f1b,zb-v", hub="gpt2").runs == 8
    few = same_curve.Settings(devices="8", schedules="all", hub="gpt2,llama")
    assert few.runs == len(same_curve.LINE) + 2 * len(same_curve.ALL)  # the GPT has 8 layers


class StoppedError(Exception):
    """As if somebody had pressed Ctrl-C."""


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = example("study")
    monkeypatch.setattr(study, "_SAVE", 0.0)  # a checkpoint after every update
    clock = [0.0]
    monkeypatch.setattr(study, "_clocks", lambda: (clock[0], clock[0]))

    def fitted(folder: str, stop: int | None) -> dict[str, Any]:
        def batch(number: int) -> tuple[Tensor, Tensor]:
            if number == stop:
                raise StoppedError
            asked.append(number)
            clock[0] += 1  # a second for each minibatch
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            return x, -x

        def run() -> dict[str, Any]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
            with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
                optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
                losses = study.train(results, pipe, optimizer, batch, 4, accumulate=2, rate=study.warmed_up(4, 2))
            return {"losses": losses, "weights": [value.tolist() for value in model.parameters()]}

        asked: list[int] = []
        quick = example("same_curve").STUDY
        results = study.Results(quick, quick.quick, tmp_path / folder)
        found: dict[str, Any] = results.run("a run", run)
        return {**found, "asked": asked}

    whole = fitted("whole", None)
    with pytest.raises(StoppedError):
        fitted("stopped", 5)
    rest = fitted("stopped", None)
    assert rest["asked"] == [4, 5, 6, 7]
    for times in (whole, rest):
        assert times["seconds"] == times["cpu_seconds"] == 8.0  # with those from before the stop
    assert {key: rest[key] for key in ("losses", "weights")} == {key: whole[key] for key in ("losses", "weights")}


def test_the_loss_of_an_update_is_the_mean_of_its_minibatches(tmp_path: Path) -> None:
    """It was divided by their number twice: a curve of 16 minibatches to an update was 16 times too low."""
    study = example("study")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    batches = [(torch.randn(4, 3), torch.randn(4, 3)) for _ in range(2)]
    wanted = sum(F.mse_loss(model(x), y).item() for x, y in batches) / 2
    results = study.Results(example("same_curve").STUDY, example("same_curve").STUDY.quick, tmp_path)
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        assert study.train(results, pipe, optimizer, batches.__getitem__, 1, accumulate=2) == pytest.approx([wanted])


def test_results_of_other_settings_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = example("same_curve").STUDY
    example("study").Results(study, study.quick, tmp_path).run("a run", dict)
    words = ["--quick", "--folder", str(tmp_path), "--steps", "3"]
    assert example("study").main(study, words) == 2
    assert "has results of other settings (--steps 2 " in capsys.readouterr().err
    assert json.loads((tmp_path / "same_curve.json").read_text("utf-8"))["settings"]["steps"] == 2
