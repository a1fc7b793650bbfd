"""The scripts have the numbers that BalanceKV's section 4.1 prints;
tests/benchmarks/test_figure2.py tests what they compute with them."""

from __future__ import annotations

import inspect

import pytest

from benchmarks import attention_error, figure2


def test_the_preset_of_figure_2():
    """The first 256 embeddings are kept, the last 256 queries measure, T = 1 .. 4. The tokens from
    n - 256 to j are held out, so that there is no recent window before them."""
    sink, recent, queries, kept = attention_error.PRESETS["balancekv"]
    assert (sink, recent, queries) == (256, 0, 256)
    assert kept == [2.0**-t for t in (1, 2, 3, 4)]


def test_figure_2_is_as_printed():
    """256 tokens at either end, T = 1 .. 4, 10 seeds, and the constant of c = 30 log(n/delta)."""
    assert figure2.KEPT == 256
    assert figure2.RATES == (1, 2, 3, 4)
    assert inspect.signature(figure2.main).parameters["seeds"].default == 10
    assert figure2.CONSTANTS[0] == 30.0


def test_errors_are_means_over_prompts_by_seed():
    """Mean and standard deviation are over seeds, not over prompts."""
    over = figure2.over_seeds([[1.0, 3.0], [2.0, 6.0]])
    assert over["error"] == pytest.approx(3.0)
    assert over["std"] == pytest.approx(((4.5 - 3) ** 2 * 2) ** 0.5)
