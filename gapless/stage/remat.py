"""Keep the inputs, not the graph, and compute the activations again when the backward needs them.
"""
from __future__ import annotations
