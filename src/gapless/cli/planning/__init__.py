"""What `gapless plan` prints and draws, in reading order:

plan_report     the ranking of plans, why the first is the first, and where its time and memory go
plan_page       the same as a page, with timelines; before them plan_front.html, after them plan_back.html
what_if_report  what changes of the machine would bring
device_kinds    devices of several kinds
pipedream_plan  stages and replicas for training without a flush
"""
