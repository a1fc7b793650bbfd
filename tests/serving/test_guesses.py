"""Tokens that a request decodes at once, some of which are guesses that are rejected."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served import DIM, Served, drawn, queries_of

from kvsketch.errors import UnsupportedError
from kvsketch.estimator import attend
from kvsketch.kernels import native
from kvsketch.page.quantized import Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots
from kvsketch.vllm.checks import check_drafts, check_engine, check_settings, guesses_for
from kvsketch.vllm.drafts import Step
from kvsketch.vllm.pages import compress_all
from kvsketch.vllm.rounds import rounds
from kvsketch.vllm.states import KnownPages, States, alone

PIECE, GUESSES = 20, 4


@pytest.mark.parametrize("method", ["heavy_merge", "h2o", "streaming_llm", "uniform"])
@pytest.mark.parametrize("middle", [None, ((13, 40), Bits(8, 8))], ids=["one part", "two"])
@settings(max_examples=4, deadline=None)
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


class _Drafts:
    """A layer of the guessing model, which follows the steps of a served one."""

    def __init__(self, served: Served, follower: Served) -> None:
        self.served, self.layer = served, follower

    def step(self, parts: list, pieces: list[int], right: list[int], guesses: int) -> list:
        """The outputs of both for the tokens of a step that are right, of each request."""
        count = [len(part[2][0]) for part in parts]
        seen, pages = (np.array([part[i] for part in parts]) for i in (1, 0))
        rhythm = self.served.rhythm
        held = self.served.blocks.states(pages, seen, rhythm)
        step = Step(seen, pages, States(held.last), None, np.array(pieces))
        mine = self.served.step(parts, pieces=pieces)
        layer, noise = self.layer, [t[: len(parts)] for t in drawn(99, len(parts))]
        shape = {"queries": layer.queries, "middle": layer.middle}
        made = partial(rounds, rhythm=rhythm, device=torch.device("cpu"), **shape)
        rejected = np.array(count) - np.array(right)
        starts = np.concatenate([[0], np.cumsum(np.array(count) + 1)])
        rows = [
            [
                torch.cat([t[:good], w[:1].expand(more + 1, -1, -1)])
                for t, w in zip(part[2], noise, strict=True)
            ]
            for part, good, more in zip(parts, right, rejected, strict=True)
        ]
        q, k, v = (torch.cat([row[i] for row in rows]) for i in range(3))
        out = torch.zeros_like(q)
        todo = step.read(starts, rejected, made)
        compress_all(layer.pages.attend(q, k, v, layer.held, todo, out))
        for ahead in range(1, guesses):
            one, behind = np.arange(len(parts) + 1), torch.zeros_like(noise[0])
            todo = step.guess(ahead, one, made)
            compress_all(layer.pages.attend(*noise, layer.held, todo, behind))
            assert not behind.isnan().any()
        self.noise, self.behind = noise, behind
        theirs = [out[at : at + good] for at, good in zip(starts, right, strict=False)]
        return [(one[: len(other)], other) for one, other in zip(mine, theirs, strict=True)]


@pytest.mark.parametrize("method", ["heavy_merge", "h2o", None])
@pytest.mark.parametrize("middle", [None, ((13, 40), Bits(8, 8))], ids=["one part", "two"])
@settings(max_examples=4, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 90), min_size=2, max_size=4),
    pages=st.permutations(range(9)),
    buffer=st.integers(1, 9),
    compiled=st.booleans(),
    guessed=st.lists(
        st.lists(st.tuples(st.integers(0, GUESSES), st.integers(0, GUESSES)), min_size=4),
        min_size=12,
        max_size=12,
    ),
)
def test_requests_beside_each_other(method, middle, compiled, **given):
    """No request reads what was rejected, its own or another's; the layers of a model that guesses
    tokens hold the same slots as they would if they read one token after the other."""
    if method is None and middle is not None:
        return
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "library", lambda: None)
        _beside(method, middle, **given)


def _beside(method, middle, prompts, pages, buffer, guessed):
    slots = 200 if method is None else 24 if middle is None else 8 + buffer
    rhythm, tokens = Rhythm(slots, buffer), 160
    requests = [drawn(10 + number, tokens) for number in range(len(prompts))]
    made = method, rhythm, queries_of(method, rhythm)
    plain, served, follower = (Served(*made, middle=middle) for _ in range(3))
    served.blocks = KnownPages(GUESSES)
    drafts, wrong, seen = _Drafts(served, follower), drawn(2, tokens), [0] * len(prompts)
    for number, prompt in enumerate(prompts):
        part = [(pages[number], 0, [t[:prompt] for t in requests[number]])]
        pieces = [0 if method is None else PIECE]
        plain.step(part, pieces=pieces)
        drafts.step(part, pieces, [prompt], GUESSES)
        seen[number] = prompt
    for step in guessed:
        parts, right = [], []
        for number, (more, good) in enumerate(step[: len(prompts)]):
            at = seen[number]
            count = alone(rhythm, prompts[number], PIECE, at, min(1 + more, tokens - at))
            right.append(min(1 + good, count))
            ours = [
                torch.cat([t[at : at + right[-1]], w[: count - right[-1]]])
                for t, w in zip(requests[number], wrong, strict=True)
            ]
            parts.append((pages[number], at, ours))
        found = drafts.step(parts, [0] * len(parts), right, GUESSES)
        for number, good in enumerate(right):
            at = seen[number]
            expected = torch.cat(
                [
                    plain.step([(pages[number], i, [t[i : i + 1] for t in requests[number]])])[0]
                    for i in range(at, at + good)
                ]
            )
            for one in found[number]:
                torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-4)
            seen[number] += good
            if method is None:  # the last guess follows all tokens that are right, and guesses
                _, k, v = (
                    torch.cat([t[: seen[number]], w[:1], w[[number] * (GUESSES - 1)]])
                    for t, w in zip(requests[number], drafts.noise, strict=True)
                )
                known = Slots(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
                query = drafts.noise[0][number].view(1, -1, 1, DIM)
                last = attend(query, known, scaling=0.5).view(-1, DIM)
                torch.testing.assert_close(drafts.behind[number], last, rtol=1e-3, atol=1e-4)


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


def _config(method: str, **changed: Any) -> SimpleNamespace:
    model = {"use_mla": False, "is_encoder_decoder": False, "is_hybrid": False}
    model["is_mm_prefix_lm"] = changed.get("images", False)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method,
            parallel_drafting=changed.get("parallel_drafting", False),
            draft_model_config=object(),
        ),
        use_v2_model_runner=changed.get("second", False),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changed.get("stages", 1), tensor_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(async_scheduling=changed.get("ahead", False)),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(**model),
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@pytest.mark.parametrize(
    ("method", "changed", "says"),
    [
        ("eagle", {}, r"speculative decoding by eagle \(only by ngram or draft_model\)"),
        ("ngram", {"second": True}, "model runner V2"),
        ("draft_model", {"parallel_drafting": True}, "by parallel_drafting"),
        ("draft_model", {"stages": 2}, "by draft_model with pipeline parallelism"),
        (
            "draft_model",
            {"ahead": True},
            "unset --speculative-config or pass --no-async-scheduling",
        ),
        ("ngram", {"images": True}, "images whose tokens attend to later .*--limit-mm-per-prompt"),
    ],
)
def test_other_ways_to_guess_and_what_a_backend_is_not_asked_are_refused(method, changed, says):
    check_engine(_config(method if method != "eagle" else "ngram"))
    with pytest.raises(UnsupportedError, match=says):
        check_engine(_config(method, **changed))


def test_the_configuration_of_a_guessing_model_is_known():
    served = _config("draft_model")
    other = SimpleNamespace(
        speculative_config=served.speculative_config,
        model_config=served.speculative_config.draft_model_config,
    )
    assert guesses_for(other, served)
    assert not guesses_for(served, served)
    assert not guesses_for(other, _config("draft_model"))
    served.speculative_config.method = "ngram"
    assert not guesses_for(other, served)


def test_curves_are_refused_for_a_guessing_model():
    settings = SimpleNamespace(documents=None, allocation="curves.json", method="heavy_merge")
    check_settings(_config("ngram"), settings)
    with pytest.raises(UnsupportedError, match=r"by draft_model.*unset KVSKETCH_ALLOCATION"):
        check_settings(_config("draft_model"), settings)


def test_a_guessing_model_needs_pages_in_all_layers():
    class Pages:
        pass

    class Others:
        pass

    layers = {"model.0": SimpleNamespace(attn_backend=type("Sized", (Pages,), {})), "moe": object()}
    for method in ("ngram", "draft_model"):
        config = _config(method)
        config.compilation_config.static_forward_context = layers
        check_drafts(config, Pages)
    for wrong in (
        SimpleNamespace(attn_backend=Others),
        SimpleNamespace(attn_backend=Pages, sliding_window=128),
    ):
        config.compilation_config.static_forward_context = {**layers, "draft_model.0": wrong}
        with pytest.raises(UnsupportedError, match=r"draft_model.0 has not.*--speculative-config"):
            check_drafts(config, Pages)
