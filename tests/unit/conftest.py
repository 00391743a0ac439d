"""The same examples in every run, and none kept: a red test is red for everybody."""

from hypothesis import settings

settings.register_profile("unit", derandomize=True, deadline=None, database=None)
settings.load_profile("unit")
