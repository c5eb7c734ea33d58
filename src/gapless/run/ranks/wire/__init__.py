"""What crosses between processes, and the ways it goes.

layout         everything of a tree of tensors but its numbers: structure, dtypes, shapes, strides
disagreement   where two ranks disagree, in words
stamp          which call of its rank a message belongs to
message        a tree as one buffer of bytes, and back
channel        the two ends of a channel, the courier that posts for them, and the interface of a carrier
groups         groups of ranks that are gapless's own, over Gloo
gloo           channels over Gloo: between hosts, and wherever nothing better reaches
pinned         the same for tensors of a GPU, by way of pinned host memory
nccl           channels from GPU to GPU
cuda_driver    what of NVIDIA's driver torch does not offer
slots          which piece of a sender's memory the next message takes
rehearsal      what the messages of a step are, where all steps are alike
static_shapes  whether the batches of all steps have the shapes of the first
board          the numbers that both ends of a channel in GPU memory see
slot_messages  a tree of tensors through a slot of GPU memory
gpu_memory     channels in the memory of GPUs, between processes of one host
shared_memory  memory that two processes of one host share, in which large tensors stay where they are
inbox          where messages of one host come in, and how processes find each other
pipes          channels between processes of one host
connections    all channels of this process; a new carrier is added here
"""
