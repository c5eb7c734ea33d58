"""What all benchmarks share, in reading order:

command      the command line: a benchmark by its name, with the parameters of its `run` as options
parameters   the options that several benchmarks have
rounds       contestants take turns, and medians of ratios count
kept_rounds  a long contest in parts
report       the text that benchmarks print: a title, a table or a duel, a verdict
outcome      what is stored of a benchmark: figures with the interval of their rounds, tables, command, machine
environment  on what it was measured
suite        all of them in one go, kept part by part
all_parts    the command for that
slower       what got slower since an earlier run
chart        figures as bars
sheet        all outcomes on one page; its colours are in sheet.css and in those of the curves
docs_tables  the tables of the docs, made from stored results
"""
