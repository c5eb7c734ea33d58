"""What all benchmarks share, in reading order:

command       the command line: a benchmark by its name, with the parameters of its `run` as options; or all of them
parameters    how a benchmark declares its options, and those that several have
rounds        contestants take turns, medians of ratios count; a long contest in parts
findings      what a benchmark returns: figures with the interval of their rounds, and tables
outcome       what is stored of it: all of that, the command, the machine; what got slower since an earlier run
all           all of them in one go, kept part by part: a benchmark of benchmarks
summary_page  all outcomes on one page, figures as bars; templates has summary_page.html, styles summary_page.css
docs_tables   the tables of the docs, made from stored results
"""
