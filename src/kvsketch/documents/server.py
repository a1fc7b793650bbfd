"""Questions about a compressed document to a server that has its file (docs/vllm.md).

The server starts behind the document if a prompt begins with the file's tokens. The texts are
therefore turned into tokens one by one, by the server, and sent as ids.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvsketch.documents.wording import Wording
from kvsketch.errors import InputError
from kvsketch.files.tokens import mark_of, marks

#: seconds to wait for one answer
_PATIENCE = 600.0


@dataclass(frozen=True)
class Server:
    """A server with vLLM's interface.

    Args:
        address: such as ``http://localhost:8000``; the key is that of the variable
            ``OPENAI_API_KEY``, if it is set.
        option: which names it.

    Raises:
        InputError: it is no such address.
    """

    address: str
    option: str = "--server"

    def __post_init__(self) -> None:
        if not self.address.startswith(("http://", "https://")):
            raise InputError(f"{self} must be an address such as http://localhost:8000")

    def __str__(self) -> str:
        return f"{self.option} {self.address:.80}"

    def read(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What the server answers to a JSON object, or to a request without one.

        Raises:
            InputError: it cannot be reached, or refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.address.rstrip("/") + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise InputError(f"{self}: {path} answers {error.code}: {said:.300}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InputError(f"{self}: {path} gives no answer: {reason}") from error

    def ask(self, path: str, name: str, body: dict[str, Any] | None = None) -> Any:
        """A field of the JSON object that it answers.

        Raises:
            InputError: as ``read``, or there is no such field.
        """
        said = self.read(path, body)
        try:
            return json.loads(said)[name]
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{self}: {path} answers no {name}; is it a vLLM server?") from error

    def ids(self, model: str, text: str, special: bool) -> list[int]:
        """The tokens of a text."""
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        found: list[int] = self.ask("/tokenize", "tokens", body)
        return found


def document_ids(
    server: Server, model: str, header: dict[str, Any], wording: Wording, text: str
) -> list[int]:
    """The tokens of a document whose text is given.

    Args:
        header: of its file.

    Raises:
        InputError: the text has not the tokens that the file holds.
    """
    mark = mark_of(header)
    ids = server.ids(model, wording.before + text, not wording.chat)
    if len(ids) < mark[0] or marks(ids, [mark[0]]) != [mark]:
        raise InputError(
            f"the document has not the {mark[0]:,} tokens of the file: give the text that was "
            f"compressed, and the server of its model ({server.address} serves {model})"
        )
    return ids[: mark[0]]


def answers(
    server: Server,
    header: dict[str, Any],
    text: str,
    questions: Sequence[str],
    new_tokens: int,
    batch: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """An answer to every question, each from the document alone.

    Args:
        header: of the document's file, which the server has, too.
        text: of the document.
        batch: questions that are sent at a time.

    Raises:
        InputError: as ``Server.ask`` and ``document_ids``.
    """
    said = header["about"].get("wording") if isinstance(header.get("about"), dict) else None
    wording = Wording() if said is None else Wording.read(said)
    model = str(server.ask("/v1/models", "data")[0]["id"])
    begins = document_ids(server, model, header, wording, text)

    def answer(question: str) -> str:
        rest = server.ids(model, wording.asking + question + wording.answering, False)
        body = {
            "model": model,
            "prompt": begins + rest,
            "max_tokens": new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        return str(server.ask("/v1/completions", "choices", body)[0]["text"]).strip()

    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(answer, questions))
