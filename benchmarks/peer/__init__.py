"""Contestants in processes of their own, in reading order:

llama           a Llama, whole or in parts
contest         what both sides run: layers, inputs, loss
ranks           what a rank does: it prepares, and then runs the steps it is asked for
gapless_sides   gapless: a pipeline under a mesh on a rank, or one of this process
other_sides     torch.distributed.pipelining on a rank; the parts of a model with nobody to wait for, FSDP2, torchgpipe
peer            the benchmark's end: starts the ranks, asks for steps, ends them; and all who take part in a contest
"""
