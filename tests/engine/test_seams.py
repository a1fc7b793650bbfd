"""What the plugin replaces in vLLM (docs/vllm-plugin.md): this release still has each method, with
the same parameters. A new release that moved one fails here, by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest

pytestmark = [
    pytest.mark.seams,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
    ),
]
#: our classes, and their public methods that vLLM does not have
OURS = {
    "backend.PageBackend": {"bytes", "layout"},
    "attention.PageImpl": {"do_kv_cache_update"},  # its other backends have it
    "metadata.PageMetadataBuilder": set(),
    "spec.PageSpec": set(),
    "manager.PageManager": set(),
    "scheduler.PageScheduler": set(),
    "sliding.SlidingImpl": set(),
    "documents.DocumentConnector": set(),
}
#: private methods of vLLM that we replace
PRIVATE = {"_claim_ring_block", "_mamba_block_aligned_split"}


@pytest.mark.parametrize("name", OURS)
def test_what_we_replace_is_there_with_the_same_parameters(name):
    module, _, kind = name.partition(".")
    ours = getattr(importlib.import_module(f"kvsketch.vllm.{module}"), kind)
    theirs = [base for base in ours.__mro__ if base.__module__.startswith("vllm.")]
    assert theirs
    missing, moved = set(), []
    for verb, value in vars(ours).items():
        if verb.startswith("__") or not callable(getattr(ours, verb)):
            continue
        base = next((vars(one)[verb] for one in theirs if verb in vars(one)), None)
        if base is None:
            missing.add(verb)
            continue
        mine, yours = (
            inspect.signature(getattr(x, "__func__", x)).parameters for x in (value, base)
        )
        # What we do not use is "*_" or "**__".
        taken = [one for one in mine if set(one) != {"_"}]
        if list(yours)[: len(taken)] != taken or (len(taken) < len(yours) and taken == [*mine]):
            moved.append((verb, list(mine), list(yours)))
    own = {verb for verb in missing if verb.startswith("_") and verb not in PRIVATE}
    assert missing - own == OURS[name]
    assert not moved
