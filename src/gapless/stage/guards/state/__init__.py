"""Python state of layers and losses.

opaque_state     objects whose state is in no attribute or container: how it is read and put back
state_notes      what can change of what an object holds
reachable_state  what layers can reach
held_objects     what does change, looked at in every forward
shared_logs      lists to which layers only add
shared_objects   what layers of two stages reach, which must not change
layer_state      what layers hold, for runs that must not count
"""
