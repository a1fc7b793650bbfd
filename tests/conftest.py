"""What all tests have in common."""

from hypothesis import settings

# The same examples every time, so that a failure is the change's and not the day's. No deadline:
# two workers share two cores, and the first example of a test may load a dictionary.
settings.register_profile("kvsketch", deadline=None, derandomize=True)
settings.load_profile("kvsketch")
