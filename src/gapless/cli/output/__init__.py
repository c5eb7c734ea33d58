"""Where a result goes beside standard output.

asked  pages, pictures and traces, and how they look
"""
