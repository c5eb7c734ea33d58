"""Contestants in processes of their own, in reading order:

contest        what both sides run: layers, inputs, loss
launcher       forks ranks, for benchmarks and tests alike
ranks          what a rank does: it prepares, and then runs the steps it is asked for
torch_side     torch.distributed.pipelining on a rank
torchgpipe_side  torchgpipe, all of whose devices are threads of one process
fsdp_side      the whole model on every rank, its weights shared out (FSDP2), and its plain copies
parts_side     a part of the model on each rank, with nobody to wait for
gapless_side   a pipeline under a mesh on a rank
replicas_side  stages with replicas as the planner has chosen them, on a rank
one_core       threads that wait more than they compute, on one core
steady         streams in their steady state
peer           the benchmark's end: starts the ranks, asks for steps, ends them
"""
