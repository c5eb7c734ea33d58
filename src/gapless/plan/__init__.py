"""From a model and a machine to a plan, in reading order:

profile   what the layers cost, and the machine that they run on
cut       which layers make which stage, and what a stage then costs
predict   what a step of these stages takes and holds
plan      the value: partition, schedule, microbatches and remat, with what they are predicted to take and to hold
explain   why the best plan is the best
search    every choice tried, judged by simulation under the memory limit
asynchronous  what else there is: without a flush, or not runnable yet
planner   measures a model, searches, and measures again where the best plan has microbatches of another size
"""
