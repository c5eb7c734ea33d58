"""Batch norm in microbatches.

running_statistics  what is remembered, and what must not count twice
batchnorm_calls     the calls that move it
"""
