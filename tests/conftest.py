"""What all tests have in common."""

import importlib
import importlib.util

import pytest
import torch
from hypothesis import settings

# The same examples every time, so that a failure is the change's and not the day's. No deadline:
# two workers share two cores, and the first example of a test may load a dictionary.
settings.register_profile("kvsketch", deadline=None, derandomize=True)
settings.load_profile("kvsketch")

# Triton decides for good whether it interprets kernels when it is first imported, which other
# libraries may do. The commands that tests run should not find the variable set.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton")
