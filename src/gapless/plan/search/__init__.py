"""Every plan there might be, tried, in reading order:

wanted     what a plan is searched for
choices    what is chosen from: pipelines, microbatches, recipes, stages per device
filling    what devices can do before the first backward
least_work what layers take at the least
ends       what the device with the last layer takes, where devices have several stages
in_order   what a choice takes whose order is known
bound      what no plan of a choice can be below
estimate   about what a choice takes: the order in which they are tried
auto_order the order that `auto` finds for devices with rooms of their own
drafts     a choice with its cuts and its schedule, and what each device would hold
least      what choices take at the least, and about what they take
footprint  bytes of each device at its peak
breakdown  where the time of a step goes
recomputes what may be recomputed on a device that is too full
judge      from a choice to the quickest plan that fits
refine     the last per cent: cuts moved layer by layer
search     all choices, ranked
own_times  a plan on devices of several kinds, with each layer's own time there
what_if    what a change of the machine would bring
replicate  stages that are replicated each on its own, as PipeDream does without a flush
others     what is listed beside the plans: without a flush, or not runnable yet
"""
