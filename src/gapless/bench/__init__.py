"""The benchmarks behind `gapless bench`, in reading order:

parameters   the options that benchmarks share; the command line is made from the parameters of each `run`
rounds       contestants take turns, and medians of ratios count
kept_rounds  a long contest in parts
report       the text that benchmarks print: a title, a table or a duel, a verdict
outcome      what is stored of a benchmark: figures with the interval of their rounds, tables, command, machine
environment  on what it was measured
one_core     threads that wait more than they compute, on one core
duel         two contestants, one ratio
peer/        torch.distributed.pipelining, and gapless itself, in processes of their own
steady       streams in their steady state, for `emulated`
emulated     schedules on emulated devices, against their bound and against torch
peers        every way to train one model on ranks, and when a pipeline is the wrong one
matrix       our best against every peer's best, for many sizes
overhead     one device against the plain loop
tiny         tiny layers, where all is overhead, against torch
split        what it costs the host to split a backward
gpipe/       what the tables of GPipe and of zero bubble are made of
largest      GPipe's table of the largest model per device
throughput   GPipe's tables of normalised throughput
breakdown    where the time of a step goes, as measured
bubbles      zero bubble's bubble rates for published times
timeline     what recording costs, and whether a simulation agrees with the record
saving       what a save in the background costs
replicas     stages with replicas as PipeDream's planner chooses them, against its prediction
gpu          ranks on a GPU, against its limit and against torch
compile      compiled layers against eager ones
scale        generate, verify and simulate ever larger schedules
staleness    what delayed gradients cost, on real text
planner/     what `plan` measures
plan         is the planner right?
suite        all of them in one go, kept part by part
slower       what got slower since an earlier run
chart        figures as bars
docs_tables  the tables of the docs, made from stored results
sheet        all outcomes on one page; its colours are in sheet.css and in those of the curves

A benchmark has a file with `run`, which measures and returns JSON values, `report`, which makes text of them, and
`figures`, the numbers that count; some have `tables` too. `run` takes `progress`, and what else it takes are its
options, annotated as `parameters` says. The benchmark is a line in BENCHMARKS and one in ENTRIES of `suite`.

A speed is never a bare number: it is a ratio to a peer or to a bound, measured in the same run. Contestants take turns,
round by round, so that a busy moment of the machine meets all of them, and what counts is the median.
"""

BENCHMARKS = {
    "emulated": "schedules on emulated devices, against their bound and torch.distributed.pipelining",
    "peers": "every way to train one model on ranks: pipelines, FSDP2, plain, and independent copies as the limit",
    "matrix": "our best schedule against every peer's best, on emulated devices of many sizes",
    "overhead": "a pipeline of one device against the plain loop",
    "tiny": "the step of tiny layers, where all is overhead, against torch's 1F1B",
    "split": "the host cost of F + I + W against a plain F + B, and torch's own halves",
    "scale": "generate, verify and simulate ever larger schedules",
    "largest": "GPipe's table of the largest model per device, predicted and measured",
    "throughput": "GPipe's tables of normalised throughput, over fast and slow links, on emulated devices",
    "breakdown": "where the time of a step goes, as measured: compute, recompute, bubble, transfer, update",
    "bubbles": "zero bubble's table of bubble rates for published times, theirs beside ours",
    "timeline": "what it costs to record a timeline, and how well a simulation predicts it",
    "saving": "what it costs to save in the background while a GPT trains",
    "plan": "a plan's step, memory, cuts and choice against what is measured",
    "replicas": "stages and replicas of PipeDream's planner on emulated ranks, against its prediction",
    "gpu": "ranks on a GPU, against its limit and torch.distributed.pipelining",
    "staleness": "what delayed gradients cost: asynchronous ways to train against plain training, on real text",
    "compile": "a GPT with compiled layers against the eager one",
}
