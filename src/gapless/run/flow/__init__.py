"""Asynchronous training: weights that are updated while older versions of them are still in use.

correction    what a stage can do about the delay of its gradients: predicted weights, a smaller learning rate
nesterov      an optimizer made for delayed gradients
"""
