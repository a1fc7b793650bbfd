"""Settings that all tests share."""

import importlib
import importlib.util

import pytest
import torch
from hypothesis import settings

# The examples are the same in every run, so that a failure comes from a change and not from chance.
# No deadline: two workers share two cores, and the first example of a test may load a dictionary.
settings.register_profile("kvsketch", deadline=None, derandomize=True)
settings.load_profile("kvsketch")

# Triton decides on its first import, which may be by another library, whether it interprets
# kernels. The commands that tests run should not find the variable set.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton")
