"""The settings of an engine."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvsketch.vllm
from kvsketch import InputError, UnsupportedError
from kvsketch.cache import Curves
from kvsketch.vllm.settings import SERVED, PageSettings, read
from kvsketch.vllm.states import States

RIGHT = {"KVSKETCH_METHOD": "snapkv", "KVSKETCH_BUDGET": "0.25", "KVSKETCH_RECENT": "16"}


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.3"])
def test_other_releases_are_refused(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setenv("KVSKETCH_METHOD", "exact")
    said = f"serves with vLLM 0.32 and 0.33, this is {version}: install vllm==0.33.*"
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        kvsketch.vllm.register()


def test_variables_and_the_engines_configuration():
    assert read({}, {}) is None
    assert read(None, {"KVSKETCH_DATA": "there", "HOME": "/"}) is None
    assert read({}, RIGHT) == PageSettings("snapkv", 0.25, recent=16)
    assert read({"budget": 300, "sink": 2}, RIGHT) == PageSettings("snapkv", 300, 2, 16)
    assert read({"method": "exact"}, {}) == PageSettings("exact")


@pytest.mark.parametrize(
    ("config", "environment", "said"),
    [
        ({}, {"KVSKETCH_METHOD": "snapvk", "KVSKETCH_BUDGET": "9"}, "did you mean 'snapkv'"),
        ({}, {"KVSKETCH_METHOD": "subgen", "KVSKETCH_BUDGET": "9"}, "Allowed: "),
        ({}, {"KVSKETCH_METHOD": "snapkv"}, "budget is missing"),
        ({}, {"KVSKETCH_BUDGET": "a lot"}, "KVSKETCH_BUDGET='a lot' is not a number"),
        ({}, {"KVSKETCH_BUDGET": "1.5"}, "must be <= 1"),
        ({}, {"KVSKETCH_BUDGET": "-3"}, "budget=-3"),
        ({}, {"KVSKETCH_BUGDET": "9"}, "KVSKETCH_BUGDET"),
        ({}, {**RIGHT, "KVSKETCH_SINK": "-1"}, "sink=-1"),
        ({}, {**RIGHT, "KVSKETCH_BUFFER": "0"}, "buffer=0"),
        ({}, {"KVSKETCH_METHOD": "exact", "KVSKETCH_BUDGET": "9"}, "leave budget out"),
        ({}, {**RIGHT, "KVSKETCH_BUFFER": "1.5"}, "buffer=1.5"),
        ("budget", RIGHT, "must be an object"),
        ({"bugdet": 3}, RIGHT, "kvsketch setting='bugdet'"),
        ({"budget": True}, RIGHT, "budget=True"),
        ({"budget": float("nan")}, RIGHT, "budget=nan"),
        ({}, {**RIGHT, "KVSKETCH_BITS": "5"}, "bits=5 must be one of 16"),
        ({}, {"KVSKETCH_METHOD": "exact", "KVSKETCH_BITS": "8"}, "leave bits out"),
        ({}, {**RIGHT, "KVSKETCH_ALLOCATION": "/no/such"}, "'/no/such' cannot be read"),
        ({"allocation": 3}, RIGHT, "allocation=3 must be the path"),
        ({}, {**RIGHT, "KVSKETCH_TOLERANCE": "0"}, "tolerance=0 must be a number > 0"),
        ({"tolerance": "some"}, RIGHT, "tolerance='some'"),
        ({}, {**RIGHT, "KVSKETCH_SEED": "1.5"}, "seed=1.5 must be an int"),
        ({}, {**RIGHT, "KVSKETCH_DOCUMENTS": "/no/such"}, "documents='/no/such' must be a folder"),
        ({"documents": 0}, RIGHT, "documents=0 must be a folder"),
        ({}, {**RIGHT, "KVSKETCH_SQUEEZE": "2"}, "squeeze=2 must be 0 or 1"),
    ],
)
def test_what_is_wrong_is_said(config, environment, said):
    with pytest.raises(InputError, match=said.replace("[", r"\[")):
        read(config, environment)


def test_every_variable_of_the_package_is_known():
    """With any other variable of the package set, vLLM starts as without kvsketch."""
    root = Path(__file__).resolve().parents[2]
    files = [
        *root.glob("src/**/*.py"),
        *root.glob("benchmarks/**/*.py"),
        *root.glob("tests/**/*.py"),
    ]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    named = set(re.findall(r"\bKVSKETCH_[A-Z_]*[A-Z]\b", text)) - {"KVSKETCH_BUGDET"}
    assert {"KVSKETCH_METHOD", "KVSKETCH_DATA", "KVSKETCH_PEERS_PYTHON"} <= named
    mine = {f"KVSKETCH_{name.upper()}" for name in PageSettings.__dataclass_fields__}
    assert read({}, dict.fromkeys(named - mine, "somewhere")) is None


def test_a_page_has_room_for_the_budget_and_a_buffer():
    rhythm = PageSettings("snapkv", 1000).rhythm(9000)
    assert (rhythm.slots, rhythm.every, rhythm.kept) == (1025, 100, 925)
    assert PageSettings("snapkv", 4000).rhythm(9000).every == 4 * 64
    few = PageSettings("snapkv", 1000, bits=4).rhythm(9000)
    assert (few.slots, few.every, few.kept) == (36 + 50, 50, 975)
    assert PageSettings("snapkv", 1000, buffer=7).rhythm(9000).slots == 1007
    assert PageSettings("snapkv", 0.25).rhythm(9001).slots == 2251 + 56
    assert PageSettings("exact").rhythm(500).slots == 501
    for bits, least in ((16, 40), (4, 38)):
        with pytest.raises(InputError, match=f"at least {least}"):
            PageSettings("snapkv", least - 1, bits=bits).rhythm(9000)
        assert PageSettings("snapkv", least, bits=bits).rhythm(9000).kept == 37


def curves(tmp_path: Path, model: str | None = "llama") -> str:
    """Save curves of two layers with three KV heads, the last of which needs most slots."""
    levels = torch.tensor([1 / 16, 1 / 4, 1.0], dtype=torch.float64)
    need = torch.tensor([[1.0, 2.0, 30.0], [1.0, 1.0, 9.0]], dtype=torch.float64)
    error = need.unsqueeze(-1) * torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    Curves(error, levels, model=model).save(tmp_path / "curves.json")
    return str(tmp_path / "curves.json")


def test_budgets_by_curves(tmp_path):
    settings = PageSettings("snapkv", 1025, allocation=curves(tmp_path), bits=8)
    sizes = settings.sizes(4000, 2, 3, "llama")
    kept = [size + 36 for layer in sizes for size in layer]
    assert sum(kept) == pytest.approx(6 * 1000, rel=0.01)
    assert sizes[0][2] == max(map(max, sizes)) > 2 * sizes[0][0]
    # where a context is too long for the curves, their smallest level applies
    far = settings.sizes(400_000, 2, 3, "llama")
    assert far == PageSettings("snapkv", 1025, bits=8, allocation=settings.allocation).sizes(
        8000, 2, 3, "llama"
    )
    layout = settings.layout(4000, 3, 4, 64, torch.bfloat16, sizes[0])
    assert layout.middle == tuple(sizes[0])
    assert settings.rhythm(4000).slots == 36 + 50
    with pytest.raises(InputError, match="2 layers x 3 KV heads, the model compresses 2 x 4"):
        settings.sizes(4000, 2, 4, "llama")
    with pytest.raises(InputError, match=r"another model \(llama\), this one is qwen"):
        settings.sizes(4000, 2, 3, "qwen")
    nobody = PageSettings("snapkv", 1025, allocation=curves(tmp_path, None), bits=8)
    assert nobody.sizes(4000, 2, 3, "qwen") == sizes


def test_a_page_in_few_bits_is_smaller():
    pages = [
        PageSettings("heavy_merge", 4000, bits=bits).layout(99_999, 8, 4, 128, torch.bfloat16).bytes
        for bits in (16, 8, 4)
    ]
    assert pages[1] < 0.59 * pages[0]
    assert pages[2] < 0.39 * pages[0]


@given(budget=st.integers(50, 300), buffer=st.integers(1, 3), seen=st.integers(0, 900))
def test_all_slots_follow_from_tokens(budget, buffer, seen):
    rhythm = PageSettings("snapkv", budget, buffer=buffer, bits=4).rhythm(9000)
    assert rhythm.every == 2 * buffer
    window = middle = 0
    for _ in range(seen):
        window += 1
        if window == rhythm.slots:
            middle = min(middle + rhythm.every, rhythm.kept - 36)
            window -= rhythm.every
    states = States.regular(rhythm, np.array([seen]))
    filled = states.filled(rhythm, rhythm.middle)
    assert (states.held(rhythm, np.array([seen])), filled) == (window, middle)
    assert window + middle <= budget + buffer


def test_a_method_with_a_window_keeps_no_more_queries():
    shape = 9000, 2, 4, 16, torch.bfloat16
    layout = PageSettings("heavy_merge", 4000).layout(*shape)
    assert layout.queries == 64 < PageSettings("heavy_merge", 4000).rhythm(9000).every
    assert PageSettings("h2o", 4000).layout(*shape).queries == 256


@pytest.mark.parametrize("method", SERVED)
def test_methods_keep_what_they_look_at(method):
    settings = PageSettings(method, None if method == "exact" else 400)
    layout = settings.layout(4000, 2, 4, 16, torch.bfloat16)
    scored = method in ("heavy_merge", "h2o", "tova", "snapkv")
    assert layout.scored == scored
    kept = {"exact": 0, "h2o": 40, "heavy_merge": 40}
    if scored or method == "exact":
        assert layout.queries == kept.get(method, layout.queries)
        assert layout.queries <= 40
    else:
        assert layout.queries == 1  # to measure the error with
