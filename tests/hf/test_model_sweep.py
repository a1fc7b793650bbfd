"""Every causal language model of the installed transformers is in one of three lists: right,
refused by name before the first token, or not constructible here. ``python -m
benchmarks.model_families`` writes the lists to docs/results/model_families.json. A family that is
in no list, or in a wrong one, fails here until someone has checked it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import transformers
from packaging.version import Version

import tiny_models
from benchmarks.model_families import PAGE, family, lists, markdown
from kvsketch import SketchCache, UnsupportedError
from kvsketch.hf.models import has_latents
from model_sweep import (
    CLOSE,
    adapted,
    captures,
    default,
    evicting,
    generates,
    lossless,
    rereads,
)
from tiny_models import MODEL_TYPES, NotConstructible

LISTS = lists()
#: the version that the lists were made with; in an older one some families lack the interface
LISTED = Version("5.24")
OLDER = Version(transformers.__version__).release[:2] < LISTED.release[:2]


#: families with layers whose state a second reading cannot put back
NO_SECOND_READING = ("minimax_m3_vl_text",)


def listed(name: str) -> list[str]:
    return [t for t in MODEL_TYPES if LISTS.get(t, {}).get("list") == name]


def built(model_type: str) -> Any:
    """The model; skips the test where an older transformers cannot build it or has no attention
    interface in it."""
    try:
        # transformers' sdpa silently ignored soft-capping
        model = tiny_models.build(model_type, "eager" if OLDER else None)
        SketchCache(model.config)
    except (UnsupportedError, NotConstructible):
        if not OLDER:
            raise
        pytest.skip("refused by name in this older transformers")
    except Exception as error:
        if not OLDER:
            raise
        pytest.skip(f"tiny model is of transformers {LISTED}: {type(error).__name__}")
    return model


def test_every_family_is_in_a_list() -> None:
    unknown = [t for t in MODEL_TYPES if t not in LISTS]
    assert not unknown, f"run `python -m benchmarks.model_families` and look at {unknown}"
    gone = [t for t in LISTS if t not in MODEL_TYPES]
    assert OLDER or not gone
    assert not [t for t, row in LISTS.items() if row["list"] == "WRONG"]


def test_what_the_issue_asked_for() -> None:
    """At least 80 families are right, and the hybrid and common ones are among them."""
    right = {t for t, row in LISTS.items() if row["list"] == "right"}
    assert len(right) >= 80
    hybrids = """qwen3_next qwen3_5 nemotron_h jamba bamba falcon_h1 granitemoehybrid lfm2 lfm3
        olmo_hybrid ministral phimoe stablelm falcon bloom gemma3n gemma4 gpt_oss flint granite_swa
        granitemoe_swa kimi_linear deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 youtu"""
    assert not set(hybrids.split()) - right


@pytest.mark.parametrize("model_type", listed("refused"))
def test_refused_by_name_when_the_cache_is_made(model_type: str) -> None:
    try:
        config = tiny_models.build(model_type).config
    except Exception as error:
        if not OLDER:
            raise
        pytest.skip(f"tiny model is of transformers {LISTED}: {error}")
    with pytest.raises(UnsupportedError) as refusal:
        SketchCache(config)
    if not OLDER:
        assert LISTS[model_type]["why"] in str(refusal.value)


@pytest.mark.parametrize("model_type", listed("not constructible"))
def test_not_constructible(model_type: str) -> None:
    with pytest.raises(NotConstructible, match=r"\w+"):
        tiny_models.build(model_type)


@pytest.mark.parametrize("model_type", listed("right"))
def test_right(model_type: str) -> None:
    """For a padded batch with a prompt, decoded tokens and a chunk, the logits of a lossless cache
    are the full cache's; those of an evicting cache, whose heads differ in size, are the full
    cache's with the same tokens hidden."""
    model = built(model_type)
    assert lossless(model, [9, 0, 3]) <= CLOSE
    method = "streaming_llm" if adapted(model) else "keydiff"
    assert evicting(model, [9, 0, 3], not adapted(model), method) <= CLOSE
    assert generates(model)


# By default, families of each kind of layer whose state a second reading has to put back: windows,
# states, both, latents, shared keys, and layers without a state.
_KINDS = ["gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "zamba2", "zaya", "deepseek_v3",
          "kimi_linear", "gemma4_text", "nemotron_h"]  # fmt: skip


@pytest.mark.parametrize("model_type", [t for t in _KINDS if t in listed("right")])
def test_a_second_reading_leaves_nothing_behind(model_type: str) -> None:
    check_second_reading(built(model_type), model_type)


def check_second_reading(model: Any, model_type: str) -> None:
    if model_type in NO_SECOND_READING:
        with pytest.raises(UnsupportedError, match="cannot remove the tokens of a second reading"):
            rereads(model, "reread")
    elif not model_type.startswith("musicgen"):  # which generates from audio codes
        assert rereads(model, "reread", "sample", ["which one?"])


@pytest.mark.parametrize("model_type", [t for t in _KINDS if t in listed("right")])
def test_curves_are_of_the_layers_that_are_compressed(model_type: str) -> None:
    check_curves(built(model_type), model_type)


def check_curves(model: Any, model_type: str) -> None:
    if has_latents(model.config) or model_type in ("bloom", "falcon"):
        with pytest.raises(UnsupportedError, match=r"latents|interface"):
            captures(model)
    else:
        assert captures(model)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", listed("right"))
def test_right_in_every_way(model_type: str) -> None:
    """Lossless and evicting caches are also right without padding and with even budgets, the
    default method works, and so does what needs more than the cache, in the families that the tests
    above leave out. One test, since a model takes long to build."""
    model = built(model_type)
    assert lossless(model, [0, 0], (1000,)) <= CLOSE
    method = "streaming_llm" if adapted(model) else "keydiff"
    assert evicting(model, [0, 0], False, method) <= CLOSE
    default(model)
    if model_type not in _KINDS:
        check_curves(model, model_type)
        check_second_reading(model, model_type)


@pytest.mark.skipif(OLDER, reason="the page is of another version")
def test_the_page_has_the_lists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = list(LISTS.values())
    assert markdown(rows, {"transformers": "5.24.0"}) in text
    counts = Counter(row["list"] for row in rows)
    assert f"{counts['right']} are right, {counts['refused']} are refused" in text
    readme = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"| tested families | {counts['right']}, " in readme
    limits = " ".join((PAGE.parent / "limits.md").read_text(encoding="utf-8").split())
    said = f"Of the {len(rows)} causal language models of 5.24, {counts['right']} are right and "
    assert said + f"{counts['refused']} are refused by name" in limits


def test_the_script_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose evicted tokens still have an effect is listed as wrong."""
    import model_sweep

    monkeypatch.setattr(model_sweep, "evicting", lambda *a, **k: 0.1)
    assert family("llama")["list"] == "WRONG"
