"""Which layers make which stage, in reading order:

partition    the best cuts for these times, hops and memory; others' rules, for comparison only
chain        the exact solution where every stage has a limit of its own
sharing      the search on top of it where stages share the memory of a device
stage_costs  from the costs of layers to those of stages
"""
