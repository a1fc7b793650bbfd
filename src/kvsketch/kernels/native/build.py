"""Compiles the attention kernel for CPUs: ``python src/kvsketch/kernels/native/build.py``.

It needs a C++ compiler (``CXX``, c++, g++ or clang++) and nothing else, not even kvsketch. The
package is built with it (``hatch_build.py``); without a compiler, kvsketch runs torch's kernels.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "attention.cpp"
INCLUDED = tuple(HERE / f"{name}.h" for name in ("pairs", "groups", "shares", "exchange"))
LIBRARY = HERE / "attention.so"
# No flag lets a sum of infinities or NaN go wrong: only the order of sums and a * b + c are free.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
]
ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
_AVX512 = [
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "-mprefer-vector-width=512",
]
#: Flags of every set of vector instructions, from what every such processor has.
X86 = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": _AVX512,
    "amx": [*_AVX512, "-mamx-tile", "-mamx-bf16"],
}


def mark() -> str:
    """Identifies the source that a library was compiled from."""
    source = b"".join(file.read_bytes() for file in (SOURCE, *INCLUDED))
    return hashlib.sha256(source).hexdigest()[:16]


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(library: Path = LIBRARY, extra: tuple[str, ...] = ()) -> str | None:
    """Compile the library.

    Args:
        library: where it is written, in one step.
        extra: further flags, such as those of a sanitizer.

    Returns:
        What stood in the way; None: it is there.
    """
    cxx = compiler()
    if cxx is None:
        return "no C++ compiler was found (CXX, c++, g++ or clang++)"
    sets, defines = dict(X86) if ON_X86 else {"plain": []}, ["-DKV_DISPATCH"]
    if ON_X86 and _run([cxx, *X86["amx"], "-E", "-x", "c++", os.devnull, "-o", os.devnull]):
        del sets["amx"]  # a compiler of before 2021
        defines.append("-DKV_NO_AMX")
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for name, flags in sets.items():
            objects.append(f"{folder}/{name}.o")
            command = [cxx, *FLAGS, *flags, *extra, f"-DKV_ISA={name}", "-c", str(SOURCE)]
            if (wrong := _run([*command, "-o", objects[-1]])) is not None:
                return wrong
        made, mine = f"{folder}/{library.name}", [*defines, f'-DKV_MARK="{mark()}"']
        command = [cxx, *FLAGS, *extra, *mine, "-shared", str(SOURCE), *objects, "-o", made]
        if (wrong := _run(command)) is not None:
            return wrong
        beside = library.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, beside)
        beside.replace(library)
    return None


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr[-4000:]}"


if __name__ == "__main__":
    wrong = build()
    print(wrong or f"{LIBRARY} was built", file=sys.stderr)
    sys.exit(wrong is not None)
