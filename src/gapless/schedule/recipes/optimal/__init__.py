"""The best schedule there is, with the proof, for small numbers of devices and microbatches. In reading order:

exact_problem  what is asked, in exact numbers
cp_sat         the same as OR-tools' CP-SAT takes it, and the search for its answer
optimal        asks for one placement after the other, and keeps the bound
"""
