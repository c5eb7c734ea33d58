"""Training without a flush: minibatches follow each other through the stages, and weights are updated on the way.
`replicas/` is for copies of a whole model that do not wait for each other.

version_rule      which version of its weights a stage uses for which minibatch
correction        what is done about the delay between a gradient and the weights it is applied to
nesterov          an optimizer that looks ahead, made for delays
updater           what a stage does at an update: checks, clips, steps its own optimizer
buffer_rollback   what forwards change goes back with minibatches that are dropped
stage_replicas    replicas of a stage, which make the same updates
stream_device     one device: forwards, backwards and updates, in the order of the schedule, until nothing more comes
stream_runner     what a stream asks of the processes that its devices are in, and where each stage is when it stops
thread_runner     devices as threads of one process, and the queues between them
rank_neighbours   the ranks before and after a device, their replicas, and whether all are fed the same
rank_runner       a device as one rank of many
stream_state      all that a stream is made of besides the model, as plain values
stream            what a user iterates over: feeds minibatches, hands out results, stops in order
"""
