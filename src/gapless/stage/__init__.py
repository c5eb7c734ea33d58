"""Tensors on one device: what a stage computes, keeps and frees. Nothing here knows of schedules or of other devices.

| file | its noun |
|---|---|
| `seeds` | the seed of each (step, microbatch, layer) |
| `microbatch` | trees of tensors: cut, merged, weighed |
| `plain` | the reference loop that everything is compared with |
| `stage` | forward, backward and its two halves |
| `cell` | one autograd graph; `remat`: one that is rebuilt |
| `buffers` | those that a forward changes, and a second run must not |
| `calls` | how layers are called: inside the mode or outside; `compiled`: those of which nothing can be seen |
| `intercept` | the mode and its table of handlers: `linear`, `convolution`, `draws`, `batchnorm` |
| `deferred` | weight gradients that wait |
| `autocast` | its state, where it must be off or replayed |
"""
