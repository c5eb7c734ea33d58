"""Theory: schedules as values, without a tensor and without torch. In reading order:

action        actions, and a schedule: for each device the order of its actions; its text, CSV and JSON
placement     which device holds which stage
dependencies  what an action needs: the one rule
routes        where an activation and a gradient go
costs         what actions and hops take
memory        what an action allocates and frees
unrolled      the actions of all devices in one list, each behind what it needs
host_copies   activations that wait in the host's memory
simulate      costs -> timeline
timeline      who did what from when to when; bubbles and peaks; and back to costs
pools         the receive buffers of the deadlock proof, and what waits in front of them
verify        every violation at once, each with its place (`violation`)
asynchronous  schedules without a flush: the rules of updates, versions of weights
recipes       every schedule by name
lower         from the schedule that a recipe states to the one that is run
"""
