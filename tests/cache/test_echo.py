"""A prompt's own queries, asked again after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from families import build
from kvsketch import SketchCache
from kvsketch.cache import echo
from kvsketch.cache.echo import Echo, some_of
from kvsketch.cache.error import QUERIES, Errors
from kvsketch.cache.scores import Scores
from kvsketch.cache.stream import Stream
from kvsketch.hf import parts
from kvsketch.methods.heavy_merge import HeavyMerge
from kvsketch.methods.learned import largest_attention
from kvsketch.methods.scoring import recent_attention
from kvsketch.observed import Observed
from kvsketch.page.page import Page
from kvsketch.slots import Slots


def ids_of(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def letters(text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
    """In the place of a tokenizer."""
    return {"input_ids": [ord(letter) % 90 for letter in text]}


def marked(start: int, count: int, live: Tensor | None = None) -> Observed:
    """Queries that say which token they belong to."""
    numbers = torch.arange(start, start + count).float()
    return Observed(numbers.view(1, 1, -1, 1).expand(2, 4, -1, 8), 0.5, live=live)


def later(queries: Tensor, by: int) -> Tensor:
    return queries + 1000 * by


def test_all_queries_of_a_prompt_are_moved_behind_it() -> None:
    heard = Echo(later)
    for start in (0, 100, 150):
        count = 100 if start == 0 else 50
        heard.add(marked(start, count), start + count)
    asked, sample = heard.asked()
    assert heard.covered == 200
    assert sample is None
    assert asked.after
    assert asked.queries[1, 3, :, 0].tolist() == [200_000 + n for n in range(200)]


def test_queries_after_a_gap_are_not_those_of_the_prompt() -> None:
    heard = Echo(later)
    heard.add(marked(0, 10), 10)
    heard.add(marked(11, 10), 21)
    assert heard.covered == 10
    assert heard.asked()[0].queries.shape[2] == 10


@pytest.mark.parametrize("chunk", [90, 700])
@pytest.mark.parametrize(("most", "pairs"), [(256, echo.PAIRS), (echo.MOST, 256 * 700)])
def test_a_long_prompt_keeps_runs_of_its_queries(
    most: int, pairs: int, chunk: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(echo, "MOST", most)
    monkeypatch.setattr(echo, "PAIRS", pairs)
    heard, live = Echo(later), torch.ones(2, 700, dtype=torch.bool)
    live[1, :70] = False
    for start in range(0, 700, chunk):
        end = min(start + chunk, 700)
        heard.add(marked(start, end - start, live[:, start:end]), end)
        kept = sum(t.shape[2] for t in heard.tensors())
        assert kept <= most
        assert kept * end <= pairs
    asked, sample = heard.asked()
    expected = [n for n in range(700) if n // echo.RUN % 4 == 0]
    assert sample is not None
    assert sample.tolist() == expected
    assert asked.queries[0, 0, :, 0].tolist() == [700_000 + n for n in expected]
    assert asked.live is not None
    assert torch.equal(asked.live, live[:, expected])


@pytest.mark.parametrize("count", [5, 40, 3000, 40_000])
def test_a_few_queries_wait_to_measure_on(count: int) -> None:
    few = some_of(Observed(torch.arange(count).float().view(1, 1, -1, 1), 1.0, after=True))
    kept = few.queries.shape[2]
    assert min(count, 32) <= kept <= 2 * 256
    steps = few.queries.flatten().diff()
    assert bool((steps == steps[0]).all())


@pytest.mark.parametrize("way", ["plain", "padded", "capped", "sinks"])
def test_the_largest_share_is_added_to_the_attention_of_the_last_queries(way: str) -> None:
    """Against all scores in float64."""
    made = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 2, 30, 8, generator=made) for _ in range(2))
    queries = 2 * torch.randn(2, 4, 30, 8, generator=made)
    score = torch.rand(2, 2, 30, generator=made)
    mass, live, more = None, None, {}
    if way == "padded":
        live = torch.ones(2, 30, dtype=torch.bool)
        live[1, :9] = False
        mass = live[:, None].expand(2, 2, 30).float()
        more = {"live": live}
    if way == "capped":
        more = {"softcap": 3.0}
    if way == "sinks":
        more = {"sinks": torch.randn(4, generator=made)}
    asked = Observed(queries, 0.4, after=True, **more)
    found = HeavyMerge().echo(Slots(keys, values, mass, score=score), asked, None, False).score
    exact = 0.4 * queries.double().view(2, 2, 2, 30, 8) @ keys.double().unsqueeze(2).mT
    if way == "capped":
        exact = 3 * torch.tanh(exact / 3)
    if live is not None:
        exact = exact.masked_fill(~live[:, None, None, None], -torch.inf)
    total = exact.logsumexp(-1, keepdim=True)
    if way == "sinks":
        total = torch.logaddexp(total, more["sinks"].double().view(1, 2, 2, 1, 1))
    share = (exact - total).exp()
    if live is not None:
        share = share * live[:, None, None, :, None]
    most = share.amax((2, 3))
    assert found is not None
    torch.testing.assert_close(found, (score + most).float(), rtol=1e-4, atol=1e-5)
    alone = HeavyMerge().echo(Slots(keys, values, mass, score=score), asked, None, True).score
    torch.testing.assert_close(alone, most.float(), rtol=1e-4, atol=1e-5)


def test_the_attention_of_the_last_queries_counts_four_times() -> None:
    made = torch.Generator().manual_seed(6)
    keys, values = (torch.randn(1, 2, 90, 8, generator=made) for _ in range(2))
    slots = Slots(keys, values)
    for q in (90, 5):
        asked = Observed(torch.randn(1, 4, q, 8, generator=made), 0.4)
        found = HeavyMerge().observe(slots, asked).score
        assert found is not None
        mean, _ = recent_attention(slots, asked, 64)
        torch.testing.assert_close(found, 4 * mean)
        low, high = found - 0.1, found + 0.1  # what is larger stays
        for before, after in ((low, found), (high, high)):
            again = HeavyMerge().observe(Slots(keys, values, score=before), asked).score
            torch.testing.assert_close(again, after)
    weights = HeavyMerge().weights_of(asked)
    assert weights is not None
    torch.testing.assert_close(weights, 4 / 64 * (1 - 1 / 64) ** torch.arange(4.0, -1.0, -1.0))


def test_tokens_outside_the_runs_get_predicted_scores() -> None:
    made = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, 1, 80, 8, generator=made) for _ in range(2))
    asked = Observed(torch.randn(1, 1, 40, 8, generator=made), 0.5, after=True)
    slots = Slots(keys, values, score=torch.zeros(1, 1, 80))
    whole = HeavyMerge().echo(slots, asked, None, False).score
    part = HeavyMerge().echo(slots, asked, torch.arange(40), False).score
    assert whole is not None
    assert part is not None
    assert bool((part >= whole).all())
    assert bool((part[..., 40:] > whole[..., 40:]).any())


@torch.no_grad()
def read(model: Any, tokens: int = 300, **settings: Any) -> SketchCache:
    cache = SketchCache(model.config, **settings)
    model(ids_of(1, tokens), past_key_values=cache, use_cache=True)
    return cache


def test_budgets_by_scores_follow_an_echo_and_others_do_not() -> None:
    llama = build("llama")
    assert read(llama, budget=0.3).summary()["allocation"] == "global"
    for given, named in (
        ({"budget": 0.3, "allocation": "measured"}, "measured"),
        ({"tolerance": 0.5}, "tolerance"),
        ({"budget": 0.3, "method": "snapkv"}, "even"),
        ({"budget": 90, "prefill": "streaming"}, "even"),
    ):
        cache = read(llama, **given)
        assert cache.summary()["allocation"] == named
        asked = any(layer.stream.scores.asked_again for layer in cache._sketches())
        assert asked == ("prefill" in given)  # whose bits are chosen on its first piece
    # learned positions: the queries cannot be moved
    assert read(build("opt"), budget=0.3).summary()["allocation"] == "measured"


def test_an_even_budget_keeps_other_tokens_with_an_echo() -> None:
    llama, settings = build("llama"), {"budget": 0.2, "allocation": "even", "bits": 16}
    heard = read(llama, **settings)
    assert all(layer.stream.scores.asked_again for layer in heard._sketches())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsketch.hf.layer.turn_of", lambda *_: None)
        silent = read(llama, **settings)
    assert not torch.equal(heard.layers[1].keys, silent.layers[1].keys)


def test_a_prompt_that_fits_is_not_asked_again() -> None:
    """Nor are its queries held any longer; the next prompt's do not ask for its tokens."""
    llama = build("llama")
    cache = SketchCache(llama.config, budget=200, allocation="even", bits=16)
    with torch.no_grad():
        llama(ids_of(1, 150), past_key_values=cache, use_cache=True)
        streams = [layer.stream for layer in cache._sketches()]
        assert all(stream.scores.echo is None for stream in streams)
        llama(ids_of(1, 150, seed=1), past_key_values=cache, use_cache=True)
    assert all(stream.compressed and not stream.scores.asked_again for stream in streams)


