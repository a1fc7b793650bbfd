"""vLLM's connector for compressed documents: a request whose prompt begins with the tokens of a
file starts behind them, and only the rest of its prompt is read. A request may save its page as
such a file when it ends.

The scheduler's half finds the file; the half in each worker writes it into the request's page. The
load is asynchronous in vLLM's sense: the request runs in a later step, so that both model runners
know how many tokens it has seen before they prepare it. vLLM frees a page that is saved when its
file is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvsketch.errors import InputError
from kvsketch.hf.checkpoint import Checkpoint
from kvsketch.vllm.loading import Load, Loader
from kvsketch.vllm.saving import Saver
from kvsketch.vllm.sessions import SAVE, PageSaves, Save
from kvsketch.vllm.settings import settings_of
from kvsketch.vllm.shelf import Found, Shelf

_LOGGER = init_logger("vllm.kvsketch")
# Seconds for which an engine without other work waits for a document, before it looks for requests.
_PATIENCE = 0.01


@dataclass
class Transfers(KVConnectorMetadata):
    """The documents to write into pages in a step, and the pages to save."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class DocumentConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads compressed documents, and saves pages as such.

    Args:
        vllm_config: with the setting ``documents``.
        role: which half.
        kv_cache_config: of the engine.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = settings_of(vllm_config)
        if settings is None or settings.documents is None:
            raise InputError("documents is missing: set KVSKETCH_DOCUMENTS to a folder")
        self._shelf: Shelf | None = None
        if role == KVConnectorRole.SCHEDULER:
            model = vllm_config.model_config
            checkpoint = Checkpoint(model.model, model.hf_config, model.revision)

            def check(header: dict[str, Any]) -> None:
                checkpoint.check(header.get("model"))

            self._shelf = Shelf(settings.documents, check, _LOGGER.warning)
        self._saves = PageSaves(vllm_config, settings.documents)
        self._chosen: dict[str, Found] = {}  # by request, until it has a page
        self._loading: dict[str, Found] = {}  # until it is loaded
        self._new: list[Load] = []
        worker = role == KVConnectorRole.WORKER
        self._loader = Loader(vllm_config, kv_cache_config.kv_cache_groups) if worker else None
        self._saver = Saver(vllm_config) if worker else None
        self._done: set[str] = set()
        self._saved: set[str] = set()
        self._failed: set[str] = set()

    # In the scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens a document has beyond those in the prefix cache."""
        assert self._shelf is not None
        found = None
        if _of_text_alone(request):
            found = self._shelf.find(request.prompt_token_ids, num_computed_tokens)
        if found is None:
            self._chosen.pop(request.request_id, None)
            return 0, False
        self._chosen[request.request_id] = found
        return found.tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has a page: load the document in this step."""
        name = request.request_id
        found = self._chosen.pop(name, None)
        if num_external_tokens and found is not None:
            self._loading[name] = found
            self._new.append(Load(name, found, blocks.get_block_ids(), num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """What workers do in this step."""
        new, self._new = self._new, []
        return Transfers(new, self._saves.take())

    def update_connector_output(self, connector_output: Any) -> None:
        """Do not use files again that could not be loaded; names of files that were written are
        free, should they be removed."""
        assert self._shelf is not None
        for name in connector_output.failed_recving or ():
            if name in self._loading:
                self._shelf.reject(self._loading[name])
        for name in connector_output.finished_recving or ():
            self._loading.pop(name, None)
        self._saves.over(connector_output.finished_sending or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the page of a request is being saved, and what its answer says of that."""
        self._chosen.pop(request.request_id, None)
        said = self._saves.finished(request, _of_text_alone(request), block_ids[0])
        return said is not None and SAVE in said, said

    # In the workers.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load documents and to save pages, and write documents that were read. Without
        other work, it waits a little for one."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Transfers)
        assert self._loader is not None
        assert self._saver is not None
        patience = 0.0 if forward_context.attn_metadata else _PATIENCE
        for request, loaded in self._loader.step(metadata.loads, patience):
            self._done.add(request)
            if not loaded:
                self._failed.add(request)
        self._saved |= self._saver.step(metadata.saves, patience)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The requests whose documents or files were written, or could not be."""
        done, self._done = self._done, set()
        failed, self._failed = self._failed, set()
        saved, self._saved = self._saved, set()
        return KVConnectorTransferResults(saved, done, failed)

    def shutdown(self) -> None:
        """End the threads that read and write."""
        if self._loader is not None and self._saver is not None:
            self._loader.close()
            self._saver.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests run in a step after that of their load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: pages are saved when their requests have ended."""

    def wait_for_save(self) -> None:
        """Nothing, likewise."""


def _of_text_alone(request: Any) -> bool:
    """Whether token ids say all of a request's prompt."""
    others: Iterable[Any] = (request.lora_request, request.prompt_embeds, request.mm_features)
    return request.prompt_token_ids is not None and not any(
        other is not None and other != [] for other in others
    )
