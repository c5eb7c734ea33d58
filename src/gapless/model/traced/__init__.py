"""A model as a graph that torch.export has traced.

capture      a model and its traces, as the layers of a pipeline; `trace_cache`: its traces between two edits;
             `shared_trace`: whether one of them does what the model does in another mode
trace        one export: its graph, and for which batches it holds; `settled`: that the next run does the same;
             `hollow`: a model without memory, for as long as it is traced
crossing     what crosses each place of a graph, and where it is cut; `graph_cuts`: the cuts of a plan
piece        a run of nodes as code that a stage can call; `compiled_segments`: what torch.compile may have of it
operators    those of a graph, in the form in which a stage answers them; `grouped`: one that torch can't trace
"""
