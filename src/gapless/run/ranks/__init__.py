"""A process for each device, under torchrun. In reading order; `wire/` carries tensors, `watch/` notices who is gone.

seat              where this rank is in the mesh
many_processes    this rank, and what it does with the others: the other kind of world
agreement         all ranks were asked for the same, or all refuse
same_calls        ranks make the same calls, with the same arguments: the three ways in which that is seen
sameness          ranks of one pipeline have the same weights and batches
ownership         which ranks hold a tensor of the model
exchange          the gradients of a step and the other replicas: when they are added
replicas          data parallelism: shares of a minibatch, sums of gradients
sharded           FSDP on the layers of a stage
shared_parameter  a parameter that several ranks hold
footing           what a stream stands on: links to other ranks, and words that all of them exchange
gathering         all ranks tell each other what they save
losses            every rank learns all losses
state_dict        the state of a model that is in parts
clock             one time for all ranks, for timelines
stragglers        a rank that is slower than the others is named
link_speed        what a hop takes, measured
one_line          all ranks as one pipeline, for a plan that is made where it will run
"""
