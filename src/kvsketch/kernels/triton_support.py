"""Whether the Triton kernels can run, and how they are launched, without importing Triton."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import UnsupportedError

#: Types of devices on which the package chooses the Triton kernels. A test adds the CPU, where they
#: run in Triton's interpreter.
DEVICES = {"cuda"}


def chosen(tensor: Tensor) -> bool:
    """Whether ``tensor`` is given to a Triton kernel: if it is on a CUDA device, in 32 bits or
    fewer."""
    if tensor.device.type not in DEVICES or tensor.dtype == torch.float64:
        return False
    return available(tensor.device)


def available(device: torch.device | str) -> bool:
    """Whether ``triton_decode`` and the other kernels run on tensors of this device."""
    return _missing(torch.device(device)) is None


def require(tensor: Tensor) -> None:
    """Raises:
    UnsupportedError: the kernels cannot run on the device of ``tensor``.
    """
    missing = _missing(tensor.device)
    if missing is not None:
        raise UnsupportedError(missing)


def launching(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``tensor`` the current one, because Triton launches on the current one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


class Launches:
    """Calls of one kernel whose arguments other than some tensors are always the same.

    From the second call with like tensors on, the compiled kernel is called directly: Triton's own
    look at every argument takes longer than a decoded token's attention.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        changing: Sequence[Tensor],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Launch ``kernel``.

        Args:
            changing: the tensors among the arguments that are not always the same.
            arguments: all of them, without constants.
            constants: the constants, in the order of the kernel's parameters.
            options: of the compilation.
        """
        alike = [(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in changing]
        like = (changing[0].device, *alike)
        found = self._compiled.get(like)
        with launching(changing[0]):
            if found is None:  # in the interpreter always
                given = {**constants, **options, "enable_fp_fusion": True}
                self._compiled[like] = kernel[grid](*arguments, **given)
            else:  # which ignores constants, but counts them
                found[(*grid, 1, 1)[:3]](*arguments, *constants.values())


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which is decided when Triton is imported."""
    if "triton" in sys.modules:
        import triton.language

        # A function of Triton's own library was created at the same import as the kernels.
        return type(triton.language.sum).__name__ == "InterpretedFunction"
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _missing(device: torch.device) -> str | None:
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        return "the Triton kernels need Triton: pip install 'kvsketch[triton]' (Linux)"
    if device.type == "cuda" or interpreted():
        return None
    return (
        f"the Triton kernels need tensors on a CUDA device, got {device}; on the CPU they run in "
        "Triton's interpreter only: TRITON_INTERPRET=1 before Triton is first imported"
    )
