"""What crosses between processes, and the ways it goes.

layout         everything of a tree of tensors but its numbers: structure, dtypes, shapes, strides
call_stamp     which call of its rank a message belongs to, and where two ranks disagree
message        a tree as one buffer of bytes, and back
channel        the two ends of a channel, the courier that posts for them, and the interface of a carrier
groups         groups of ranks that are gapless's own, over Gloo
gloo           channels over Gloo: between hosts, and wherever nothing better reaches
host_reads     whether the host asks a GPU for numbers
static_shapes  what the messages of a step are, where all steps have the shapes of the first
nccl           channels from GPU to GPU
gpu_memory/    channels in the memory of GPUs, between processes of one host
shared_memory  memory that two processes of one host share, in which large tensors stay where they are
inbox          where messages of one host come in, and how processes find each other
pipes          channels between processes of one host
connections    all channels of this process; a new carrier is added here
"""
