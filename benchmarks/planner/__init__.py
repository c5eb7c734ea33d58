"""Is the planner right? plan and replicas are benchmarks. In reading order:

subjects     models as layers, with their data, and the plan for a given schedule
apart        devices of one process, as if each had its own memory, or with a latency between them
prediction   is the predicted step right, and the predicted memory?
fit          does what was planned fit on a GPU, and does what was refused not?
plan         all of these; and is the planned schedule the quickest one, and the planned partition the best?
replicas     stages with replicas as PipeDream's planner chooses them, against its prediction
"""
