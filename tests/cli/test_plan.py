"""`gapless plan`: the ranking, the reasons, the memory, and one sentence for what is wrong."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapless import units
from gapless.cli.planning.plan_report import report
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from gapless.units import show_seconds
from tests.cli.conftest import Command, Refusal
from tests.plan import profiles
from tests.programs import Programs
from tests.train.configs import GPT, write

BLOCK = {
    "name": "block",
    "repeat": 6,
    "forward": "1 ms",
    "parameters": "4 MiB",
    "activation": "8 MiB",
    "boundary": "1 MiB",
}
PROFILE: dict[str, Any] = {
    "profile": "six blocks",
    "minibatch": 8,
    "layers": [BLOCK],
    "links": [{"name": "wire", "latency": "20 us", "bandwidth": "10 GB/s"}],
}
VGG16 = Path(__file__).parents[2] / "examples" / "profiles" / "vgg16.txt"
QUICK = "--schedules 1f1b,zb-h1"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(PROFILE))
    return str(file)


def test_the_report(gapless: Command, profile: str) -> None:
    code, out, err = gapless(f"plan {profile} --devices 3 --memory 100MiB {QUICK}")
    assert (code, err) == (0, "")
    blocks = out.split("\n\n")
    assert blocks[0] == "six blocks: 6 layers, 24 MiB of parameters, minibatch of 8"
    ranking = blocks[1].splitlines()
    columns = "schedule devices stages microbatches remat step samples/s waits memory"
    assert ranking[0].split() == columns.split()
    assert ranking[1].startswith("*  zb-h1 ")
    assert ranking[2].startswith("   1f1b ")
    assert blocks[2].replace("\n", " ").startswith("zb-h1 on 3 devices, 8 microbatches of 1 is predicted to take")
    assert "\nplain training on one device: it takes at least 144 ms\ndata parallelism alone: " in blocks[2]
    assert blocks[3] == "layers per stage: 2,2,2"
    assert blocks[4].startswith("where the step of ")
    parts = ["compute", "recompute", "load imbalance", "bubble", "communication", "weight update"]
    assert [line.split("  ")[1] for line in blocks[4].splitlines()[1:]] == parts
    memory = blocks[5].splitlines()
    assert memory[0] == "memory per device, of 100 MiB:"
    assert memory[1].startswith("   0  PPPGGGOOOOOOO")
    assert memory[1].endswith("%")
    assert (
        memory[-1] == "  P parameters  G gradients  O optimizer state  A activations  b buffers  w workspace  s slack"
    )
    grid = out.splitlines()
    assert grid[-3].startswith("2 ")
    assert grid[-1].startswith("F forward")


def test_what_was_left_out_is_held_against_the_marked_plan_alone(gapless: Command, profile: str) -> None:
    """ "The best" was what had been found when a choice was left out, and in the table another plan."""
    out = gapless(f"plan {profile} --devices 3 {QUICK}").out
    step = re.findall(r"^\* .*?(\S+ m?s) ", out, re.MULTILINE)
    (said,) = re.findall(r"^left out \(the plan marked \* takes (.*)\):$", out, re.MULTILINE)
    assert step == [said]
    assert "the best takes" not in out


def test_json_has_the_plan_and_every_choice(gapless: Command, profile: str) -> None:
    found = json.loads(gapless(f"plan {profile} --devices 2 --memory 110MiB {QUICK} --json").out)
    assert found["profile"] == "six blocks"
    best = Plan.from_json(found["best"])
    assert best.step_seconds == found["plans"][0]["step_seconds"]
    steps = [plan["step_seconds"] for plan in found["plans"]]
    assert steps == sorted(steps)
    assert all(sum(plan["partition"]) == 6 for plan in found["plans"])
    assert all(rejected["reason"] for rejected in found["rejected"])
    assert sum(found["best"]["breakdown"].values()) == pytest.approx(steps[0])
    assert found["complete"] is True


def test_files_are_written(gapless: Command, profile: str, tmp_path: Path) -> None:
    page, plan, picture = (tmp_path / name for name in ("plan.html", "plan.json", "plan.svg"))
    code, out, err = gapless(f"plan {profile} -K 2 {QUICK} --html {page} --write {plan} --svg {picture} --top 1")
    assert (code, err) == (0, f"wrote {plan}\nwrote {picture}\nwrote {page}\n")
    best, text = Plan.read(plan), page.read_text()
    assert "<pre>" not in text  # it was the terminal's report in a page
    assert f"<title>six blocks · {best.recipe} · 2 devices · {show_seconds(best.step_seconds)} a step</title>" in text
    assert text.count('aria-label="device ') == len(best.memory)  # a bar for each
    assert f"<dt>samples per second</dt><dd>{best.throughput:,.4g}</dd>" in text
    assert text.count('<tr class="marked">') == 1
    assert "makespan, ms</button>" in text
    assert Plan.read(plan).title in out.replace("\n", " ")
    assert picture.read_text().startswith("<svg")


def test_a_trace_has_microseconds_of_the_planned_seconds(gapless: Command, profile: str, tmp_path: Path) -> None:
    """A step of 12 ms was one of 12 us there."""
    trace = tmp_path / "trace.json"
    code, out, _ = gapless(f"plan {profile} --devices 3 --schedules 1f1b --json --perfetto {trace}")
    assert code == 0
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    longest = max(event["ts"] + event["dur"] for event in events if event["pid"] == 1)
    step = json.loads(out)["plans"][0]["step_seconds"]
    assert 0.5 * step * 1e6 < longest < 1.01 * step * 1e6  # without the optimizer


def test_a_name_can_t_break_the_page(gapless: Command, tmp_path: Path) -> None:
    file, page = tmp_path / "profile.json", tmp_path / "page.html"
    file.write_text(json.dumps({**PROFILE, "profile": "</pre><script>alert(1)</script>"}))
    assert gapless(f"plan {file} -K 1 --html {page}").code == 0
    assert "<script>alert(1)" not in page.read_text()


def test_devices_may_differ(gapless: Command, profile: str) -> None:
    line = f"plan {profile} --devices 2 --speeds 2,1 --memory 1GiB,512MiB --schedules 1f1b -M 8 --json"
    found = json.loads(gapless(line).out)
    # Either of them may come first.
    assert sorted(zip(found["best"]["partition"], found["best"]["limits"], strict=True)) == [(2, 2**29), (4, 2**30)]


def test_an_allocator_that_loses_much_is_named_with_the_way_out(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**PROFILE, "device": "cuda:0", "slack": 0.25}))
    out = gapless(f"plan {file} {QUICK}").out.replace("\n", " ")
    assert "measured with an allocator that loses 25% of temporary memory; with PYTORCH_ALLOC_CONF=expandable" in out
    file.write_text(json.dumps({**PROFILE, "device": "cuda:0"}))
    assert "expandable" not in gapless(f"plan {file} {QUICK}").out


def test_a_gap_is_never_rounded_down() -> None:
    found = search(profiles.even(8), 2, SearchOptions(schedules=["1f1b"]), 8)
    assert found.best.searched == found.searched
    for gap, shown in ((0.0301, "3.1%"), (0.0003, "0.1%"), (0.03, "3.0%"), (1.1e-9, "0.0%")):
        told = replace(found.best, searched=replace(found.searched, gap=gap)).how_good
        assert f"no plan of these kinds can be more than {shown} faster" in told


def test_a_search_cut_short_says_so(gapless: Command, profile: str) -> None:
    out = gapless(f"plan {profile} --time-limit 0").out.replace("\n", " ")
    assert "the search was cut short by the time limit" in out
    told = json.loads(gapless(f"plan {profile} --time-limit 0 --json").out)
    assert told["cut_short"]
    assert "the search was cut short by the time limit, with " in told["how_good"]


def test_a_plan_that_is_printed_says_how_good_it_is_and_what_to_be_careful_about() -> None:
    found = search(profiles.even(8), [Device(2**30)] * 2, SearchOptions(schedules=["1f1b"], microbatches=8), 8)
    careful = replace(found.best, caution="ranks take turns")
    assert str(careful).splitlines() == [
        "1f1b on 2 devices, 8 microbatches of 1: 34.67 ms a step, 230.8 samples/s",
        "layers per stage: 4,4",
        f"the fullest device holds {units.show_bytes(careful.memory[0].total)} of 1 GiB",
        careful.how_good,
        "caution: ranks take turns",
    ]
    assert str(replace(found.best, searched=None)).count("\n") == 2
    again = replace(found, plans=(careful, *found.plans[1:]))
    assert report(profiles.even(8), again, 3).endswith("\n\ncaution: ranks take turns")


WRONG = {
    "profile": [
        ("--devices 0", "--devices is 0, but it must be at least 1"),
        ("--devices 99999", "--devices is 99999, but a plan is made for at most 4096"),
        ("--minibatch -1", "--minibatch is -1, but it must be at least 1"),
        ("--memory 24", "--memory is '24', which is 24 bytes: is the unit right, as in 24GiB?"),
        ("--memory lots", "--memory is 'lots', but it must be a number of bytes such as '24 MiB'"),
        ("--memory 1GiB,2GiB", "--memory lists 2 devices, but there are 4"),
        ("--speeds 1,0,1,1", "--speeds is '0', but a speed is a number above 0"),
        ("--slack nan", "--slack is nan, but it must be a number of at least 0"),
        ("--schedules zbv", "there is no schedule named 'zbv'; did you mean zb-v?"),
        ("--schedules 2bw", "the planner can't use 2bw, since it has no flush; use 1f1b, gpipe,"),
        ("--microbatches 9", "a minibatch of 8 samples can't be cut into 9 microbatches"),
        ("--memory 10MiB", "layer 0 (block.0) alone needs 16 MiB for its parameters (4 MiB), gradients and optimizer"),
        ("--memory 20MiB --schedules 1f1b", "nothing fits 20 MiB per device; the nearest is 1f1b on "),
        ("--write none/plan.json", "argument --write: there is no folder none: make it first; `gapless plan --help`"),
        ("--html none/page.html", "argument --html: there is no folder none: make it first"),
        ("--svg .", "argument --figure/--svg: . is a folder: name a file"),
        ("--devices x", "argument --devices/-K: invalid int value: 'x'; `gapless plan --help` shows how"),
        ("--devces 4", "'--devces' is not understood; did you mean --devices?"),
        (
            "--offload",
            "how fast the link to the host is, which the profile does not say: give --host-bandwidth, as 25GB/s",
        ),
        ("--host-memory 1GiB", "--host-bandwidth and --host-memory are for --offload: give that too"),
        (
            "--offload --host-bandwidth fast",
            "--host-bandwidth is 'fast', but it must be a bandwidth such as '100 GB/s'",
        ),
        ("--seconds 1", "--seconds is for a config, a .toml file: a profile has been measured already"),
        ("--profile out.json", "--profile is for a config, a .toml file: a profile has been measured already"),
    ],
    "config": [
        ("--shard-optimizer", "--shard-optimizer is for replicas, and a config is planned as one pipeline: write what"),
        ("--schedules zbv", "there is no schedule named 'zbv'; did you mean zb-v?"),
        ("--microbatches 9", "a minibatch of 4 samples can't be cut into 9 microbatches"),
        ("--memory 1GiB,2GiB,3GiB", "--memory lists 3 devices, but there are 2"),
        ("--memory 2MiB,lots", "--memory is 'lots', but it must be a number of bytes such as '24 MiB'"),
        ("--devices 99999", "--devices is 99999, but a plan is made for at most 4096"),
        ("--profile none/p.json", "argument --profile: there is no folder none: make it first"),
        ("--seconds -1", "--seconds is -1, but it must be a number of at least 0"),
    ],
    "vgg16": [
        ("--no-flush --schedules 1f1b", "--no-flush plans from a profile, for equal devices, and --schedules does"),
        (
            "--no-flush --slack 0",
            "--no-flush plans from a profile, for equal devices, and --slack does not apply there",
        ),
        ("--no-flush --shard-optimizer", "for equal devices, and --shard-optimizer does not apply there"),
        ("--bandwidth 25Gb/s", "--bandwidth is '25Gb/s', but it must be a bandwidth such as '100 GB/s'"),
        ("--latency 8", "--latency is '8', but a time of at most 1 seconds is expected"),
        ("--no-flush other", "argument --no-flush: invalid choice: 'other'"),
    ],
}


@pytest.mark.parametrize(("file", "line", "message"), [(file, *row) for file, rows in WRONG.items() for row in rows])
def test_what_is_wrong_is_one_sentence(
    refused: Refusal, profile: str, tmp_path: Path, file: str, line: str, message: str
) -> None:
    files = {"profile": profile, "config": write(tmp_path, text=GPT), "vgg16": VGG16}
    assert message in refused(f"plan {files[file]} {line}")


def test_a_bad_profile_is_one_sentence_with_its_file(refused: Refusal, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"layers": [{"forward": NaN}]}')
    told = f"{file}: layer 0: forward is nan, but it must be a time such as '1.5 ms'"
    assert refused(f"plan {file}").startswith(told)
    assert refused("plan nowhere.json") == "there is no file nowhere.json"


def test_planning_loads_no_torch(profile: str) -> None:
    program = (
        "import sys; from gapless.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'ortools', 'rich'} & set(sys.modules); "
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    words = ["plan", profile, "--devices", "2", "--schedules", "1f1b", "--html", f"{profile}.html"]
    run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# -- of a config ------------------------------------------------------------------------------------------------------

MEASURED = "--seconds 0.01 --schedules 1f1b,zb-h1 --microbatches 2"


def test_a_config_is_measured_and_planned_as_a_profile_is(gapless: Command, tmp_path: Path) -> None:
    config = write(tmp_path, text=GPT)
    profile, plan, page = (tmp_path / name for name in ("profile.json", "plan.json", "plan.html"))
    code, out, err = gapless(f"plan {config} {MEASURED} --memory 1GiB --profile {profile} --write {plan} --html {page}")
    assert (code, err) == (0, f"wrote {profile}\nwrote {plan}\nwrote {page}\n")
    blocks = out.split("\n\n")
    assert blocks[0] == "gpt: 5 layers, 24.12 KiB of parameters, minibatch of 4"
    assert 2 <= len(blocks[1].splitlines()) <= 4
    assert blocks[3].startswith("layers per stage: ")
    assert blocks[5].startswith("memory per device, of 1 GiB:")
    assert out.splitlines()[-1].startswith("F forward")
    assert set(Plan.read(plan).limits) == {2**30}
    # What was measured gives the same plan again, or one with replicas.
    again = json.loads(gapless(f"plan {profile} --schedules 1f1b,zb-h1 -M 2 -K 2 --memory 1GiB --json").out)
    assert again["best"]["step_seconds"] <= json.loads(plan.read_text())["step_seconds"] * (1 + 1e-9)


def test_options_go_before_what_a_config_says(gapless: Command, tmp_path: Path) -> None:
    line = (
        f"plan {write(tmp_path, text=GPT)} {MEASURED} --minibatch 8 --devices 3 --speeds 1,1,2 --memory 1GiB,1GiB,2GiB"
    )
    found = json.loads(gapless(f"{line} --json").out)
    assert found["profile"] == "gpt"
    best = found["best"]
    assert best["searched"]["devices"] == 3
    there = [2**30, 2**30, 2**31]
    assert best["limits"] == [there[number] for number in best.get("order", range(best["devices"]))]
    assert best["samples"] * best["microbatches"] == 8


def test_the_memory_of_a_config_is_the_limit_and_auto_keeps_to_what_it_says(gapless: Command, tmp_path: Path) -> None:
    config = write(
        tmp_path, ("microbatches = 2", "microbatches = 2\nschedule = '1f1b'\nplan = 'auto'\nmemory = '2GiB'"), text=GPT
    )
    found = json.loads(gapless(f"plan {config} --seconds 0.01 --json").out)
    assert {(plan["recipe"], plan["microbatches"]) for plan in found["plans"]} == {("1f1b", 2)}
    assert set(found["best"]["limits"]) == {2**31}


COUNTING = """

