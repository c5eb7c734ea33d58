"""What the layers of a model cost, in reading order:

contention  how much longer devices of one machine take beside each other
profile     the value: layers with their times and sizes (and defaults, such as Adam's state), links between devices
file        a profile as JSON that people can write
pipedream_graph  a profile as PipeDream's profiler writes it
machine     devices, and the mesh of pipelines that they make
task        what is measured: layers as stages, and one microbatch
runner      runs them as a pipeline would, and times every action
meter       counts bytes on the CPU or on a GPU
sizes       what layers and optimizer hold, measured or found without running anything
measure     all of it together: a profile from a model
traced      a module that is no sequence, as layers to measure
blocks      a model of many equal blocks, of which a few stand for all
"""
