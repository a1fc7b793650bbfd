"""`kvsketch compress`: compress a document into a file that answers questions."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvsketch.arguments import QUERY_SOURCES, check_arguments
from kvsketch.cli.document_options import (
    DeviceOption,
    check_out,
    error_of,
    kept_of,
    mb,
    reading,
    save,
    text_of,
)
from kvsketch.cli.printing import JsonOption, RecentOption, console_for, print_json
from kvsketch.errors import InputError
from kvsketch.method_names import NEED_REREAD
from kvsketch.models import PACKAGED_MODELS

if TYPE_CHECKING:
    from kvsketch.vllm.settings import PageSettings

EPILOG = "Example: kvsketch compress --model YOUR_MODEL report.txt -o report.kvs --budget 0.25"


def compress_command(
    document: Annotated[
        Path, typer.Argument(metavar="FILE", help="UTF-8 text; - for standard input.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DOC.kvs", help="File to write.")],
    model: Annotated[
        str,
        typer.Option(
            help="Model folder or Hugging Face id. packaged is the model in this "
            "package, for longeval."
        ),
    ] = "packaged",
    budget: Annotated[
        str | None,
        typer.Option(
            help="The bytes to keep, in the model's own dtype: 0.25 of the exact cache's, or those "
            "of 1024 tokens per KV head. In fewer bits they hold more slots. [default: "
            "0.25, unless there is a tolerance]"
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Instead of a budget: the largest measured error, e.g. 0.05."),
    ] = None,
    method: Annotated[str, typer.Option(help="See `kvsketch methods`.")] = "heavy_merge",
    queries: Annotated[
        str,
        typer.Option(
            help="The queries that the compression uses: of the document (prompt), or of a second "
            "reading (reread, local, sample), which suits unknown questions better."
        ),
    ] = "prompt",
    allocation: Annotated[
        str | None,
        typer.Option(
            help="How the budget is divided among layers and heads, as for `kvsketch eval`. "
            "[default: the method's own]"
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="Bits of a slot's numbers: 16, 8, 4 or measured. [default: the method's own]"
        ),
    ] = None,
    sink: Annotated[int, typer.Option(help="Number of first tokens that are always kept.")] = 4,
    recent: RecentOption = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A part of the document, word for word, that is never compressed (repeatable).",
        ),
    ] = None,
    prefill: Annotated[
        str,
        typer.Option(
            help="exact: compress after the document is read; streaming: while it is read."
        ),
    ] = "exact",
    max_tokens: Annotated[
        int | None, typer.Option(help="Read only this many first tokens of the document.")
    ] = None,
    for_vllm: Annotated[
        str | None,
        typer.Option(
            metavar="URL|SETTINGS",
            help="Instead of a budget: the address of a vLLM server with our pages; or JSON, or a "
            "file of it, of the plugin's settings and the engine's max_model_len. The file then "
            "has the sizes of its pages (docs/vllm.md); method, bits, sink, recent and seed are "
            "those of the settings. --out may be a folder.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Use no chat template, even if the tokenizer has one.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of random methods.")] = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Compress a document into a file that answers questions about it."""
    from kvsketch.evaluation.runner import loading
    from kvsketch.evaluation.runner.settings import Settings
    from kvsketch.evaluation.runner.setups import parse_budget

    if budget is not None and tolerance is not None:
        raise InputError(f"--budget {budget} and --tolerance {tolerance} exclude each other")
    engine: tuple[PageSettings, int] | None = None
    if for_vllm is not None:
        if any(given is not None for given in (budget, tolerance, allocation, bits)):
            raise InputError(
                "--for-vllm says how much is kept; leave --budget, --tolerance, --allocation and "
                "--bits out"
            )
        from kvsketch.vllm.offline import engine_of

        engine = engine_of(for_vllm)
        out = out if out.suffix == ".kvs" else out / f"{document.stem}.kvs"
    amount = 0.25 if budget is None and tolerance is None else None
    amount = parse_budget(budget) if budget is not None else amount
    stored: Any = int(bits) if bits is not None and bits.isdecimal() else bits
    settings: dict[str, Any] = {"budget": amount, "tolerance": tolerance, "allocation": allocation}
    settings |= {"bits": stored, "sink": sink, "recent": recent, "prefill": prefill}
    check_arguments(method, **settings)
    if queries not in QUERY_SOURCES:
        raise InputError(f"--queries {queries!r} must be one of {', '.join(QUERY_SOURCES)}")
    if queries == "prompt" and method in NEED_REREAD:
        raise InputError(
            f"--method {method} scores a text by a second reading and needs --queries reread"
        )
    if pin and for_vllm is not None:
        raise InputError("--pin and --for-vllm exclude each other: an engine's pages have no pins")
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"--max-tokens {max_tokens} must be at least 1")
    check_out(out)
    text = text_of(document, "FILE")
    spans = [_span(text, part) for part in pin or []]
    Settings(device=device, dtype=dtype)  # raises
    folder = loading.resolve_model(model)
    from kvsketch.documents import document as documents
    from kvsketch.documents.wording import Wording
    from kvsketch.files.tokens import told
    from kvsketch.hf import SketchCache
    from kvsketch.hf.saving import summary_of
    from kvsketch.hf.size import predicted_size

    loading.check_device(device)
    config, tokenizer = loading.load_config(folder), loading.load_tokenizer(folder)

    def made(config: Any, tokens: int) -> SketchCache:
        if engine is not None:
            from kvsketch.vllm.offline import cache_for

            return cache_for(*engine, config, tokens)
        return SketchCache(config, method, seed=seed, **settings)

    cache = made(config, 1)  # raises, before weights are loaded
    wording = Wording.of(tokenizer, plain)
    loaded = loading.load_model(folder, device, dtype)
    with Console(stderr=True).status(f"Reading {len(text):,} characters as tokens"):
        ids = documents.encoded(loaded, tokenizer, wording.before + text, not wording.chat)
    ids = ids[:, :max_tokens]
    around = documents.encoded(loaded, tokenizer, wording.asking + wording.answering, False)
    least = around.shape[1] + 2  # a token of a question, and one of an answer
    documents.check_positions(ids.shape[1], cache, f"FILE {document}", least)
    cache = made(loaded.config, ids.shape[1])
    for span in spans:
        shifted = (span[0] + len(wording.before), span[1] + len(wording.before))
        given = wording.before + text, shifted, not wording.chat
        first, end = documents.tokens_of(tokenizer, *given)
        cache.pin(first, min(end, ids.shape[1]))
    start = time.perf_counter()
    with reading(cache) as advance:
        documents.read(loaded, tokenizer, ids, cache, queries, advance)
    seconds = time.perf_counter() - start
    named = model if model in PACKAGED_MODELS else folder
    named = str(Path(named).resolve()) if Path(named).is_dir() else named
    about = {"model": named, "source": document.name, "queries": queries, "tokens": ids.shape[1]}
    about["ids"] = told(ids[0].tolist())
    compressed = documents.Document(loaded, tokenizer, cache, wording, about)
    save(compressed, out)
    left = compressed.positions_left
    if left is not None and left < documents.ROOM:
        print(
            f"note: only {left} of the model's {cache.max_positions:,} positions are left for "
            "questions and answers; --max-tokens leaves more",
            file=sys.stderr,
        )
    found = {
        "model": named,
        "source": str(document),
        "queries": queries,
        "seconds": seconds,
        "tokens_per_s": ids.shape[1] / seconds,
        **summary_of(cache),
        "file_bytes": out.stat().st_size,
        "predicted_file_bytes": predicted_size(cache),
    }
    console = console_for(as_json)
    console.print(
        f"{found['tokens']:,} tokens in {found['seconds']:.1f} s "
        f"({found['tokens_per_s']:,.0f} tokens/s)",
        highlight=False,
    )
    console.print(kept_of(found), highlight=False, soft_wrap=True)
    said = error_of(found["error"], found["tokens"], found["tokens"])
    console.print(
        f"Measured error: {said}. {out}: {mb(found['file_bytes'])}",
        highlight=False,
        soft_wrap=True,
    )
    file = shlex.quote(str(out))
    console.print(f'Next: kvsketch ask {file} "YOUR QUESTION"', highlight=False, soft_wrap=True)
    if as_json:
        print_json("compress", out=str(out), **found)


def _span(text: str, part: str) -> tuple[int, int]:
    """Where a part of a text is, in characters."""
    if not part.strip() or text.count(part) != 1:
        often = f"{text.count(part)} times" if part.strip() else "nothing"
        raise InputError(f"--pin {part!r:.60} must be in the document exactly once, it is {often}")
    start = text.index(part)
    return start, start + len(part)
