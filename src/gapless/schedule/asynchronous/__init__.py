"""Schedules without a flush, which update weights on the way, in reading order:

updates   the rules of updates: one per stage and minibatch, where its gradients are
weights   which version of its weights a forward sees
verdicts  where a device waits to know that an update stands
"""
