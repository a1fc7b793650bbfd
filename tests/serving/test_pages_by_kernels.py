"""Pages as they are served on a GPU, by the Triton kernels, run here by Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from served import SINKS, Served, drawn, queries_of

from kvsketch.kernels import triton_support
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

# Triton reads the variable when it is imported; other tests must not see it.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    NAMES = "decode", "prefill"
    MODULES = [importlib.import_module(f"kvsketch.kernels.triton_{name}") for name in NAMES]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

# page, tokens seen and new tokens of each request, step by step: prompts in chunks, a prompt that
# starts while another request decodes, single tokens, pages in any order
STEPS = [
    [(5, 0, 17), (2, 0, 5)],
    [(5, 17, 1), (2, 5, 22)],
    [(5, 18, 1), (2, 27, 1), (7, 0, 3)],
    [(5, 19, 9), (2, 28, 1), (7, 3, 1)],
]


def stepped(served: Served) -> torch.Tensor:
    """The outputs of all tokens of all steps."""
    requests = {page: drawn(page, 40) for page in (2, 5, 7)}
    found = []
    for step in STEPS:
        parts = [
            (page, seen, [t[seen : seen + new] for t in requests[page]]) for page, seen, new in step
        ]
        found += served.step(parts)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("middle", "softcap", "sinks"),
    [
        (None, None, SINKS[1]),
        (((9, 20), FULL), 4.0, None),
        (((12, 12), Bits(8, 8)), None, SINKS[1]),
        (((9, 20), Bits(4, 4)), None, None),
    ],
    ids=["one part", "16 bits", "8 bits", "4 bits"],
)
def test_the_kernels_see_what_torch_sees(
    middle: object,
    softcap: float | None,
    sinks: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rhythm = Rhythm(24 if middle is None else 16, 8)
    found, launched = [], []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, module in zip(NAMES, MODULES, strict=True):
        launch = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _f=launch, _n=name, **k: launched.append(_n) or _f(*a, **k)
        )
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(triton_support, "DEVICES", devices)
        torch.manual_seed(0)  # for the content of unused pages
        kept = queries_of("heavy_merge", rhythm)
        given = {"middle": middle, "sinks": sinks}
        found.append(stepped(Served("heavy_merge", rhythm, kept, softcap, **given)))
        assert bool(launched) == bool(devices)
    assert set(launched) == {"decode", "prefill"}
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
