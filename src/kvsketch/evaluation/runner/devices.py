"""The valid values of `--device`, as far as they can be checked without torch."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec

from kvsketch.errors import InputError

#: transformers' ways to distribute layers over all devices
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
#: torch's own kinds of devices, as ``torch.device`` lists them
DEVICE_KINDS = (
    *("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga"),
    *("maia", "xla", "lazy", "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone"),
)


def check_device_name(device: str) -> None:
    """Whether the device exists is checked by torch later (``loading.check_device``).

    Raises:
        InputError: torch has no such kind of device, its number is none, or layers are to be spread
            and accelerate is not installed.
    """
    if device in DEVICE_MAPS:
        if find_spec("accelerate") is None:
            raise needs_accelerate(device)
        return
    kind, colon, number = device.partition(":")
    # A package may bring torch further kinds of devices; which, is known once it is imported.
    known = kind in DEVICE_KINDS or bool(entry_points(group="torch.backends"))
    if not known or (colon and not number.isdecimal()):
        allowed = ", ".join((*DEVICE_KINDS, *DEVICE_MAPS))
        raise InputError(
            f"--device {device!r} cannot be used here: it must be one of {allowed}; where there "
            "are several of a kind, with a number, such as cuda:1"
        )


def needs_accelerate(device: str) -> InputError:
    """The error for a device map without accelerate."""
    return InputError(f"--device {device} needs accelerate: pip install accelerate")
