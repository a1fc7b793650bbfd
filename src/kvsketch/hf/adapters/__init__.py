"""Families whose attention does not go through transformers' attention interface."""

from __future__ import annotations

from typing import Any

from . import bloom, falcon, mpt
from .base import Adapter

__all__ = ["Adapter", "of"]

#: by model type
ADAPTERS: dict[str, Adapter] = {
    "bloom": bloom.ADAPTER,
    "falcon": falcon.ADAPTER,
    "mpt": mpt.ADAPTER,
}


def of(config: Any) -> Adapter | None:
    """The adapter of a model with this (text) configuration, if it needs one."""
    return ADAPTERS.get(config.model_type)
