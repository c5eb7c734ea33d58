"""The benchmarks behind `gapless bench`. Each has a file with `run`, which measures and returns plain JSON values, and
`report`, which makes text of them.

A speed is never a bare number: it is a ratio to a peer or to a bound, measured in the same run. Contestants take turns,
round by round, so that a busy moment of the machine meets all of them, and what counts is the median.
"""

BENCHMARKS = {
    "emulated": "schedules on emulated devices, against their bound and torch.distributed.pipelining",
    "overhead": "a pipeline of one device against the plain loop",
    "tiny": "the step of tiny layers, where all is overhead, against torch's 1F1B",
    "split": "the host cost of F + I + W against a plain F + B, and torch's own halves",
    "scale": "generate, verify and simulate ever larger schedules",
    "prediction": "a simulated makespan against the measured one",
    "timeline": "what it costs to record a timeline",
    "plan": "a plan's step, memory, cuts and choice against what is measured",
    "compile": "a GPT with compiled layers against the eager one",
}
