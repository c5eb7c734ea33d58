"""Models as people write them: for tests, examples and benchmarks.

emulated     a layer that only takes time: it stands for a device that this machine does not have
gpt          a sequence of pre-norm blocks
resnet       a sequence with batch norms
amoebanet    a sequence of cells, each of which sees the last two
unet         skips from the way down to the way up, so it is traced
transformer  an encoder and a decoder, so it is traced
"""
