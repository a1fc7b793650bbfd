"""Settings that all tests share."""

import gc
import importlib
import importlib.util
import os

import pytest
import torch
from hypothesis import Phase, settings

# The examples are the same in every run, so that a failure comes from a change and not from chance.
# No deadline: two workers share two cores, and the first example of a test may load a dictionary.
settings.register_profile("kvsketch", deadline=None, derandomize=True)
# A mutant needs no smallest example, which would take minutes.
settings.register_profile(
    "mutants", settings.get_profile("kvsketch"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvsketch"))

# Triton decides on its first import, which may be by another library, whether it interprets
# kernels. The commands that tests run should not find the variable set.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton")


#: Properties that are tested of many methods or forms: one in so many of their parameters, from a
#: place that differs from property to property, is in the default run; the others are slow. Every
#: method is so in some of them.
SPREAD = {
    "tests/methods/test_rows.py": 5,
    "tests/methods/test_ragged.py": 3,
    "tests/files/test_saved_caches.py": 3,
    "tests/serving/test_split_pages.py": 3,
    "tests/serving/test_pages.py": 3,
    "tests/hf/test_model_sweep.py": 5,
    "tests/hf/test_rotary.py": 3,
    "tests/cache/test_storage.py": 3,
    "tests/cache/test_measured.py": 2,
    "tests/cache/test_row_budgets.py": 2,
    "tests/benchmarks/test_benchmarks.py": 3,
    "tests/methods/sketches/test_bounded.py": 2,
    "tests/methods/sketches/test_sketches.py": 2,
    "tests/files/test_chat.py": 3,
    "tests/hf/test_cache.py": 2,
    "tests/hf/test_any_order.py": 6,
    "tests/hf/test_ways.py": 3,
    "tests/hf/test_reading.py": 3,
    "tests/hf/test_second_reading.py": 3,
    "tests/hf/test_history.py": 3,
    "tests/hf/test_decoding.py": 3,
    "tests/hf/test_streaming.py": 3,
    "tests/hf/test_pins.py": 2,
    "tests/serving/test_guesses.py": 3,
    "tests/serving/test_pieces.py": 3,
    "tests/serving/test_pages_by_kernels.py": 3,
    "tests/serving/test_conversion.py": 3,
    "tests/serving/test_one_engine.py": 3,
    "tests/cache/test_newest.py": 2,
    "tests/cache/test_recent.py": 3,
    "tests/cache/test_page.py": 2,
    "tests/cache/test_quantized.py": 2,
    "tests/cache/test_windowed_sketch.py": 3,
    "tests/files/test_joining.py": 3,
    "tests/evaluation/test_sweep.py": 3,
    "tests/evaluation/test_longbench.py": 3,
    "tests/evaluation/test_texts.py": 3,
    "tests/evaluation/test_tasks.py": 3,
}


# What is imported stays until the end: no collection of garbage has to look at it again.
gc.disable()


def pytest_collection_finish():
    """Collect garbage from now on."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """Leave nothing that libraries say is leaked."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the parameters of ``SPREAD`` that are not in the default run."""
    places = {}
    for item in items:
        file = item.location[0].replace("\\", "/")
        if file in SPREAD and hasattr(item, "callspec"):
            places.setdefault((file, item.originalname), []).append(item)
    for number, ((file, _), family) in enumerate(sorted(places.items(), key=lambda x: x[0])):
        if len(family) > SPREAD[file]:
            for place, item in enumerate(family):
                if (place + number) % SPREAD[file]:
                    item.add_marker(pytest.mark.slow)
