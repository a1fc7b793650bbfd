"""kvsketch in vLLM: a plugin that vLLM finds by its entry point ``vllm.general_plugins``.

With ``KVSKETCH_METHOD`` or ``KVSKETCH_BUDGET`` set, every full-attention layer of a served model
keeps one page of slots per request, however long it grows; unset, vLLM is untouched. No method of
vLLM is replaced: a backend, a cache spec and its manager are registered where vLLM asks for them.

    KVSKETCH_METHOD=heavy_merge KVSKETCH_BUDGET=1024 vllm serve MODEL \\
        --scheduler-cls kvsketch.vllm.scheduler.PageScheduler
"""

from __future__ import annotations

from kvsketch.errors import UnsupportedError
from kvsketch.vllm.settings import read

#: the releases whose seams this was tested with
VERSIONS = ("0.32", "0.33")
_BACKEND = "kvsketch.vllm.backend.PageBackend"


def register() -> None:
    """Make vLLM use our pages; called by vLLM in each of its processes.

    Raises:
        InputError: a setting that does not exist or is not allowed.
        UnsupportedError: another release of vLLM.
    """
    if read() is None:
        return
    import vllm

    if ".".join(vllm.__version__.split("+")[0].split(".")[:2]) not in VERSIONS:
        raise UnsupportedError(
            f"kvsketch {_ours()} serves with vLLM {' and '.join(VERSIONS)}, this is "
            f"{vllm.__version__}: install vllm=={VERSIONS[-1]}.* or unset KVSKETCH_METHOD and "
            "KVSKETCH_BUDGET"
        )
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvsketch.vllm import spec

    spec.register()
    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    from kvsketch.vllm import metrics

    first = metrics.show()
    if current_platform.is_cpu():  # which does not ask for --attention-backend
        register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
    elif first:  # nothing here learns whether vLLM's configuration selects the backend
        init_logger("vllm.kvsketch").warning(
            "kvsketch is used only with --attention-config "
            '\'{"backend_per_kind": {"full_attention": "CUSTOM"}}\' or, if no layer has a sliding '
            "window, with --attention-backend CUSTOM."
        )


def _ours() -> str:
    from kvsketch import __version__

    return __version__
