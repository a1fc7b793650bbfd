"""Budgets measured on a prompt are that prompt's own: a row's answer does not depend on the other
rows of its batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from families import VOCABULARY, build
from kvsketch import SketchCache

#: 16 bits, since measured bits are chosen for all rows together
WINDOW: dict[str, Any] = {"sink": 2, "recent": 6, "bits": 16}
WAYS: list[dict[str, Any]] = [
    {"budget": 0.4},
    {"budget": 60},
    {"tolerance": 0.2},
    {"tolerance": 0.05, "budget": 0.3},
    {"method": "snapkv", "budget": 0.3, "allocation": "measured"},
    {"method": "snapkv", "budget": 0.3, "allocation": "layer"},
]


def prompts() -> list[torch.Tensor]:
    """Three kinds of prompts: random tokens, three tokens at random, one line repeated."""
    generator = torch.Generator().manual_seed(0)
    free = torch.randint(3, VOCABULARY, (1, 160), generator=generator)
    few = torch.randint(3, 6, (1, 160), generator=generator)
    line = torch.randint(3, VOCABULARY, (1, 16), generator=generator).repeat(1, 10)
    return [free, few, line]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@torch.no_grad()
def run(model: Any, rows: list[torch.Tensor], cache: SketchCache, new: int = 24) -> torch.Tensor:
    """Logits after the prompt and after each further token, ``[steps, rows, ids]``."""
    out = [model(torch.cat(rows), past_key_values=cache).logits[:, -1]]
    generator = torch.Generator().manual_seed(1)
    for token in torch.randint(3, VOCABULARY, (new,), generator=generator).tolist():
        ids = torch.full((len(rows), 1), token)
        out.append(model(ids, past_key_values=cache).logits[:, -1])
    return torch.stack(out)


@pytest.mark.parametrize("settings", WAYS)
def test_a_row_goes_as_it_goes_alone(model: Any, settings: dict[str, Any]) -> None:
    rows = prompts()
    cache = SketchCache(model.config, **settings, **WINDOW)
    together = run(model, rows, cache)
    assert any(len(layer.stream.pace.budget.rows) == 3 for layer in cache.layers)
    slots = []
    for number, row in enumerate(rows):
        alone = SketchCache(model.config, **settings, **WINDOW)
        expected = run(model, [row], alone)[:, 0]
        torch.testing.assert_close(together[:, number], expected, rtol=1e-3, atol=1e-3)
        slots.append(alone.summary()["slots"])
    assert cache.summary()["slots"] == pytest.approx(sum(slots) / 3)
    if "tolerance" in settings:
        assert max(slots) > 1.05 * min(slots), "these prompts need different numbers of slots"


@pytest.mark.parametrize("method", ["uniform", "balancekv", "subgen"])
@pytest.mark.parametrize("allocation", ["even", "measured"])
def test_random_choices_are_a_row_s_own(model: Any, method: str, allocation: str) -> None:
    """The random numbers of a row follow from its number in the batch, not from the other rows."""
    free, few, line = prompts()
    settings = {"budget": 0.4, "allocation": allocation, **WINDOW}
    found = []
    for neighbours in ([free, few], [line, line]):
        cache = SketchCache(model.config, method, **settings)
        found.append(run(model, [*neighbours, free], cache)[:, 2])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_errors_are_the_worst_row_s(model: Any) -> None:
    rows = prompts()
    cache = SketchCache(model.config, budget=0.4, **WINDOW)
    run(model, rows, cache, new=1)
    alone = [SketchCache(model.config, budget=0.4, **WINDOW) for _ in rows]
    for row, own in zip(rows, alone, strict=True):
        run(model, [row], own, new=1)
    for layer, found in enumerate(cache.error()):
        own = [a.error()[layer]["prompt"] for a in alone]
        worst = [max(errors) for errors in zip(*own, strict=True)]
        assert found["prompt"] == pytest.approx(worst, rel=1e-3)


def test_rows_take_their_budgets_with_them(model: Any) -> None:
    """Rows that are reordered, repeated or selected keep their budgets."""
    cache = SketchCache(model.config, tolerance=0.2, **WINDOW)
    run(model, prompts(), cache, new=3)
    token = torch.tensor([[7]])
    with torch.no_grad():
        expected = model(token.repeat(3, 1), past_key_values=copy.deepcopy(cache)).logits
        for order, change in (
            ([2, 2, 0], lambda c: c.reorder_cache(torch.tensor([2, 2, 0]))),
            ([0, 0, 1, 1, 2, 2], lambda c: c.batch_repeat_interleave(2)),
            ([2, 0], lambda c: c.batch_select_indices(torch.tensor([2, 0]))),
        ):
            twin = copy.deepcopy(cache)
            change(twin)
            logits = model(token.repeat(len(order), 1), past_key_values=twin).logits
            torch.testing.assert_close(logits, expected[order], rtol=1e-4, atol=1e-4)


def test_heads_above_the_tolerance_are_those_of_any_row(model: Any) -> None:
    settings = {"tolerance": 0.02, "budget": 0.7, **WINDOW}
    above = []
    for rows in ([row] for row in prompts()):
        cache = SketchCache(model.config, **settings)
        run(model, rows, cache, new=0)
        above.append([set(layer["above_tolerance"]) for layer in cache.summary()["layers"]])
    cache = SketchCache(model.config, **settings)
    run(model, prompts(), cache, new=0)
    for layer, *alone in zip(cache.summary()["layers"], *above, strict=True):
        assert set(layer["above_tolerance"]) == set.union(*alone) != set.intersection(*alone)


def test_selected_rows_go_on_as_they_go_alone(model: Any) -> None:
    """Selected rows take the queries that wait to become scores and the measured errors along."""
    free, few, line = prompts()
    settings = {"budget": 120, "allocation": "even", "keep": ["errors"], **WINDOW}
    found = []
    for rows in ([line, few], [free, few, line]):
        cache = SketchCache(model.config, "h2o", **settings)
        run(model, rows, cache, new=1)
        if len(rows) == 3:
            cache.batch_select_indices(torch.tensor([2, 1]))
        with torch.no_grad():
            for token in range(3, 23):
                ids = torch.full((2, 1), token)
                logits = model(ids, past_key_values=cache).logits
        found.append((logits, [layer["now"] for layer in cache.error()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-3)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_beams_of_several_prompts(model: Any) -> None:
    ids = torch.cat(prompts())
    cache = SketchCache(model.config, tolerance=0.2, **WINDOW)
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        num_beams=2,
        do_sample=False,
        max_new_tokens=8,
    )
    assert answer.shape == (3, 168)
    assert cache.summary()["slots"] < 160


def test_padding_of_a_neighbour_does_not_matter(model: Any) -> None:
    """A row has the same logits whether another row is padded or not."""
    rows = torch.cat(prompts()[:2])
    mask = torch.ones_like(rows)
    mask[0, :20] = 0
    found = []
    with torch.no_grad():
        for neighbour in (mask, torch.ones_like(mask)):
            cache = SketchCache(model.config, budget=60, **WINDOW)
            model(rows, attention_mask=neighbour, past_key_values=cache)
            after = torch.cat([neighbour, neighbour[:, -1:]], dim=1)
            step = torch.full((2, 1), 7)
            out = model(step, attention_mask=after, past_key_values=cache).logits
            found.append(out[1])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
