"""What `gapless plan` reads, prints and draws, in reading order:

model_options   what its options say of a Hugging Face model, and the plan of it; of devices: memory, speeds, kinds
plan_report     the ranking of plans, why the first is the first, where its time and memory go, and what changes bring
plan_page       the same as a page, with timelines; before them plan_front.html, after them plan_back.html
pipedream_plan  stages and replicas for training without a flush
"""
