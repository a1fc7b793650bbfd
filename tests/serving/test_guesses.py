"""Tokens that a request decodes at once, some of which are guesses that are rejected."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Served, drawn, queries_of

from kvsketch.errors import UnsupportedError
from kvsketch.page.quantized import Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.vllm.checks import check_engine
from kvsketch.vllm.states import KnownPages, States, alone

PIECE, GUESSES = 20, 4


@pytest.mark.parametrize("method", ["heavy_merge", "h2o", "streaming_llm", "uniform"])
@pytest.mark.parametrize("middle", [None, ((13, 40), Bits(8, 8))], ids=["one part", "two"])
@settings(max_examples=8, deadline=None)
@given(
    prompt=st.integers(1, 90),
    buffer=st.integers(1, 9),
    right=st.lists(st.tuples(st.integers(0, GUESSES), st.integers(0, GUESSES)), min_size=30),
)
def test_answers_are_those_without_guesses(method, middle, prompt, buffer, right):
    """``right``: how many tokens are guessed in each step, and how many of them are right."""
    rhythm, tokens = Rhythm(24, buffer), prompt + 60
    request, wrong = drawn(1, tokens), drawn(2, tokens)
    given = method, rhythm, queries_of(method, rhythm)
    plain, served = (Served(*given, middle=middle) for _ in range(2))
    served.blocks = KnownPages(GUESSES)
    for one in (plain, served):
        one.step([(3, 0, [t[:prompt] for t in request])], pieces=[PIECE])
    steps = [[t[at : at + 1] for t in request] for at in range(prompt, tokens)]
    expected = torch.cat([plain.step([(3, prompt + at, s)])[0] for at, s in enumerate(steps)])
    found, seen = [], prompt
    for guessed, good in right:
        if seen == tokens:
            break
        count = alone(rhythm, prompt, PIECE, seen, min(1 + guessed, tokens - seen))
        taken = min(1 + good, count)
        ours = [
            torch.cat([a[seen : seen + taken], b[: count - taken]])
            for a, b in zip(request, wrong, strict=True)
        ]
        found.append(served.step([(3, seen, ours)])[0][:taken])
        seen += taken
    mine = torch.cat(found)
    torch.testing.assert_close(mine, expected[: len(mine)], rtol=1e-3, atol=1e-4)


@given(
    slots=st.integers(5, 40),
    buffer=st.integers(1, 9),
    prompt=st.integers(1, 120),
    piece=st.integers(2, 50),
    count=st.integers(1, 6),
)
def test_a_page_is_compressed_behind_single_tokens_only(slots, buffer, prompt, piece, count):
    """Counted one token at a time."""
    rhythm = Rhythm(slots, min(buffer, slots - 1))
    held = start = 0
    for seen in range(1, prompt + 1):
        held += 1
        ends = seen % piece == 0 or seen == prompt
        if (ends and seen - start > 1 and held > rhythm.first) or (
            (not ends or seen - start == 1) and seen == start + 1 == prompt and held == slots
        ):
            held = rhythm.first
        start = seen if ends else start
    seen = prompt
    for _ in range(40):
        taken = alone(rhythm, prompt, piece, seen, count)
        assert 1 <= taken <= count
        assert taken == 1 or held + taken < slots
        assert taken == count or held + taken + 1 >= slots
        seen, held = seen + taken, held + taken
        if held == slots:
            held = rhythm.first


def test_states_of_pages_whose_last_tokens_were_rejected():
    rhythm, one = Rhythm(24, 8), np.array([5])
    blocks = KnownPages(4)
    blocks.put(one, np.array([50]), np.array([45]))
    regular = States.regular(rhythm, np.array([44])).last[0]
    for seen, last in ((50, 45), (46, 45), (45, States.regular(rhythm, np.array([45])).last[0])):
        assert blocks.states(one, np.array([seen]), rhythm).last[0] == last
    assert blocks.states(one, np.array([44]), rhythm).last[0] == regular
    assert KnownPages().states(one, np.array([49]), rhythm).last[0] == 48


@pytest.mark.parametrize(
    ("method", "second", "says"),
    [("eagle", False, "speculative decoding by another model"), ("ngram", True, "model runner V2")],
)
def test_other_ways_to_guess_are_refused(method, second, says):
    model = {"use_mla": False, "is_encoder_decoder": False, "is_hybrid": False}
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method),
        use_v2_model_runner=second,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(**model),
    )
    with pytest.raises(UnsupportedError, match=f"{says}.*unset --speculative-config"):
        check_engine(config)
