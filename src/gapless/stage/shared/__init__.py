"""Weights that are not one stage's own at one time.

tie              a parameter that several stages use
weight_versions  weights as they were at several updates, for training without a flush
"""
