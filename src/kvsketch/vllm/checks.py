"""Refuses configurations that cannot be served from pages when the engine starts, by name."""

from __future__ import annotations

import json
from typing import Any

from kvsketch.errors import UnsupportedError
from kvsketch.vllm.settings import DRAWING, PageSettings

#: vLLM's configuration with which documents are loaded; with the role "kv_both", requests may also
#: save their pages
CONNECTOR = {
    "kv_connector": "DocumentConnector",
    "kv_connector_module_path": "kvsketch.vllm.documents",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
}
#: vLLM's name for speculative decoding by a model of its own
MODEL = "draft_model"
#: the role with which requests may save their pages
BOTH = "kv_both"


def check_engine(config: Any) -> None:
    """Raise unless an engine's configuration is supported.

    Args:
        config: ``VllmConfig``.

    Raises:
        UnsupportedError: it is not; the message names the option to change.
    """
    parallel, cache = config.parallel_config, config.cache_config
    refused = [
        *_refused_guesses(config),
        (
            getattr(cache, "kv_offloading_size", None) is not None,
            "KV offloading",
            "--kv-offloading-size",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism",
            "--decode-context-parallel-size",
        ),
        (  # untested: on a CPU, vLLM's own backend fails there with two stages
            parallel.pipeline_parallel_size > 1 and not config.use_v2_model_runner,
            "pipeline parallelism without vLLM's model runner V2",
            "--pipeline-parallel-size",
        ),
        (
            cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
            f"a KV cache in {cache.cache_dtype}",
            "--kv-cache-dtype",
        ),
        (config.model_config.use_mla, "multi-head latent attention", "KVSKETCH_METHOD"),
        (config.model_config.is_encoder_decoder, "an encoder", "KVSKETCH_METHOD"),
        (config.model_config.is_hybrid, "state-space layers", "KVSKETCH_METHOD"),
        (  # on a CPU, vLLM does not ask a backend whether it can
            config.model_config.is_mm_prefix_lm,
            "images whose tokens attend to later ones of the image",
            "KVSKETCH_METHOD, or allow no images with --limit-mm-per-prompt",
        ),
    ]
    for wrong, what, option in refused:
        if wrong:
            raise UnsupportedError(f"kvsketch does not serve {what} from its pages: unset {option}")


def _refused_guesses(config: Any) -> list[tuple[bool, str, str]]:
    """What is refused of speculative decoding, as in ``check_engine``."""
    guesses, option = config.speculative_config, "--speculative-config"
    if guesses is None:
        return []
    method, model = guesses.method, guesses.method == MODEL
    return [
        (
            method not in ("ngram", MODEL),
            f"speculative decoding by {method} (only by ngram or {MODEL})",
            option,
        ),
        (
            model and bool(guesses.parallel_drafting),
            "speculative decoding by parallel_drafting",
            option,
        ),
        (config.use_v2_model_runner, "speculative decoding with vLLM's model runner V2", option),
        (
            model and config.parallel_config.pipeline_parallel_size > 1,
            f"speculative decoding by {MODEL} with pipeline parallelism",
            option,
        ),
        (
            model and bool(config.scheduler_config.async_scheduling),
            f"speculative decoding by {MODEL} with a scheduler that runs ahead of it",
            f"{option} or pass --no-async-scheduling",
        ),
    ]


def guesses_for(config: Any, served: Any) -> bool:
    """Whether a configuration is that of the model that guesses tokens of the served one.

    Args:
        config, served: ``VllmConfig``.
    """
    guesses = config.speculative_config
    return (
        guesses is not None
        and guesses is served.speculative_config
        and guesses.method == MODEL
        and config.model_config is guesses.draft_model_config
    )


def check_drafts(config: Any, backend: type) -> None:
    """Raise unless all layers of the served model and of one that guesses its tokens have pages.

    Args:
        config: ``VllmConfig``.
        backend: of layers with pages.

    Raises:
        UnsupportedError: some have not.
    """
    guesses = config.speculative_config
    if guesses is None or guesses.method != MODEL:
        return
    for name, layer in config.compilation_config.static_forward_context.items():
        found = getattr(layer, "attn_backend", backend)
        if getattr(layer, "sliding_window", None) or not issubclass(found, backend):
            raise UnsupportedError(
                f"kvsketch serves speculative decoding by {MODEL} only if all layers have full "
                f"attention and its backend, but {name} has not: on a GPU, add "
                '"attention_backend": "CUSTOM" to --speculative-config, or unset it'
            )


def check_settings(config: Any, settings: PageSettings) -> None:
    """Raise unless the engine's configuration supports our settings.

    Args:
        config: ``VllmConfig``.

    Raises:
        UnsupportedError: it does not.
    """
    if config.speculative_config is not None and settings.documents is not None:
        raise UnsupportedError(
            "kvsketch does not load documents with speculative decoding: unset "
            "--speculative-config or KVSKETCH_DOCUMENTS"
        )
    if getattr(config.speculative_config, "method", None) == MODEL and settings.allocation:
        raise UnsupportedError(
            f"kvsketch does not serve budgets by curves with speculative decoding by {MODEL}, for "
            "whose layers there are none: unset KVSKETCH_ALLOCATION or --speculative-config"
        )
    transfer = config.kv_transfer_config
    if settings.documents is None and transfer is not None:
        raise UnsupportedError(
            "kvsketch does not serve KV transfer from its pages, except of documents: unset "
            "--kv-transfer-config, or set KVSKETCH_DOCUMENTS"
        )
    allowed = [{**CONNECTOR, "kv_role": role} for role in (CONNECTOR["kv_role"], BOTH)]
    given = {name: getattr(transfer, name, None) for name in CONNECTOR}
    if settings.documents is not None and given not in allowed:
        raise UnsupportedError(
            f"kvsketch loads documents={settings.documents!r} only with --kv-transfer-config "
            f"'{json.dumps(CONNECTOR)}', or with the role {BOTH!r} if requests may save their pages"
        )
    if settings.method in DRAWING and config.parallel_config.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"kvsketch does not serve method={settings.method!r}, which draws random numbers, with "
            "tensor parallelism: unset --tensor-parallel-size, or choose another KVSKETCH_METHOD"
        )


def check_layer(
    alibi_slopes: object, attn_type: object, shared: object, others: dict[str, object]
) -> None:
    """Raise unless an attention layer's arguments are supported.

    Args:
        alibi_slopes, attn_type: as vLLM passes them.
        shared: name of the layer whose keys this one reads; None: it has its own.
        others: further arguments.

    Raises:
        UnsupportedError: one of them is not.
    """
    refused = {
        "ALiBi": alibi_slopes is not None,
        f"attention of type {attn_type!r}": attn_type != "decoder",
        "layers that share keys and values": shared is not None,
    }
    unknown = [name for name, value in others.items() if value is not None]
    refused |= {f"attention with {name}=": True for name in unknown}
    for what, wrong in refused.items():
        if wrong:
            raise UnsupportedError(
                f"kvsketch does not serve {what} from its pages: unset KVSKETCH_METHOD and "
                "KVSKETCH_BUDGET for this model"
            )
