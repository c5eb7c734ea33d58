"""How close ranks on a GPU come to what it can do, against torch.distributed.pipelining.

One GPU is cut into equal parts, one for each rank (CUDA MPS). The same GPT is trained, or with --model llama a Llama
as people train one (Hugging Face's if transformers is installed, with AdamW; whole for gapless, cut by hand for torch)

    whole       on one part of the GPU, by a plain loop
    parts       a part of the model on each part of the GPU, at once, with nobody to wait for: the limit
    gapless     as a pipeline, by schedule and by what carries its tensors
    static      the same with static_shapes=True, as torch takes it for granted: hosts do not wait for messages
    graphed     parts and pipeline once more, with CUDA graphs
    torch       as a pipeline of torch.distributed.pipelining, over NCCL
    default     of a Llama: gapless without any option

    bound        limit / (1 - bubble), the bubble simulated with the times that the actions took
    efficiency   bound / time

With --keep FILE it may be run in parts: the same command goes on where the last one ended.

Needs an NVIDIA GPU. Several ranks share one over NCCL only from NCCL 2.31 on, with NCCL_MULTI_RANK_GPU_ENABLE=1;
without it NCCL and torch are left out.

example: python -m benchmarks gpu --ranks 4 --transports memory
"""

import contextlib
import ctypes
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch

from benchmarks.peer.contest import Contest
from benchmarks.peer.peer import Lineup, Peer
from benchmarks.runner.findings import BenchmarkResult, of_rounds, tabulated
from benchmarks.runner.parameters import Between, Rounds, Schedules, check_width, one_of
from benchmarks.runner.rounds import KeptRounds, Progress, best, median, silent, take_turns
from gapless import make_schedule, simulate
from gapless.errors import ConfigError
from gapless.units import show_count

_PEERS = ("1f1b", "interleaved", "zb-v")
_PRECISIONS = one_of("precision", "bf16", "autocast", "fp16")
_FIRST_NCCL = 23100  # that lets ranks share a GPU