def test_an_echo_in_parts_is_that_of_the_whole_prompt() -> None:
    llama, ids = build("llama"), ids_of(2, 260)
    whole, parts = (SketchCache(llama.config, budget=0.3) for _ in range(2))
    kvsketch.prefill(llama, ids, whole)
    kvsketch.prefill(llama, ids, parts, chunk_size=70)
    for one, other in zip(whole._sketches(), parts._sketches(), strict=True):
        assert one.stream.scores.asked_again
        assert other.stream.scores.asked_again
        assert torch.equal(one.stream.held, other.stream.held)
    assert whole.summary()["kv_bytes"] == parts.summary()["kv_bytes"]


def test_the_error_is_that_of_the_prompts_last_queries(monkeypatch: Any) -> None:
    """An echo changes what is kept, and not the queries on which the error is measured."""
    asked, ask = [], Errors.ask

    def watched(self: Errors, held: Any, last: Observed, *rest: Any) -> None:
        asked.append(last)
        ask(self, held, last, *rest)

    monkeypatch.setattr(Errors, "ask", watched)
    for bits in (16, None):  # compressed at once, and once the plan has given the budget
        asked.clear()
        cache = read(build("llama"), budget=0.3, allocation="even", bits=bits)
        assert len(asked) == len(cache._sketches())
        assert not any(last.after for last in asked)
        assert all(last.queries.shape[2] in (QUERIES, 300) for last in asked)
        assert all(layer.stream.scores.last is None for layer in cache._sketches())


