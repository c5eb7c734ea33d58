"""A run under way, in reading order:

batch_counts  samples and tokens of a batch
trainer       the loop, and the callbacks that are told of its steps
evaluation    the loss on other data, and an early stop
step_monitor  timelines, bubbles and memory of every n-th step
metrics       JSON lines, TensorBoard, Weights & Biases
display       what one sees while it runs
interrupts    SIGTERM and Ctrl-C
run_folder    where all of it is kept
saver         when it is saved, and how it goes on
run_report    its report
training      a run from its config to its end
"""
