"""Nobody waits for ever for a rank that is gone: what goes wrong on one rank is known to all of them, with its place.

watch        the rank's view of all others: tells, hears and explains what went wrong, around every call
whereabouts  what this rank is doing, in words for its own errors and for those of others
ring         the connection to the rank before and to the one after, for signs of life and news
roll_call    a call that lasts, and one that a rank refuses, are said to the others
tally        how far each stage of a stream has come, when it breaks off
processes    whether the process of a neighbour on the same host is alive, and the end of this one
leaving      SIGTERM: the step under way is finished, and all ranks leave together
children     what a forked child must let go of, since it is no rank
blame        whether an exception is this rank's own, or tells of a lost connection
"""