def test_most_of_the_budget_stays_unchanged() -> None:
    """0.9 of it after an echo, and 0.25 where only the last queries have scored the tokens."""
    llama, ones = build("llama"), []
    for method in ({}, {"allocation": "measured"}):
        cache = read(llama, tokens=400, budget=0.3, bits=16, sink=4, recent=16, **method)
        mass = torch.cat([layer.stream.slots.masses().flatten() for layer in cache._sketches()])
        ones.append(float((mass == 1).sum() / (mass > 0).sum()))
    assert ones[0] > 0.85
    assert ones[1] < 0.7


def test_bits_are_the_most_in_which_all_tokens_fit() -> None:
    llama = build("llama")
    bits = {
        budget: {tuple(layer.stream.pace.bits) for layer in read(llama, budget=budget)._sketches()}
        for budget in (0.2, 0.6, 0.95)
    }
    assert bits[0.2] == {(4, 4)}
    assert len(bits[0.6]) == len(bits[0.95]) == 1
    (some,), (most,) = bits[0.6], bits[0.95]
    assert (4, 4) <= some <= most
    assert most == (8, 8)
    assert read(llama, budget=0.95).summary()["slots"] == 300


def test_a_bound_spends_the_budget_and_a_published_method_has_none() -> None:
    """Layers read first are compressed to a bound and then again; nothing of the budget is lost."""
    llama = build("llama")
    heard = read(llama, tokens=500, budget=0.2, bits=16)
    assert heard.summary()["slots"] == pytest.approx(100, rel=0.02)
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        spend = Stream.spend

        def watched(self: Stream, budget: Any, provisional: bool = False, *rest: Any) -> None:
            sizes.append(provisional)
            spend(self, budget, provisional, *rest)

        patch.setattr(Stream, "spend", watched)
        read(llama, tokens=500, budget=0.2, bits=16)
        assert any(sizes)
        sizes.clear()
        read(llama, tokens=500, budget=0.2, method="snapkv", allocation="global")
        assert sizes
        assert not any(sizes)


