"""Tensors on one device: what a stage computes, keeps and frees. Nothing here knows of schedules or of other devices.

The reference, and what enters a stage
    seeds          the seed of each (step, microbatch, layer)
    microbatch     trees of tensors: cut, merged; `minibatch`: what a step is given, cut
    aliases        tensors of a tree that share memory; `bases`: views that another stage changes in place
    counted        what a loss takes its mean over; `divisors`: of a user's own, read from its graph
    share          a step as a part of a larger minibatch
    plain          the plain loop that everything is compared with, bit by bit
    devices        those that a user asks for; `intra_op`: how many threads their kernels take

A stage and its microbatches
    stage          some layers: forward, backward and its two halves
    cell           one autograd graph; `remat`: one that is rebuilt
    kept           what is kept of a microbatch; `intake`: how layers get the inputs of a cell
    undo           a forward that starts again leaves no trace
    held           what layers hold, for runs that must not count; `notes`: what can change of it; `objects`: what does
    logs           lists to which layers only add
    buffers        those that a forward changes, and a second run must not
    auxiliary      losses that layers add; `stored`: tensors that they keep in attributes, where nobody should read them
    weight_changes while a step runs
    versions       weights as they were at several updates, for training without a flush
    graphed        a stage whose actions are CUDA graphs; `replay`: one of them; `places`: what they read and write
    likeness       microbatches that share graphs; `unchanged`: what these rely on; `trial`: whether they are worth it
    tie            a parameter that several stages use; `turns`: gradients that wait for their microbatch's turn

How layers are called
    calls          the calls of a stage: layers, loss, backwards
    way            inside the mode, outside of it, or neither; `compiled`: layers of which nothing can be seen
    mode           the one function mode; `table`: what it answers; `signature`: the arguments of such a call
    linear         handlers that let weight gradients wait (a new one: see `table`); `convolution`: more of them
    random_calls   torch's random functions; `batchnorm`: running statistics; `behind`: `.data` and own backwards
    grad_fields    `.grad` and `.requires_grad` of a weight

What they stand on
    deferred       weight gradients that wait for the second half of a backward; `graph_task`: for whom a backward runs
    draws          private generators; `unseen`: draws that the mode can't see; `exclusive`: one thread at a time
    process_state  what torch keeps once for all threads, whenever a layer touches it
    draws_back     draws in a backward, which can't be those of plain training
    unwatched      layers that draw nothing, which the mode need not see
    reach          which parameters a graph reaches
    autocast       its state, where it must be off or replayed; `settings`: all settings that a layer may depend on
"""
