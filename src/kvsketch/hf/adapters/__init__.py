"""Families that need code of their own: attention that does not go through transformers' attention
interface, or a ``generate`` that drops caches."""

from __future__ import annotations

from typing import Any

from kvsketch.hf.adapters import bloom, falcon, longrope, mpt
from kvsketch.hf.adapters.base import Adapter

__all__ = ["Adapter", "of"]

#: by model type
ADAPTERS: dict[str, Adapter] = {
    "bloom": bloom.ADAPTER,
    "falcon": falcon.ADAPTER,
    "mpt": mpt.ADAPTER,
    "phi3": longrope.ADAPTER,
    "phi4_multimodal": longrope.ADAPTER,
    "phimoe": longrope.ADAPTER,
}


def of(config: Any) -> Adapter | None:
    """The adapter of a model with this (text) configuration, if it needs one."""
    return ADAPTERS.get(config.model_type)
