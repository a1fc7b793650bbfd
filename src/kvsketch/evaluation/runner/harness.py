"""lm-evaluation-harness tasks, answered through a SketchCache.

The harness (0.4.13) has its own registry of models and reads no entry points, so its plain
``lm_eval`` command cannot find a model of another package. This module registers the model and runs
the harness's command line with the same arguments:

    kvsketch-lm-eval --model kvsketch \\
        --model_args pretrained=YOUR_MODEL,method=heavy_merge,budget=0.25 --tasks gsm8k

``python -m kvsketch.evaluation.runner.harness`` does the same. In Python, import this module before
``lm_eval.simple_evaluate(model="kvsketch", ...)``.

The docstring of ``harness_model`` describes what is compressed. That module is imported when the
harness uses it, so that wrong arguments are refused before torch is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvsketch.errors import KVSketchError
from kvsketch.evaluation.runner.harness_arguments import check_model_args

if TYPE_CHECKING:
    from kvsketch.evaluation.runner.harness_model import SketchLM

__all__ = ["SketchLM", "main"]

_NAME = "kvsketch"

if find_spec("lm_eval") is not None:
    # Its own models, by name: the harness loads them itself only if no other model is registered.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    if _NAME not in model_registry:
        model_registry.register(_NAME, target="kvsketch.evaluation.runner.harness_model:SketchLM")


def __getattr__(name: str) -> Any:
    if name != "SketchLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvsketch.evaluation.runner.harness_model import SketchLM

    return SketchLM


def main() -> None:
    """The harness's own command line, with ``--model kvsketch`` added. Arguments are checked as far
    as possible before torch is imported."""
    if find_spec("lm_eval") is None:
        raise SystemExit("error: lm-evaluation-harness is needed: pip install 'kvsketch[lm-eval]'")
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    command = HarnessCLI()
    arguments = command.parse_args()
    try:
        if getattr(arguments, "model", None) == _NAME:
            check_model_args(arguments.model_args or {})
        command.execute(arguments)
    except KVSketchError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
