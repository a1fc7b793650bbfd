"""Which requests save their pages when they end, and as which files: in the scheduler."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvsketch.errors import InputError, KVSketchError, UnsupportedError
from kvsketch.files.tokens import Mark, marks
from kvsketch.vllm import metrics
from kvsketch.vllm.checks import BOTH
from kvsketch.vllm.shelf import SUFFIX

_LOGGER = init_logger("vllm.kvsketch")
#: the parameter, among a request's ``kv_transfer_params``; the answer's have it, too, or the other
SAVE, ERROR = "kvsketch_save", "kvsketch_error"
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True)
class Save:
    """A page to save.

    Attributes:
        request: its id.
        name: of the file in the folder.
        block: the page of the request.
        marks: of the request's tokens without the last one, which has no key unless a step was
            ahead, and of all.
    """

    request: str
    name: str
    block: int
    marks: tuple[Mark, ...]


class PageSaves:
    """The requests that save their pages.

    Args:
        config: ``VllmConfig``.
        folder: of the files.
    """

    def __init__(self, config: Any, folder: str) -> None:
        self._config, self._folder = config, Path(folder)
        self._begun: dict[str, str] = {}  # names, by request
        self._new: list[Save] = []

    def finished(self, request: Any, alone: bool, blocks: list[int]) -> dict[str, Any] | None:
        """What the answer of a request says of its file; None: it wants none.

        Args:
            request: vLLM's, which has ended.
            alone: whether its page depends on token ids alone.
            blocks: of its page.
        """
        given = request.kv_transfer_params
        if not isinstance(given, dict) or SAVE not in given:
            return None
        try:
            name = self._name(given[SAVE])
            self._check(request, alone, blocks)
        except KVSketchError as error:
            _LOGGER.warning("%s=%.120r is not saved: %s", SAVE, given[SAVE], error)
            metrics.add(unsaved=1)
            return {ERROR: str(error)}
        ids = request.all_token_ids
        self._begun[request.request_id] = name
        told = tuple(marks(list(ids), [len(ids) - 1, len(ids)]))
        self._new.append(Save(request.request_id, name, blocks[0], told))
        return {SAVE: name}

    def take(self) -> list[Save]:
        """The pages to save in this step."""
        new, self._new = self._new, []
        return new

    def over(self, requests: Iterable[str]) -> None:
        """Their files were written, or could not be."""
        for request in requests:
            self._begun.pop(request, None)

    def _name(self, given: object) -> str:
        """The name of a file.

        Raises:
            InputError: no name, or that of a file that is there or is being written.
        """
        if not isinstance(given, str) or _NAME.fullmatch(given) is None:
            raise InputError(
                f"{SAVE}={given!r:.120} must be the name of a new file in the folder of documents: "
                "at most 100 letters, digits, _, - and dots, not beginning with a dot or -"
            )
        name = given.removesuffix(SUFFIX) + SUFFIX
        if os.path.lexists(self._folder / name) or name in self._begun.values():
            raise InputError(f"{SAVE}={given!r}: {name} exists, and is not replaced")
        return name

    def _check(self, request: Any, alone: bool, blocks: list[int]) -> None:
        """Raise UnsupportedError unless the page of a request can be saved."""
        config = self._config
        if config.kv_transfer_config.kv_role != BOTH:
            raise UnsupportedError(
                f'this server saves no pages: --kv-transfer-config needs "kv_role": "{BOTH}"'
            )
        if config.parallel_config.world_size > 1:
            raise UnsupportedError(
                "kvsketch does not save pages whose heads or layers are on several ranks: unset "
                "--tensor-parallel-size and --pipeline-parallel-size"
            )
        if not alone:
            raise UnsupportedError("token ids alone do not say the prompt (adapter, images, ...)")
        if request.status not in _ENDED:
            raise UnsupportedError(
                "the request was aborted, by its client or at a stop string (use stop_token_ids)"
            )
        if not blocks:
            raise UnsupportedError("the request was preempted when it ended, and has no page")