def run(
    *,
    model: Annotated[str, "gpt (of gapless, in bfloat16) or llama", one_of("model", "gpt", "llama")] = "gpt",
    precision: Annotated[str, "of a llama: bf16, or autocast to bfloat16, or to fp16", _PRECISIONS] = "bf16",
    compile: Annotated[bool, "compile the layers of a llama"] = False,
    peers: Annotated[tuple[str, ...], "schedules of torch"] = _PEERS,
    ranks: Annotated[int, "parts of the GPU"] = 4,
    layers: Annotated[int, "blocks of the GPT, a multiple of the ranks"] = 16,
    width: Annotated[int, "its width, a multiple of 64"] = 2048,
    tokens: Annotated[int, "in a sequence; a microbatch is one"] = 1024,
    microbatches: Annotated[int, "microbatches"] = 32,
    schedules: Schedules = ("1f1b", "zb-h1", "zb-v"),
    transports: Annotated[tuple[str, ...], "what carries tensors: memory, nccl, gloo"] = ("memory", "nccl", "gloo"),
    rounds: Rounds = 10,
    peer: Annotated[bool, "leave out torch.distributed.pipelining"] = True,
    graphs: Annotated[bool, "leave out CUDA graphs"] = True,
    parts: Annotated[bool, "leave out the parts by themselves, and so the bounds"] = True,
    keep: Annotated[Path | None, "file that keeps the rounds; the same command goes on from it"] = None,
    minutes: Annotated[float, "with --keep: start no round after so many minutes", Between(0.1, 1000)] = 6.0,
    progress: Progress = silent,
) -> BenchmarkResult:
    """All take turns; a row for each says its bound and its median step, and then which side has the fastest."""
    if not torch.cuda.is_available():
        raise ConfigError("the benchmark gpu needs an NVIDIA GPU, and there is none; emulated needs none")
    if layers % (2 * ranks):
        raise ConfigError(
            f"{show_count(layers, 'layer')} can't be cut into {2 * ranks} equal stages: choose a multiple of "
            f"{2 * ranks}"
        )
    check_width(width, heads=width // 64 or 64)
    sizes: Any = {"size": width, "layers": layers // ranks, "tokens": tokens}
    kind: Any = model
    contest = Contest(ranks, microbatches, kind, **sizes, precision=precision, compiled=compile)
    skipped: dict[str, str] = {}
    if reason := _without_nccl(ranks):
        transports = tuple(each for each in transports if each != "nccl")
        peer, skipped = False, {"nccl": reason, "torch": reason}
    modes = ("", " graphed") if graphs else ("",)
    ways = [*transports, *(f"{each} static" for each in transports if each != "gloo" and model == "gpt")]
    names = [f"{schedule} over {way}" for way in ways for schedule in schedules]
    names += [f"{schedule} over {transports[0]} graphed" for schedule in schedules if graphs]
    names += ["default"] if model == "llama" else []
    timed = {(each, mode): f"{each} over {transports[0]}{mode} timed" for mode in modes for each in schedules}
    gpu = torch.cuda.get_device_properties(0).name
    kept = KeptRounds(keep, {**dataclasses.asdict(contest), "names": names, "peer": peer, "gpu": gpu}, minutes)
    with _cut_into(ranks, skipped) as environment, Lineup(contest, progress, environment=environment) as lineup:
        bubbles = kept.facts["bubbles"] = kept.facts.get("bubbles") or _bubbles(contest, timed, environment, progress)
        alone = ("whole",) if model == "gpt" else ()
        if parts:
            lineup.add_ranks("parts", (*alone, *(f"parts{mode}" for mode in modes)), "")
        lineup.add_ranks("gapless", names)
        if peer:
            lineup.add_ranks("torch", peers)
        seconds = take_turns(lineup.contestants, rounds, progress, kept=kept)
        peaks = lineup.peaks
    limits = {mode: median(seconds[f"parts{mode}"]) for mode in modes if parts}
    bounds = {key: limits[key[1]] / (1 - bubbles[name]) for key, name in timed.items() if parts and name in bubbles}
    rows = [{**_row(name, taken, bounds), "peak": peaks.get(name)} for name, taken in seconds.items()]
    found, done = best(seconds), min(map(len, seconds.values()))
    found |= {"skipped": skipped, "refused": lineup.refused, "done": done, "limit": limits.get("")}
    verdict = [f"left out: {name}: {why}" for name, why in skipped.items()]
    verdict += [f"refused: {name}: {why}" for name, why in lineup.refused.items()]
    if done < rounds:
        verdict += [f"{done} of {rounds} rounds are done: the same command goes on"]
    title = f"{model} of {layers} layers, width {width}, {microbatches} microbatches of {tokens} tokens, {precision}"
    title += f"{', compiled' * compile}, {ranks} ranks"
    found["parts_of"] = _parts_of(ranks if environment else 1)
    columns = "schedule=what | by=who | over=transport | step=seconds:ms | bound:ms | efficiency:% | peak:MiB"
    more: Any = {"note": f"{found['parts_of']}; medians of {done}.", "left": 3, "in_docs": True}
    table = tabulated(title, rows, columns, *verdict, *found["verdict"], **more)
    figures = [of_rounds(row["name"], row["rounds"], by=row["by"].split()[0]) for row in rows]
    return BenchmarkResult({"rows": rows, **found}, figures, [table])


def _bubbles(contest: Contest, timed: Mapping[Any, str], environment: Mapping[str, str], progress: Progress) -> Any:
    """By name; a llama's parts are alike, so its bubbles are those of the schedules."""
    if contest.kind == "llama":
        sizes: Any = {"devices": contest.devices, "microbatches": contest.microbatches}
        return {name: float(simulate(make_schedule(each, **sizes)).bubble) for (each, _), name in timed.items()}
    progress("timing the actions")
    with Peer(contest, list(timed.values()), "gapless", environment) as clocked:
        for name in clocked.schedules:  # before the others, which need its memory
            clocked.step(name, 2)
    return clocked.bubbles


def _row(name: str, seconds: list[float], bounds: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    by, _, what = name.partition(" ")
    schedule, _, transport = what.partition(" over ")
    transport, _, how = transport.partition(" ")
    if by == "parts":
        schedule, how = "", what
    by = f"{by} {how}".strip()
    row = {"by": by, "schedule": schedule, "transport": transport, "seconds": median(seconds), "rounds": seconds}
    row |= {"who": by, "what": schedule} if schedule else {"who": "", "what": by}
    if (bound := bounds.get((schedule, " graphed" if how == "graphed" else ""))) is not None:
        row |= {"bound": bound, "efficiency": bound / median(seconds)}
    return {"name": " ".join(filter(None, (by, schedule, transport))), **row}


def _without_nccl(ranks: int) -> str:
    """Why NCCL can't be used, if it can't."""
    if torch.cuda.device_count() >= ranks:
        return ""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:
        return "there is no libnccl.so.2"
    if version.value < _FIRST_NCCL:
        return f"NCCL {version.value // 10000}.{version.value // 100 % 100} does not let ranks share a GPU; 2.31 does"
    return "" if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else "NCCL_MULTI_RANK_GPU_ENABLE is not 1"


@contextlib.contextmanager
def _cut_into(ranks: int, skipped: dict[str, str]) -> Iterator[dict[str, str]]:
    """What each rank must find in its environment to have its part of the GPU."""
    control = shutil.which("nvidia-cuda-mps-control")
    if torch.cuda.device_count() >= ranks or control is None:
        if control is None:
            skipped["parts of the GPU"] = "nvidia-cuda-mps-control is not there, so ranks take turns on the whole GPU"
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in environment.values():
            Path(place).mkdir()
        here = {**os.environ, **environment}
        subprocess.run([control, "-d"], env=here, check=True)
        try:
            yield {**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks)}
        finally:
            subprocess.run([control], env=here, input="quit\n", text=True, check=False, timeout=60)


def _parts_of(ranks: int) -> str:
    """What the GPU is, and how much of it each rank has."""
    found = torch.cuda.get_device_properties(0)
    share = found.multi_processor_count * (100 // ranks) // 100
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    clocks = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        clocks = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
    return f"{found.name}, {share} of {found.multi_processor_count} multiprocessors for each rank, clocks {clocks}"