class Counting(nn.Linear):
    def forward(self, x):
        with open(__file__.replace("mine.py", "calls"), "a") as calls:
            calls.write(".")
        return super().forward(x)


def counting():
    return nn.Sequential(*(Counting(8, 8) for _ in range(4)), nn.Linear(8, 3))
"""


def test_ctrl_c_ends_measuring_soon(tmp_path: Path, programs: Programs) -> None:
    config, calls = write(tmp_path, (":make", ":counting"), ("depth = 5, dropout = 0.25", "")), tmp_path / "calls"
    with (tmp_path / "mine.py").open("a") as file:
        file.write(COUNTING)
    with programs.start("gapless", "plan", str(config), "--seconds", "600") as program:
        while not calls.exists() or calls.stat().st_size < 500:  # it measures by now, for a long time to come
            assert program.code is None
            time.sleep(0.02)
        program.send_signal(signal.SIGINT)
        assert program.ended(30.0) == (130, "", "gapless: stopped\n")


def test_a_plan_without_a_flush_has_replicas_of_stages(gapless: Command, refused: Refusal) -> None:
    found = json.loads(gapless(f"plan {VGG16} --devices 4 --bandwidth 1GB/s --no-flush pipedream --json").out)
    assert (found["replicas"], found["partition"], found["seconds"]) == ([3, 1], [17, 23], pytest.approx(0.205520896))
    assert [stage["weight_versions"] for stage in found["stages"]] == [2, 1]
    out = gapless(f"plan {VGG16} --devices 4 --bandwidth 1GB/s --latency 50ms --no-flush --memory 20GiB").out
    assert "times as fast as one device" in out
    told = "no way to cut 40 layers fits on 2 devices with 1 GiB: use more devices, or larger ones"
    assert refused(f"plan {VGG16} --devices 2 --no-flush --memory 1GiB") == told


def test_a_profile_of_pipedream_is_planned_with_a_flush_too(gapless: Command) -> None:
    found = json.loads(gapless(f"plan {VGG16} -K 2 --bandwidth 10GB/s --minibatch 4 --schedules 1f1b --json").out)
    assert sum(found["best"]["partition"]) == 40


def test_what_a_change_of_the_machine_brings_is_told(gapless: Command, refused: Refusal, profile: str) -> None:
    line = f"plan {profile} --devices 2 --memory 110MiB --schedules 1f1b -M 4 --what-if"
    out = gapless(line).out
    assert "\nwhat if" in out
    found = json.loads(gapless(f"{line} devices+1,memory+1GiB --json").out)
    assert [answer["change"] for answer in found["what_if"]] == ["devices+1", "memory+1GiB"]
    assert all(answer["gain"] >= 0 for answer in found["what_if"])
    assert refused(f"{line} gold+1").startswith("'gold+1' is not a change")
    assert "--what-if does not apply there" in refused(f"{line} --no-flush")


def test_devices_of_another_kind_have_a_profile_of_their_own(
    gapless: Command, refused: Refusal, profile: str, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.json"
    slow.write_text(Path(profile).read_text().replace('"forward": "', '"forward": "2'))
    line = f"plan {profile} --device-profiles 1,{slow}:2 --schedules 1f1b -M 4"
    out = gapless(line).out
    assert f"2 devices of {slow}: 0." in out
    assert "with each layer's own time on its kind of device a step takes" in out
    assert json.loads(gapless(f"{line} --json").out)["own_step_seconds"] > 0
    told = "--device-profiles lists 3 devices, but --devices is 2: leave it out"
    assert told in refused(f"{line} --devices 2")
    assert "--speeds and --device-profiles both say how fast" in refused(f"{line} --speeds 1,1,1")
    assert "has 'many', but it takes how many" in refused(f"plan {profile} --device-profiles many")


def test_plain_training_and_data_parallelism_are_always_told(gapless: Command, profile: str) -> None:
    out = gapless(f"plan {profile} --devices 4").out
    assert re.search(r"^plain training on one device: it takes at least [\d.]+ m?s$", out, re.MULTILINE)
    assert re.search(
        r"^data parallelism alone: ([\d.]+ m?s a step, 4 x 1f1b on 1 |it takes at least )", out, re.MULTILINE
    )


def test_what_has_no_flush_is_ranked_beside_the_plans_and_never_chosen(gapless: Command, profile: str) -> None:
    out = gapless(f"plan {profile} --devices 4").out
    table = out.split("\n\n")[1].splitlines()
    marks = {line.split()[1]: line[0] for line in table[1:-1] if line[0] in "an" and " of " in line}
    assert marks == {"pipedream": "a", "2bw": "a"}
    assert any(line.startswith("*  ") for line in table)
    assert table[-1].startswith("a  asynchronous: ")
    found = json.loads(gapless(f"plan {profile} --devices 4 --json").out)
    assert found["best"]["recipe"] not in ("pipedream", "2bw")
    assert {other["name"] for other in found["others"]} == set(marks)


def test_what_auto_costs_in_memory_is_told_against_1f1b(gapless: Command) -> None:
    told = r"^auto needs [\d.]+ GiB on its fullest device, 1f1b [\d.]+ GiB: \d+% more memory for a step that is \d+%"
    small = Path(__file__).parent.parent.parent / "examples" / "profiles" / "small_gpt.json"
    out = gapless(f"plan {small} --devices 2 --memory 8GiB --microbatches 8 --schedules 1f1b,auto").out
    assert re.search(told, out, re.MULTILINE)


def test_host_memory_is_used_where_that_is_faster(gapless: Command, profile: str, tmp_path: Path) -> None:
    asked = f"plan {profile} --devices 3 --memory 72MiB --schedules 1f1b --microbatches 8"
    usual = json.loads(gapless(f"{asked} --json")[1])
    code, out, err = gapless(f"{asked} --offload --host-bandwidth 50GB/s --write {tmp_path / 'plan.json'}")
    assert (code, err) == (0, f"wrote {tmp_path / 'plan.json'}\n")
    plan = Plan.read(tmp_path / "plan.json")
    assert plan.schedule.has_copies
    assert plan.step_seconds < usual["best"]["step_seconds"]
    assert "offloaded stages: 0" in out
    assert "of them in its host's memory" in out
    scarce = json.loads(gapless(f"{asked} --offload --host-bandwidth 50GB/s --host-memory 1MiB --json")[1])
    assert scarce["best"]["step_seconds"] == usual["best"]["step_seconds"]
    Path(profile).write_text(json.dumps(PROFILE | {"host": {"bandwidth": "50 GB/s"}}))
    assert json.loads(gapless(f"{asked} --offload --json")[1])["best"]["step_seconds"] == plan.step_seconds
