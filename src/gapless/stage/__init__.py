"""Tensors on one device: what a stage computes, keeps and frees. Nothing here knows of schedules or of other devices.

A stage and its microbatches
    stage              some layers: forward, backward and its two halves
    cell               one autograd graph; `remat`: one that is rebuilt
    cell_inputs        how layers get the inputs of a cell
    saved_activations  what is kept of a microbatch
    calls              the calls of a stage: layers and loss; `backwards`: and autograd
    compiled           layers of which nothing can be seen
    auxiliary          losses that layers add
    autocast           its state, where it must be off or replayed; `settings`: all that a layer may depend on
    devices            those that a user asks for; `intra_op`: sets how many threads their kernels take

The rooms
    batch              what enters a stage, what a loss counts, and the plain loop that everything is compared with
    split              how calls are seen, and weight gradients that wait for the second half of a backward
    random             seeds and draws
    norm               batch norm in microbatches
    graphs             actions as CUDA graphs
    offload            activations in the host's memory
    shared             weights that several stages use, or of which there are several versions
    guards             what could go wrong without a word
"""
