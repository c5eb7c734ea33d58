"""The facade, in reading order:

pipeline      the object that trains: a table of contents
held_model    its model as the user sees it: parameters, state, mode
arguments     what a user asks for, checked
options       what was asked for, and what all ranks must have been asked for alike
schedules     the schedule for any number of microbatches
staged_model  the model cut into stages, those of this process made, and the programs that run them
programs      a program for each number of microbatches and purpose, made once
saved         what of it goes into a checkpoint
streaming     training without a flush: one optimizer per stage, versions, devices that flow
overlapped_training  training whose optimizer step does not wait
edits         where layers go when the model was edited
shares        what each of several minibatches counts in an update
result        what a step leaves; `short_tracebacks`: what is seen of an error in it
planning      from a model to a plan, and what the links between ranks take
"""
