"""Property tests draw the same examples on every run and have no deadline of their own: the machine may be busy.

There are few of them, and ten times as many in `test_properties.py`, which is slow.
"""

from hypothesis import settings

settings.register_profile("schedules", deadline=None, derandomize=True, max_examples=15, database=None)
settings.register_profile("many", settings.get_profile("schedules"), max_examples=150)
settings.load_profile("schedules")
