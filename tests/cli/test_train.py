"""`gapless train`: the pipeline, the plan, the losses, a summary, and one sentence for what is wrong."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command, Refusal
from tests.train.configs import GPT, write

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the runs go."""
    monkeypatch.chdir(tmp_path)


def test_it_shows_the_pipeline_the_steps_and_a_summary(gapless: Command, tmp_path: Path) -> None:
    code, out, err = gapless(f"train {write(tmp_path)}")
    assert (code, err) == (0, "")
    pipeline, steps, summary = out.strip().split("\n\n")
    assert pipeline.splitlines()[0].startswith("Pipeline: zb-h1, 2 devices, 2 stages, 4 microbatches, predicted bubble")
    assert pipeline.splitlines()[1].startswith("  stage 0 on device 0 (cpu): layers 0 to ")
    assert pipeline.splitlines()[-1] == "run: runs/mine"
    first, last, saved = steps.splitlines()
    assert re.fullmatch(r"step 1 of 6   loss \d\.\d+ +\d+\.\d ms per step   [\d.]+ samples/s", first)
    assert last.startswith("step 6 of 6   loss ")
    assert saved == "step 6 of 6   saved step-00000006"
    assert re.fullmatch(
        r"6 steps, last loss \d\.\d+, \d+\.\d ms per step \(median\)\nreport: runs/mine/report.html", summary
    )


def test_json_is_one_object_and_the_same_losses_every_time(gapless: Command, tmp_path: Path) -> None:
    config = write(tmp_path)
    code, out, err = gapless(f"train {config} --json")
    assert code == 0
    assert "step 6 of 6   loss " in err
    found = json.loads(out)
    assert found["steps"] == len(found["losses"]) == 6
    assert found["loss"] == found["losses"][-1]
    assert found["plan"] is found["partition"] is found["predicted_step_seconds"] is None
    for options in ("", "--schedule gpipe", "--devices 3 --schedule zb-v"):  # all in the plain loop's bits
        assert json.loads(gapless(f"train {config} --fresh --json {options}").out)["losses"] == found["losses"]


def test_a_loss_that_is_no_number_is_null_in_json(gapless: Command, tmp_path: Path) -> None:
    """It was NaN, which is not JSON."""
    config = write(tmp_path, ('"cross_entropy"', '"mine.py:no_number"'))
    out = gapless(f"train {config} --json --steps 2 --set train.skip=9 --set run.report=false").out
    assert "NaN" not in out
    assert json.loads(out)["losses"] == [None, None]


def test_a_loss_may_import_what_lies_beside_it_while_it_runs(gapless: Command, tmp_path: Path) -> None:
    config = write(tmp_path, ('"cross_entropy"', '"late.py:loss"'))
    (tmp_path / "late.py").write_text("def loss(outputs, target):\n    import latest\n    return outputs.sum()\n")
    (tmp_path / "latest.py").touch()
    before = list(sys.path)
    code, _, err = gapless(f"train {config} --steps 1")
    assert (code, err, sys.path) == (0, "", before)


def test_options_go_before_what_the_config_says(gapless: Command, tmp_path: Path) -> None:
    out = gapless(f"train {write(tmp_path)} --steps 1 --devices 3 --schedule gpipe --microbatches 2").out
    assert out.startswith("Pipeline: gpipe, 3 devices, 3 stages, 2 microbatches")
    assert out.splitlines()[-2].startswith("1 step, last loss ")