def test_a_head_wants_no_more_than_its_bound_has_left(monkeypatch: Any) -> None:
    """Otherwise bytes of the budget would be spent on tokens that are gone."""
    importance, llama = Scores.importance, build("llama")
    calls: list[Scores] = []

    def first_layer_alone(self: Scores, slots: Slots) -> Tensor:
        calls.append(self)
        return importance(self, slots) * (1.0 if len(calls) == 1 else 1e-6)

    monkeypatch.setattr(Scores, "importance", first_layer_alone)
    cache = read(llama, tokens=500, budget=0.3, bits=16)
    first, second = (float(x.stream.held.float().mean()) for x in cache._sketches())
    assert first > 1.2 * second
    assert first + second == pytest.approx(2 * 150, rel=0.02)


def test_an_echo_without_some_of_the_prompt_is_none(monkeypatch: Any) -> None:
    add = Echo.add
    monkeypatch.setattr(
        Echo, "add", lambda self, observed, seen: None if seen == 200 else add(self, observed, seen)
    )
    cache = SketchCache(build("llama").config, budget=0.3)
    kvsketch.prefill(build("llama"), ids_of(1, 300), cache, chunk_size=100)
    assert cache.summary()["allocation"] == "measured"
    assert not any(layer.stream.scores.asked_again for layer in cache._sketches())


def test_a_prompt_too_short_for_a_plan_holds_no_echo() -> None:
    cache = read(build("llama"), tokens=40, budget=0.9)
    streams = [layer.stream for layer in cache._sketches()]
    assert all(stream.waits and stream.scores.echo is None for stream in streams)


@pytest.mark.filterwarnings("ignore::kvsketch.errors.AccuracyWarning")
@pytest.mark.parametrize("allocation", ["global", "measured"])
@pytest.mark.parametrize("tokens", [100, 300])
def test_a_sample_corrects_an_echo(tokens: int, allocation: str, monkeypatch: Any) -> None:
    """Of a prompt that is short, all is read again, and nothing has to be predicted."""
    model, found = build("llama"), []
    monkeypatch.setattr(parts, "ROW", 100)
    monkeypatch.setattr(parts, "OF_ROW", 20)
    spend = Stream.spend

    def spent(self: Stream, *args: Any, **settings: Any) -> None:
        if not self.compressed:  # not again, after an upper bound
            scores = self.scores
            found.append((scores.asked_again, scores.queries.after, self.slots.score))
        spend(self, *args, **settings)

    monkeypatch.setattr(Stream, "spend", spent)
    cache = SketchCache(model.config, budget=0.3, allocation=allocation)
    ids = ids_of(1, tokens)
    kvsketch.prefill(model, ids, cache, queries="sample", tokenizer=letters, chunk_size=80)
    expected: list[Tensor] = []
    hear = Scores.hear

    def heard(self: Scores, page: Page, seen: int, observed: Observed, after: int) -> None:
        kept = self.echo
        hear(self, page, seen, observed, after)
        assert kept is not None
        if kept.covered == tokens:
            assert self.echo is None  # queries of all layers would be more than the cache
            asked, some = kept.asked()
            assert some is None
            expected.append(largest_attention(page.slots, asked, None))

    read_again: list[tuple[Tensor, Tensor]] = []
    complete = HeavyMerge.complete

    def completed(self: HeavyMerge, slots: Slots, some: Tensor, echo: Tensor | None) -> Slots:
        assert slots.score is not None
        read_again.append((slots.score[:, :, some].clone(), some))
        return complete(self, slots, some, echo)

    monkeypatch.setattr(HeavyMerge, "complete", completed)
    monkeypatch.setattr(Scores, "hear", heard)
    again = SketchCache(model.config, budget=0.3, allocation=allocation)
    kvsketch.prefill(model, ids, again, queries="sample", tokenizer=letters, chunk_size=80)
    assert len(expected) == len(read_again) == (0 if tokens == 100 else len(cache._sketches()))
    for (_, _, score), told, (known, some) in zip(found, expected, read_again, strict=False):
        ratio = known.mean(-1, keepdim=True) / told[:, :, some].mean(-1, keepdim=True)
        wanted = told * ratio.sqrt()
        wanted[:, :, some] = torch.maximum(wanted[:, :, some], known)
        torch.testing.assert_close(score, wanted)
    assert len(found) == 2 * len(cache._sketches())  # of both prompts
    assert all(not asked_again and after for asked_again, after, _ in found)
    assert all(layer.stream.scores.echo is None for layer in cache._sketches())


