"""Whole models: as a sequence of layers, or as a graph that torch.export has traced and that is cut into pieces.

A model and its parameters
    layers       a model as a sequence of layers, with the names its parameters had
    uses         which stages use a parameter or have a buffer; parameters that several use are tied
    makeup       what a model is made of, to notice that it was edited
    materialise  from the meta device to real ones, a stage at a time

A traced model
    capture      a model and its traces, as the layers of a pipeline; `edition`: between two edits
    trace        one export: its graph, and for which batches it holds
    crossing     what crosses each place of a graph, and where it is cut; `graph_cuts`: the cuts of a plan
    piece        a run of nodes as code that a stage can call, and what torch.compile may have of it
    counting     what the model's own loss takes its mean over
    reference    the plain loop for any model

What a trace needs to be true
    operators    those of a graph, in the form in which a stage answers them; `grouped`: one that torch can't trace
    changes      what a graph changes in place, and where it therefore must not be cut
    questions    what a model asks of its batch: `if mask.all()`
    called       a trace makes the choices of a plain call
    lost         what a trace would lose without a word is refused
    own_backward functions with a backward of their own, which a trace keeps as the calls they are
    instead      what the thread that traces calls in place of torch's own functions
    in_forward   what holds in the forward of a traced model only
    origin       whose code a file is
"""
