"""The optimizer's step that does not wait: a device steps its own part, and goes on with forwards of the next minibatch
before all gradients were checked. If the check fails, all parts are put back and stepped again, or not at all. The
numbers are those of a step that waits. In reading order:

optimizer_part  the parameters of a stage in an optimizer: copied, stepped, put back
verdict         from the norms of all gradients: does a step stand?
loss_scale      a GradScaler whose verdicts come late
part_updates    what a device does with its parts, when its gradients are there and when the verdict is
notice_board    what threads of one process wait for, and their court
thread_steps    devices as threads, which take step after step
rank_steps      this rank's device, which takes its verdicts in the next step
"""