def test_a_plan_is_made_first_and_compared_with_what_came(gapless: Command, tmp_path: Path) -> None:
    config = write(tmp_path)
    code, out, err = gapless(f"train {config} --plan auto --schedule 1f1b --microbatches 3 --steps 2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"the plan takes the place of schedule, microbatches in {config}"
    assert re.match(
        r"Pipeline: 1f1b, (1 device, 1 stage|2 devices, 2 stages), 3 microbatches", lines[1]
    )  # as the measured times have it
    (made,) = (line for line in lines if line.startswith("plan: "))
    assert re.fullmatch(
        r"plan: 1f1b on (1 device|2 devices), 3 microbatches of 2; layers per stage [\d,]+; predicted .* per step, "
        r".* samples/s",
        made,
    )
    assert re.fullmatch(r"predicted [\d.]+ ms, measured [\d.]+ ms: [+-][\d.]+%", lines[-2])


def test_a_plan_in_a_file_is_taken_as_it_is(gapless: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = write(tmp_path), tmp_path / "plan.json"
    assert gapless(f"plan {config} --seconds 0.01 --schedules gpipe -M 2 --write {plan} --json").code == 0
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    found = json.loads(gapless(f"train {config} --plan ../plan.json --json").out)
    written = json.loads(plan.read_text())
    names = {1: "1f1b on 1 device", 2: "gpipe on 2 devices"}
    chosen = names[len(written["partition"])]  # as the measured times have it
    assert found["plan"] == f"{chosen}, 2 microbatches of 3"
    assert found["partition"] == written["partition"]
    assert found["predicted_step_seconds"] == written["step_seconds"]
    assert found["losses"] == json.loads(gapless(f"train {config} --microbatches 2 --fresh --json").out)["losses"]
    assert "make one for these" in gapless(f"train {config} --fresh --plan {plan} --devices 4").err
    told = "microbatches is 3, but the plan has 2: leave these out, or make another plan"
    assert gapless(f"train {config} --fresh --plan {plan} --microbatches 3")[::2] == (2, f"gapless: {told}\n")
    nowhere = gapless(f"train {config} --fresh --plan nowhere.json")
    assert (nowhere.code, nowhere.err.count("\n")) == (2, 1)


def test_a_loss_that_is_not_finite_ends_it_with_exit_code_1(gapless: Command, tmp_path: Path) -> None:
    config = write(tmp_path, ("cross_entropy", "mine.py:no_number"))
    code, out, err = gapless(f"train {config}")
    assert code == 1
    assert out.startswith("Pipeline: ")
    assert err == (
        "gapless: stopped after 0 of 6 steps: the loss of step 1 is nan, in microbatch 0 of 4: a smaller learning rate "
        "or clip=1.0 may help\n"
    )


@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        ((), "--steps 0", "--steps is 0, but it must be at least 1"),
        ((), "--schedule zbv", "there is no schedule named 'zbv'; did you mean zb-v?"),
        ((), "--schedule 2bw", "pipeline.schedule is 2bw"),
        ((), "--stepz 3", "'--stepz' is not understood; did you mean --steps?"),
        ((("clip", "clop"),), "", "{}: train.clop is not understood; did you mean clip?"),
        (((":make", ":made"),), "", "model.name is 'mine.py:made', but mine.py has no function made; did you mean"),
        (((":batches", ":triples"),), "", "data: batch 1 of mine.py:triples is a tuple of 3, but it must be a pair"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    refused: Refusal, tmp_path: Path, changes: tuple[tuple[str, str], ...], line: str, message: str
) -> None:
    config = write(tmp_path, *changes)
    assert refused(f"train {config} {line}").startswith(message.format(config))


def test_no_file_and_sequences_that_are_too_long_for_the_model_are_one_sentence(
    refused: Refusal, tmp_path: Path
) -> None:
    """It was an IndexError in the first step."""
    told = "data.arguments.context is 9, but gpt takes up to 8 tokens: make it at most model.arguments.context"
    assert refused(f"train {write(tmp_path, text=GPT)} --set data.arguments.context=9") == told
    assert refused("train nowhere.toml") == "there is no file nowhere.toml"


def test_under_torchrun_it_refuses_to_do_all_the_work_once_per_rank(
    refused: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It trained the whole job as often as there were ranks, and all of them wrote over each other.
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    err = refused(f"plan {write(tmp_path)}")
    assert "runs in one process, but torchrun started 2, and each would do the whole job" in err
    assert "docs/cluster.md" in err


def test_an_example_config_is_printed_and_trains(gapless: Command, tmp_path: Path) -> None:
    code, out, err = gapless("train --example")
    assert (code, err) == (0, "")
    (tmp_path / "my.toml").write_text(out)
    small = (
        "--set model.arguments.width=8 --set model.arguments.depth=2 --set data.minibatch=8 --set pipeline.devices=2"
    )
    assert gapless(f"train my.toml --steps 1 {small}").out.endswith("\nreport: runs/my/report.html\n")
    assert gapless("train --keys").out == (ROOT / "docs" / "config.md").read_text("utf-8")
    assert gapless("train").err == (
        "gapless: CONFIG is missing: `gapless train --example > my.toml` writes one to start from\n"
    )


def test_a_run_goes_on_in_its_folder_with_other_devices_and_has_a_report(gapless: Command, tmp_path: Path) -> None:
    config = write(tmp_path)
    whole = json.loads(gapless(f"train {config} --json --folder whole").out)["losses"]
    assert gapless(f"train {config} --resume").err == (
        "gapless: runs/mine holds no checkpoint to resume from: leave --resume out to start a new run\n"
    )
    code, out, _ = gapless(f"train {config} --steps 4")
    assert (code, out.splitlines()[-1]) == (0, "report: runs/mine/report.html")
    code, out, _ = gapless(f"train {config} --resume --devices 3")
    assert "run: runs/mine, resumed after step 4 of 6" in out.splitlines()
    assert code == 0
    assert json.loads(gapless("view runs/mine --json").out)["losses"] == whole
    assert gapless("view runs/mine --html mine.html").out == "wrote mine.html\n"
    assert (tmp_path / "mine.html").read_text() == (tmp_path / "runs" / "mine" / "report.html").read_text()
    assert gapless("view runs/mine --follow").out == "wrote runs/mine/report.html\n"  # which has ended
    assert gapless("view nowhere").err == "gapless: nowhere holds no run: it has no run.json that can be read\n"
    assert "holds no run" in gapless("view mine.html").err
    done = "run: runs/mine, whose 6 steps are done: train more with --steps N, or start a new run with --fresh"
    assert done in gapless(f"train {config}").out.splitlines()
    started = gapless(f"train {config} --fresh --resume runs/mine/checkpoints/step-00000004 --json")
    assert json.loads(started.out)["losses"] == whole[4:]


def test_the_report_of_a_resumed_run_has_a_card_for_each_part_and_mixes_no_medians(
    gapless: Command, tmp_path: Path
) -> None:
    config = write(tmp_path)
    for words in ("3 --devices 2", "4 --devices 2", "6 --devices 3 --schedule gpipe"):
        assert gapless(f"train {config} --folder run --set run.timeline=1 --schedule 1f1b --steps {words}").code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.findall(r"<h2>(Steps [^<]*)</h2>", page) == ["Steps 1 to 4", "Steps 5 to 6"]
    assert "schedule (1f1b before), devices (2 cpu before)" in page
    assert page.count(">median step<") == 2  # one in each card, and none over both
    assert page.count('class="change"') >= 3
    assert "run run" not in page
    assert "· run · since step 5: gpipe · 3 devices ·" in page


def test_a_run_that_is_followed_has_a_page_that_reloads_itself_until_ctrl_c(
    gapless: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gapless(f"train {write(tmp_path)} --steps 1 --folder run")
    metrics, report = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "report.html"
    lines = metrics.read_text().splitlines(keepends=True)
    assert '"ended"' in lines.pop()
    metrics.write_text("".join(lines))  # as a run that is under way has it
    seen = []

    def ctrl_c(seconds: float) -> None:
        seen.append('"refresh":3' in report.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", ctrl_c)
    code, out, _ = gapless("view run --follow")
    assert (code, seen) == (0, [True])
    assert out.splitlines()[-1] == "wrote run/report.html"
    assert '"refresh":0' in report.read_text()
