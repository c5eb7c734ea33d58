"""Property tests draw the same examples on every run and have no deadline of their own: the machine may be busy."""

from hypothesis import settings

settings.register_profile("schedules", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("schedules")
