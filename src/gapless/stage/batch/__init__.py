"""What enters a stage, and what a microbatch counts.

microbatch     trees of tensors: cut, merged; `minibatch`: what a step is given, cut
aliases        tensors of a tree that share memory; `view_bases`: views that another stage changes in place
loss_counts    what a loss must be, and takes its mean over; `loss_divisors`: of a user's own, read from its graph
own_copies     copies laid out alike, and of batches that a caller may overwrite before they are used
share          a step as a part of a larger minibatch
plain          the plain loop that everything is compared with, bit by bit
"""
