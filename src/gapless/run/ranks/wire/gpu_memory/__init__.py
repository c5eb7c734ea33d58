"""Channels in the memory of GPUs, between processes of one host that share a GPU, or whose GPUs reach each other.

cuda_driver    what of NVIDIA's driver torch does not offer
slots          which piece of a sender's memory the next message takes, and the numbers that both ends see
slot_writer    a tree of tensors into a slot
slot_reader    and out of it
gpu_channels   the two ends of a channel, and the carrier
"""
