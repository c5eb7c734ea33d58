"""Every plan there might be, tried, in reading order:

search_options  what a plan may be, and how long to look for it
choices     what is chosen from: pipelines, microbatches, recipes, stages per device
estimate    about what a choice takes: the order in which they are tried
auto_order  the order that `auto` finds for devices with different memory
drafts      a choice with its cuts and its schedule, and what each device would hold
bounds      what no plan of a choice can be below
recomputes  what is held at the peak, and what may be recomputed on a device that is too full
finish      from a draft to a plan, lowered and simulated
judge       from a choice to the quickest plan that fits
refine      the last per cent: cuts moved layer by layer
attempts    all choices, one after another
search      the best of them
what_if     what a change of the machine would bring
heterogeneous  devices of several kinds, each with a profile of its own
"""
