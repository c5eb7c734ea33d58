"""Training from a config, in reading order:

config     a TOML file that says what to train
user_code  the functions that a config names, found and called
data       batches to train on
room       whether the machine has room for it
job        what a config describes, built: model, data, plan, pipeline
trainer    the loop
"""
