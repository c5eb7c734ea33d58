"""What the tables of GPipe and of zero bubble are made of, in reading order:

published   the numbers of both papers, which stand beside ours
giants      the models of GPipe's tables, of any size, and without data
counted     what the layers of a model without data hold, and how many operations they take
"""
