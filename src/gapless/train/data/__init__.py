"""What a run begins with, in reading order:

sources     where tokens come from: text, records, token files
feed        batches, in an order that can be taken up anywhere
pretrained  models of Hugging Face
"""
