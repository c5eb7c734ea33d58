"""Whole models: as a sequence of layers, or as a graph that torch.export has traced and that is cut into pieces.

layers       a model as a sequence of layers, with the names its parameters had
uses         which stages use a parameter or have a buffer; parameters that several use are tied
model_edits  what a model is made of, to notice that it was edited
materialise  from the meta device to real ones, a stage at a time; `shards`: files that it reads
own_loss     what the loss that a model computes itself takes its mean over
reference    the plain loop for any model
code_origin  whose code a file is

traced       a model as a graph, and its pieces
fidelity     what makes a trace do what the model does, and what is refused
"""
