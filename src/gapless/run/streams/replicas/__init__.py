"""Replicas of a whole model that do not wait for each other: asynchronous data parallelism (ASP), and local steps.

order                who read and who applied, one after the other, as a value
replica              a copy of the model, and the gradients that are computed on it
replica_state        what of a model goes from replica to replica, and the mean of several
asp                  replicas that apply gradients to shared weights without waiting
local_steps          replicas that step alone, and average their weights now and then
replica_threads      the threads of replicas: minibatches in, results out, the first failure stops all
replica_arguments    what a user asks of replicas, checked
rank_messages        a word, some numbers and tensors, from one rank to another
parameter_server     the rank that has the weights, and answers the messages of all replicas
replica_whereabouts  what the replica of a rank is doing
rank_replicas        a replica on a rank of its own
async_replicas       what a user iterates over
"""
