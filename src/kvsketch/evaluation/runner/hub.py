"""Checks once whether the Hugging Face Hub can be reached, before anything is fetched from it.

Its own client tries six times, for half a minute, to fetch a file that is not in the local cache,
and logs every attempt. Here one request decides. Without a response this process goes offline, as
with ``HF_HUB_OFFLINE=1``, so that cached files load immediately and everything else is refused
immediately.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from kvsketch.errors import InputError

#: timeout in seconds, unless ``HF_HUB_ETAG_TIMEOUT``, the client's own setting, is given
PATIENCE = 3.0

_why_offline = "HF_HUB_OFFLINE is set"


def unreachable() -> str | None:
    """Why nothing can be fetched from the Hub, or None if it can be reached. If not, this process
    is offline from then on. Honours ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and the proxies of the
    environment."""
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
    """Why a request has no response; any response counts."""
    from huggingface_hub import constants, get_session

    chosen = "HF_HUB_ETAG_TIMEOUT" in os.environ
    patience = float(constants.HF_HUB_ETAG_TIMEOUT) if chosen else PATIENCE
    failures = [f"no answer in {patience:g} s (HF_HUB_ETAG_TIMEOUT gives it more)"]

    def ask() -> None:
        try:
            get_session().request(
                "HEAD", constants.ENDPOINT, timeout=patience, follow_redirects=False
            )
        except Exception as error:  # the client's libraries raise their own errors
            failures[:] = [(str(error) or type(error).__name__).splitlines()[0]]
        else:
            failures.clear()

    # Name servers, and hosts with several addresses, take longer than a request's own timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return next((f"{constants.ENDPOINT} cannot be reached: {why}" for why in failures), None)


def check_model(name: str, option: str = "--model") -> None:
    """Check that a model's configuration is in the local cache or can be fetched.

    Args:
        option: the option that names the model, for messages.

    Raises:
        InputError: neither, or ``name`` is not an id of the Hub.
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
    """The error for a model that is neither local nor available."""
    return InputError(
        f"{option} {model!r} is not a local folder and could not be fetched from the Hugging Face "
        "Hub: "
        f"{reason}"
    )


def reason_of(error: Exception) -> str:
    """Why something could not be fetched, in one line: the first message of the Hub's packages. If
    this only says that the process is offline, the reason for that."""
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
