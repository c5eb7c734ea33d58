"""Running: where schedules and stages meet. What one process needs, in reading order; `ranks/` is for many, and
`streams/` for training without a flush, and `overlap/` for an optimizer step that does not wait.

world         what a pipeline asks of its processes: the one interface
one_process   all devices are threads of this process
given_batch   what a step works on, and what it leaves
program       a schedule bound to stages: for each device a flat list of calls
copy_waits    when the host waits for copies to its memory
execute       runs a program; the first failure stops all devices
team          a thread for each device, and how many intra-op threads it has by default
channels      what carries tensors from device to device, and how threads do it
lanes         what a device computes on: a CPU thread, or a CUDA stream
thread_state  what torch keeps per thread and the caller has set
named_state   what optimizers keep, by the names of parameters
clip          the norm of all gradients
held_memory   what holds the memory of the devices
"""
