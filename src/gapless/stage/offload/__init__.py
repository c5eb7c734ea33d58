"""Activations, and an optimizer's state, that wait in the host's memory. In reading order:

saved_storages  what the graph of a microbatch has saved, by storage
host_link       the copies there and back
offloading      the part of a stage that has them made
optimizer_state  the same for what an optimizer keeps
"""

PIECE = 64 * 2**20  # bytes of parameters that an offloaded optimizer steps at a time
