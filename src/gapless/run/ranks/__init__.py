"""A process for each device, under torchrun. In reading order; `wire/` carries tensors, `watch/` notices who is gone.

mesh_position     where this rank is in the mesh, the groups it is in, and what all ranks tell each other
many_processes    this rank, and what it does with the others: the other kind of world
agreement         all ranks were asked for the same, or all refuse
fingerprints      by which two ranks see whether they have the same tensors
consistency       ranks of one pipeline have the same weights and batches, and make the same calls
exchange          when the gradients of a step meet those of other replicas
replicas          data parallelism: shares of a minibatch, sums of gradients in buckets
sharded           FSDP on the layers of a stage
shared_parameter  a parameter that several ranks hold
losses            every rank learns all losses
state_dict        the state of a model that is in parts, and which ranks hold what of it
timing            one time for all ranks, for timelines; a rank that is slower than the others is named
link_speed        what a hop takes, measured; a plan that is made where it will run
"""