def test_heads_are_compared_by_what_stands_out() -> None:
    """Tokens that a head attends to like most others can share slots."""
    made = torch.Generator().manual_seed(4)
    score = torch.rand(2, 2, 50, generator=made) * 0.05 + 0.1
    score[:, 0, 30:33] = 0.6
    score[:, 1] = 1e-4
    score[:, 1, 7] = 0.05  # less than any token of the other head
    values = torch.nn.functional.normalize(torch.randn(2, 2, 50, 8, generator=made), dim=-1)
    live = torch.ones(2, 50)
    live[1, :20] = 0
    mass = live[:, None].expand(2, 2, 50)
    score, values = score * mass, values * mass.unsqueeze(-1)
    slots = Slots(torch.randn(2, 2, 50, 8), values, mass, score=score)
    found = HeavyMerge().importance(slots)
    order = found[0].flatten().argsort(descending=True)
    assert sorted(order[:3].tolist()) == [30, 31, 32]
    assert int(order[3]) == 50 + 7
    # The weight decides among tokens that do not stand out.
    worth = score[0, 0] * values[0, 0].norm(dim=-1)
    assert torch.equal(found[0, 0].argsort(), worth.argsort())
    # Padding is no token of the head.
    varied = replace(slots, score=score**6)
    found = HeavyMerge().importance(varied)
    alone = HeavyMerge().importance(varied.map(lambda t: t[1:, :, 20:]))
    torch.testing.assert_close(found[1:, :, 20:], alone, atol=1e-9, rtol=1e-3)


def test_a_head_that_needs_most_of_its_tokens_gets_them() -> None:
    """All of them are attended to like most others, and each by some query more than all else. Its
    other tokens count, too, and do not in a head of which fewer than half are such."""
    made = torch.Generator().manual_seed(5)
    score = torch.rand(1, 2, 60, generator=made) * 0.05
    score[:, 0, :50] = torch.rand(50, generator=made) * 0.2 + 0.8
    values = torch.nn.functional.normalize(torch.randn(1, 2, 60, 8, generator=made), dim=-1)
    found = HeavyMerge().importance(Slots(torch.randn(1, 2, 60, 8), values, score=score))
    best = found[0].flatten().argsort(descending=True)[:50]
    assert sorted(best.tolist()) == list(range(50))
    assert torch.equal(found[0, 0], score[0, 0] * values[0, 0].norm(dim=-1))
    score[:, 0, :25] /= 2
    score[:, 0, 25:50] /= 5
    fewer = HeavyMerge().importance(Slots(torch.randn(1, 2, 60, 8), values, score=score))
    worth = score[0, 0] * values[0, 0].norm(dim=-1)
    assert bool((worth[:25] < 3 * worth.median()).all())
    assert torch.equal(fewer[0, 0, :25], worth[:25])
    assert bool((fewer[0, 0, 25:] < 0.01 * worth[25:]).all())
