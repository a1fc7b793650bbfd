"""vLLM on a CPU with what it uses on CUDA, for the processes that have this folder in PYTHONPATH.

They use the model runner V2, which needs Triton, and Triton's interpreter. With
``INTERPRETED_PAGES=1``, the Triton kernels of kvsketch read the pages. As on CUDA, the engine's
configuration (``--attention-config``) then selects the backends of attention, and vLLM's Triton
backend stands for those that vLLM chooses itself.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class _Driver:
    """vLLM asks whether there is a driver for this processor. The interpreter needs none."""

    @staticmethod
    def is_active() -> bool:
        return False


triton.backends.backends["cpu"] = type("Backend", (), {"driver": _Driver})

if os.environ.get("INTERPRETED_PAGES") == "1":
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvsketch.kernels import triton_support

    triton_support.DEVICES.add("cpu")

    def _selected(cls: type, selected_backend: Any, attn_selector_config: Any, **_: Any) -> str:
        if str(attn_selector_config.kv_cache_dtype).startswith("turboquant"):
            selected_backend = AttentionBackendEnum.TURBOQUANT
        return str((selected_backend or AttentionBackendEnum.TRITON_ATTN).get_path())

    CpuPlatform.get_attn_backend_cls = classmethod(_selected)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # vLLM's Triton kernels ask for it
