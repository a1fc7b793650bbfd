"""Compiles the attention kernel for CPUs when the package is built, if there is a C++ compiler."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = "src/kvsketch/kernels/native/build.py"


class CustomBuildHook(BuildHookInterface):
    """Of a wheel: one for each platform, whatever the version of Python. ``KVSKETCH_PURE=1`` makes
    a wheel without the kernel, for any platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("KVSKETCH_PURE") == "1":
            return
        builder = runpy.run_path(str(Path(self.root, _BUILD)))
        wrong = builder["build"]()
        if wrong is not None:
            self.app.display_warning(f"without the compiled kernel, since {wrong}")
            return
        library = Path(builder["LIBRARY"]).relative_to(Path(self.root).resolve())
        build_data["artifacts"].append(str(library))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
