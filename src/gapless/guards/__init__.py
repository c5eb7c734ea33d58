"""Guards: everything that would make numbers wrong without a word, each in one row of one table.

The code that looks is where the thing happens. It refuses through its guard, so an error knows its row
(`GaplessError.guard`), and so do its readers: docs/restrictions.md has the table, and `print(pipe)` names the guards
that can't look in that pipeline.

guard                  what a guard knows, and the error that it makes
held_state             what layers hold
process_wide           random numbers, and what torch keeps once
weights_and_gradients  who changes or reads them, and when
passed_tensors         from layer to layer, and from stage to stage
batches_and_losses     what is cut, and what a loss is a mean over
whole_model            what a trace or an edit would lose
between_ranks          ranks and streams
table                  all of them
"""
