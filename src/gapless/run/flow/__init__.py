"""Training without a flush: minibatches follow each other through the stages, and weights are updated on the way.

rule               which version of its weights a stage uses for which minibatch
correction         what is done about the delay between a gradient and the weights it is applied to
nesterov           an optimizer that looks ahead, made for delays
updater            what a stage does at an update: checks, clips, steps its own optimizer
device             one device: forwards, backwards and updates, in the order of the schedule, until nothing more comes
stream_state       all that a stream is made of besides the model, as plain values
threads            devices as threads of one process, and the queues between them
earlier_buffers    what forwards change goes back with minibatches that are dropped
siblings           replicas of a stage, which make the same updates
siblings_in_turns  the same for replicas that take turns in the minibatches of one loader
same_batches       the first and the last rank are fed the same
rank_neighbours    the ranks before and after a device, and how minibatches go to their replicas
rank_flow          a device as one rank of many
stopped            where each stage is when a stream has stopped, and why
flow               what a stream asks of the processes that its devices are in
stream             what a user iterates over: feeds minibatches, hands out results, stops in order

Replicas of a whole model that do not wait for each other:

order                who read and who applied, one after the other, as a value
replica              a copy of the model, and the gradients that are computed on it
asp                  replicas that apply gradients to shared weights without waiting
local_steps          replicas that step alone, and average their weights now and then
crew                 the threads of replicas: minibatches in, results out, the first failure stops all
replica_arguments    what a user asks of replicas, checked
sent_state           what of a model goes from rank to rank
letters              a word, some numbers and tensors, from one rank to another
hub                  the rank that has the weights, and answers the letters of all replicas
replica_whereabouts  what the replica of a rank is doing
rank_replicas        a replica on a rank of its own
async_replicas       what a user iterates over
"""
