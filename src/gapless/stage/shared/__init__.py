"""Weights that are not one stage's own at one time.

tie              a parameter that several stages use
cell_ties        the parameters of a cell, and which of them are shared; `stage_ties`: those of a stage
weight_versions  weights as they were at several updates, for training without a flush
"""
