"""Is the Hugging Face Hub there? Asked once, before anything is fetched from it.

Its own client asks six times for a file that is not in the local cache, for half a minute, and logs
each time. Here one request decides: without an answer this process goes offline, as with
``HF_HUB_OFFLINE=1``, so that what is in the cache loads at once and everything else is refused at
once.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from kvsketch.errors import InputError

#: seconds for an answer, unless ``HF_HUB_ETAG_TIMEOUT``, the client's own setting, says otherwise
PATIENCE = 3.0

_why_offline = "HF_HUB_OFFLINE is set"


def unreachable() -> str | None:
    """Why nothing can be fetched from the Hub, or None where it answers. Where it does not, this
    process is offline from then on. Honours ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and the proxies of
    the environment."""
    from huggingface_hub import constants

    global _why_offline
    if constants.HF_HUB_OFFLINE:
        return _why_offline
    reason = _silence()
    if reason is not None:
        _why_offline = reason
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # what is imported later, and worker processes
    return reason


@cache
def _silence() -> str | None:
    """Why a request has no answer. Any answer will do: what it says is the client's business."""
    from huggingface_hub import constants, get_session

    chosen = "HF_HUB_ETAG_TIMEOUT" in os.environ
    patience = float(constants.HF_HUB_ETAG_TIMEOUT) if chosen else PATIENCE
    failures = [f"no answer in {patience:g} s (HF_HUB_ETAG_TIMEOUT gives it more)"]

    def ask() -> None:
        try:
            get_session().request(
                "HEAD", constants.ENDPOINT, timeout=patience, follow_redirects=False
            )
        except Exception as error:  # whatever the client is built on raises its own
            failures[:] = [(str(error) or type(error).__name__).splitlines()[0]]
        else:
            failures.clear()

    # Name servers, and hosts with several addresses, take longer than a request's own timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return next((f"{constants.ENDPOINT} cannot be reached: {why}" for why in failures), None)


def check_model(name: str, option: str = "--model") -> None:
    """Whether a model's configuration is in the local cache, or can be asked for.

    Args:
        option: what named the model, for messages.

    Raises:
        InputError: neither, or ``name`` is no id of the Hub.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise not_fetched(name, reason_of(error), option) from error
    silence = unreachable()
    if silence is not None and not isinstance(cached, str):
        raise not_fetched(name, _not_cached(silence), option)


def not_fetched(model: str, reason: str, option: str = "--model") -> InputError:
    """The error for a model that is neither here nor to be had."""
    return InputError(
        f"{option} {model!r} is no folder here and could not be fetched from the Hugging Face Hub: "
        f"{reason}"
    )


def reason_of(error: Exception) -> str:
    """Why something could not be fetched, in a line: the first of those that the Hub's packages
    say. Where that is only that this process is offline, why it is."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    # By name: `datasets` has errors of its own, and only names the one behind them.
    named = f"{type(error).__name__} {said}"
    if "OfflineModeIsEnabled" in named or "LocalEntryNotFoundError" in named:
        silence = unreachable()
        if silence is not None:
            return _not_cached(silence)
    return said


def _not_cached(silence: str) -> str:
    return f"{silence}, and it is not in the local cache"
