"""Times as ratios of paired runs, with lower bounds from the speed of the machine.

    python -m benchmarks.speed --preset decode --json
    python -m benchmarks.speed --preset bits --json
    python -m benchmarks.speed --preset compress --tokens 8192,32768,131072 --json
    python -m benchmarks.speed --preset prefill --json
    python -m benchmarks.speed --preset end_to_end --json
    python -m benchmarks.speed --preset layers --tokens 8000,32000 --json

decode      The attention of one token with 32 query and 8 KV heads of 128. Slots with masses,
            equally many or not in every head, are compared with torch's own attention over as many
            plain tokens and over all n tokens.
bits        The attention of one such token over slots in 16 (bfloat16), 8 and 4 bits, with the
            compiled kernel, with its AVX2 instructions alone, and with torch's kernels, compared
            with torch's own attention over as many bfloat16 tokens, packed; on one thread and on
            all.
compress    The compression of n tokens of 8 KV heads of 128 to n/8 slots (kcenter: to 1024), by n,
            with the exponent of the time as a function of n. Block halving is compared with the
            BalanceKV authors' own ``balanced_walk`` on the same tensors (KVSKETCH_BALANCEKV names a
            checkout), SnapKV and KeyDiff with kvpress's own.
prefill     The measurement of errors and the compression in one layer of Llama 3 8B's size, over
            the layer's own prefill (``benchmarks.compression_time``), and the peak bytes of a
            prefill with the default method.
end_to_end  The whole of ``generate``: prefill and decoding with the default method are compared
            with ``DynamicCache`` on ``longeval-one-head``, and decoding with no tokens before: what
            it would be if no attention were computed, the most that any cache can gain. Decoding
            is also compared with a ``DynamicCache`` that has as many tokens as our cache has slots.
            Prompts are also read in other lengths, and by a model of many layers.
layers      The same on two random layers of Llama 3 8B's shape, and decoding from 8,000 tokens in 4
            bits, or from an eighth of longer prompts, compared with the exact cache, as
            transformers calls torch's attention and with the queries of a group packed; and the
            exact cache with an empty one.

Compared runs alternate, so that other load on the machine affects both, and a ratio is the median
over pairs. Only kvpress's presses run in turn after ours, in a separate environment (`make peers`),
because its transformers is older; the fastest runs are compared. The compressions and the prefill
are also given by their fastest run. ``floors`` has the measured bandwidth of a copy and the
measured rate of a matrix product, from which lower bounds of the times follow: the bytes that must
be read over the bandwidth (``floor_ms``), and the operations over the rate.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvsketch
from benchmarks.measuring import waiting
from benchmarks.page import save
from benchmarks.peers import balancekv as authors
from benchmarks.peers import kvpress
from benchmarks.prompts import ONE_HEAD
from benchmarks.results import Results, ResumeOption
from kvsketch import METHODS, Observed, SketchCache, Slots
from kvsketch.attention import attend_to
from kvsketch.cache import windowed
from kvsketch.cache.measure import measure
from kvsketch.cache.storage import CHOICES
from kvsketch.cache.stream import Stream
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.kernels import native
from kvsketch.page.part import Part
from kvsketch.page.quantized import Bits

HEADS, KV_HEADS, DIM = 32, 8, 128
_WIDE = "two layers of Llama 3 8B's shape"
_DEEP = "32 random layers of width 512"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRESETS = ("decode", "bits", "compress", "prefill", "end_to_end", "layers")
Rows = list[dict[str, Any]]
#: What one part of a preset measures. Every part is kept if the run is killed.
Job = Callable[[], Rows]


def seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def paired(repeats: int, **runs: Callable[[], Any]) -> dict[str, list[float]]:
    """The seconds of every run. Runs alternate, and the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        for name, run in runs.items():
            taken = seconds(run)
            if number:
                found[name].append(taken)
    return found


def ratio(found: dict[str, list[float]], name: str, over: str) -> float:
    """The median over pairs of the ratio of the times of two runs."""
    return statistics.median(a / b for a, b in zip(found[name], found[over], strict=True))


def floors() -> dict[str, float]:
    """Bytes per second of a copy (read and written), operations per second of a matrix product."""
    size = 1 << 27
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    side = torch.randn(2048, 2048)
    copied = min(seconds(lambda: target.copy_(source)) for _ in range(7))
    product = min(seconds(lambda: side @ side) for _ in range(7))
    return {"copy_bytes_per_second": 2 * size / copied, "matmul_per_second": 2 * 2048**3 / product}


def decode(repeats: int, tokens: list[int], dtypes: list[str], seed: int) -> list[Job]:
    return [partial(_kept, name, n, repeats, seed) for name in dtypes for n in tokens]


def _kept(dtype: str, n: int, repeats: int, seed: int) -> Rows:
    rows: Rows = []
    bandwidth = floors()["copy_bytes_per_second"]
    torch.manual_seed(seed)
    keys, values = torch.randn(2, 1, KV_HEADS, n, DIM).to(DTYPES[dtype])
    query = torch.randn(1, HEADS, 1, DIM).to(DTYPES[dtype])
    for kept in (1, 4, 8, 32):
        slots = n // kept
        rows.append(
            {"dtype": dtype, "tokens": n, "kept": 1 / kept, "slots": slots}
            | _decoded(query, keys, values, slots, repeats)
        )
        read = 2 * KV_HEADS * slots * DIM * keys.element_size()
        rows[-1]["floor_ms"] = 1e3 * read / bandwidth
    return rows


def _decoded(query: Tensor, keys: Tensor, values: Tensor, slots: int, repeats: int) -> Any:
    part = keys[:, :, :slots].contiguous(), values[:, :, :slots].contiguous()
    mass = torch.rand(1, KV_HEADS, slots) + 0.5
    even = Part(Slots(part[0], part[1].float() * mass.unsqueeze(-1), mass))
    share = torch.tensor([0.25, 0.5, 0.5, 0.75, 1.0, 1.25, 1.5, 2.25])
    sizes = (share * slots).round().long().clamp(1, keys.shape[2])[None]
    most = int(sizes.max())
    there = torch.arange(most) < sizes.unsqueeze(-1)
    uneven = Part(Slots(keys[:, :, :most], values[:, :, :most]).only(there), sizes)
    asked = Observed(query, DIM**-0.5)
    sdpa = partial(F.scaled_dot_product_attention, query, enable_gqa=True)
    # Treats the queries of a group as queries of one head, which is faster, but not common.
    packed = partial(F.scaled_dot_product_attention, query.view(1, KV_HEADS, -1, DIM))
    found = paired(
        repeats,
        slots=lambda: attend_to(asked, [even]),
        ragged=lambda: attend_to(asked, [uneven]),
        plain=lambda: sdpa(*part),
        full=lambda: sdpa(keys, values),
        packed=lambda: packed(*part),
        full_packed=lambda: packed(keys, values),
    )
    return {
        "slots_ms": 1e3 * statistics.median(found["slots"]),
        "slots_over_plain": ratio(found, "slots", "plain"),
        "slots_over_packed": ratio(found, "slots", "packed"),
        "ragged_over_packed": ratio(found, "ragged", "packed"),
        "full_over_slots": ratio(found, "full", "slots"),
        "full_packed_over_slots": ratio(found, "full_packed", "slots"),
        "full_packed_over_ragged": ratio(found, "full_packed", "ragged"),
        "ragged_slots_over_slots": float(sizes.sum()) / (KV_HEADS * slots),
    }


def in_bits(repeats: int, tokens: list[int], threads: int, seed: int) -> list[Job]:
    return [
        partial(_threaded, used, n, repeats, seed) for used in sorted({1, threads}) for n in tokens
    ]


def _threaded(threads: int, n: int, repeats: int, seed: int) -> Rows:
    rows: Rows = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    bandwidth = floors()["copy_bytes_per_second"]
    for bits in (16, 8, 4):
        row, read = _in_bits(n, Bits(bits, bits), repeats, seed)
        floor = {"floor_ms": 1e3 * read / bandwidth}
        rows.append({"bits": bits, "slots": n, "threads": threads} | row | floor)
    torch.set_num_threads(before)
    return rows


def _in_bits(n: int, bits: Bits, repeats: int, seed: int) -> tuple[dict[str, Any], int]:
    """Ratios of times, and the bytes that are read."""
    torch.manual_seed(seed)
    keys, values = torch.randn(2, 1, KV_HEADS, n, DIM).bfloat16()
    mass = torch.rand(1, KV_HEADS, n) + 0.5
    slots = Slots(keys, values.float() * mass.unsqueeze(-1), mass)
    share = torch.tensor([0.25, 0.5, 0.5, 0.75, 1.0, 1.25, 1.5, 2.25]) / 2.25
    sizes = (share * n).round().long().clamp(1, n)[None]
    uneven = slots.only(torch.arange(n) < sizes.unsqueeze(-1))
    fewer = slots.narrow(0, int(sizes.double().mean()))
    part, even, ragged = (
        Part(some, size, bits=bits)
        for some, size in ((slots, None), (fewer, None), (uneven, sizes))
    )
    asked = Observed(torch.randn(1, HEADS, 1, DIM).bfloat16(), DIM**-0.5)
    packed = asked.queries.view(1, KV_HEADS, -1, DIM)
    ours = partial(attend_to, asked, [part])
    found = paired(
        repeats,
        ours=ours,
        avx2=lambda: _limited(1, ours),
        torch=lambda: _by_torch(ours),
        packed=lambda: F.scaled_dot_product_attention(packed, keys, values),
        even=partial(attend_to, asked, [even]),
        ragged=partial(attend_to, asked, [ragged]),
    )
    row = {
        "over_packed": ratio(found, "ours", "packed"),
        "avx2_over_packed": ratio(found, "avx2", "packed"),
        "torch_over_packed": ratio(found, "torch", "packed"),
        "ragged_over_even": ratio(found, "ragged", "even"),
        "ms": 1e3 * statistics.median(found["ours"]),
    }
    return row, sum(t.nbytes for t in part.contents())


def _limited(level: int, run: Callable[[], Any]) -> None:
    """With the instructions of a lesser processor."""
    library = native.library()
    if library is not None:
        library.kvsketch_limit(level)
    run()
    if library is not None:
        library.kvsketch_limit(len(native.LEVELS))


def _by_torch(run: Callable[[], Any]) -> None:
    """Without the compiled kernel."""
    with native.switched(False):
        run()


def compress(repeats: int, tokens: list[int], methods: list[str], seed: int) -> list[Job]:
    return [
        *(partial(_compressed, name, repeats, tokens, seed) for name in methods),
        partial(_presses, tokens, repeats, seed),
        partial(_halved, repeats, seed),
    ]


def _compressed(name: str, repeats: int, tokens: list[int], seed: int) -> Rows:
    rows, times = Rows(), list[float]()
    for n in tokens:
        torch.manual_seed(seed)
        slots = Slots(*torch.randn(2, 1, KV_HEADS, n, DIM))
        seen = Observed(torch.randn(1, HEADS, 64, DIM), DIM**-0.5)
        budget = 1024 if name == "kcenter" else n // 8
        run = partial(windowed(name), slots, budget, seen)
        times.append(min(seconds(run) for _ in range(repeats)))
        rows.append({"method": name, "tokens": n, "budget": budget, "seconds": times[-1]})
    if len(tokens) > 1:
        grown = math.log(times[-1] / times[0]) / math.log(tokens[-1] / tokens[0])
        rows.append({"method": name, "exponent": grown, "from": tokens[0], "to": tokens[-1]})
    return rows


def _presses(tokens: list[int], repeats: int, seed: int) -> Rows:
    """SnapKV and KeyDiff to an eighth of the tokens, kvpress's and ours, on the same tensors."""
    missing = kvpress.available()
    if missing is not None:
        return [{"peer": "kvpress", "missing": missing}]
    rows: Rows = []
    # kvpress gets all queries of the prompt, which are four times as large as the keys.
    for n in (n for n in tokens if n <= 32768):
        torch.manual_seed(seed)
        keys, values = torch.randn(2, 1, KV_HEADS, n, DIM)
        queries = torch.randn(1, HEADS, n, DIM)
        seen = Observed(queries[:, :, -64:], DIM**-0.5)
        for name in ("snapkv", "keydiff"):
            run = partial(windowed(name), Slots(keys, values), n // 8, seen)
            ours = min(seconds(run) for _ in range(repeats))
            job = kvpress.Job(name, queries, keys, values, n // 8)
            (theirs,) = kvpress.seconds([job], repeats)
            found = {"method": name, "tokens": n, "seconds": ours, "kvpress_seconds": theirs}
            rows.append(found | {"kvpress_over_ours": theirs / ours})
    return rows


def _halved(repeats: int, seed: int, n: int = 8192) -> Rows:
    """One round of block halving, ours and the authors' own, on the same tensors."""
    torch.manual_seed(seed)
    keys, values = torch.randn(2, 1, KV_HEADS, n, DIM)
    mine = METHODS["balancekv"](seed=seed)
    run = partial(mine, Slots(keys, values), n // 2)
    missing = authors.available()
    row = {
        "halving": "balancekv",
        "tokens": n,
        "seconds": min(seconds(run) for _ in range(repeats)),
    }
    if missing is not None:
        return [row | {"authors": missing}]
    found = paired(repeats, ours=run, theirs=partial(authors.halved, keys, values, 1))
    return [row | {"authors_over_ours": ratio(found, "theirs", "ours")}]


def prefill(repeats: int, tokens: int, seed: int) -> list[Job]:
    peaks = [partial(_peak, layers, n, seed) for layers, n in ((4, 4000), (16, 8000))]
    return [partial(_shares_of_prefill, repeats, tokens, seed), *peaks]


def _shares_of_prefill(repeats: int, tokens: int, seed: int) -> Rows:
    from benchmarks.compression_time import prefill as layer

    whole, slots, seen = layer(tokens, torch.bfloat16, seed)
    measured = min(
        seconds(lambda: measure(waiting(slots, seen, "heavy_merge"), None, CHOICES)) for _ in "ab"
    )
    return [
        {"what": "measuring", "tokens": tokens, "share_of_prefill": measured / whole},
        *(
            {
                "what": f"{name} to {share}",
                "tokens": tokens,
                "share_of_prefill": min(
                    seconds(partial(windowed(name), slots, round(share * tokens), seen))
                    for _ in range(max(1, repeats // 3))
                )
                / whole,
            }
            for name in ("heavy_merge", "snapkv", "cluster_merge")
            for share in (0.25, 0.125)
        ),
    ]


def _peak(layers: int, tokens: int, seed: int) -> Rows:
    """Peak bytes of a prefill with the default method over the bytes of an uncompressed cache. The
    model is ``longeval-one-head`` for 4 layers, and a random one for more."""
    if layers == 4:
        model = AutoModelForCausalLM.from_pretrained(resolve_model(ONE_HEAD)).eval()
    else:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=tokens + 1,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
    cache = SketchCache(model.config, budget=0.25, seed=seed)
    model(prompt(model, tokens, seed), past_key_values=cache, logits_to_keep=1)
    found = cache.summary()
    row = {
        "what": "peak bytes of a default prefill",
        "layers": layers,
        "tokens": tokens,
        "peak_over_exact": found["peak_kv_bytes"] / found["exact_kv_bytes"],
        "held_over_exact": found["kv_bytes"] / found["exact_kv_bytes"],
    }
    return [row]


def generated(model: Any, cache: Any, ids: Tensor, tokens: int) -> tuple[float, float]:
    """Seconds in which ``generate`` reads a prompt, and in which it decodes ``tokens`` tokens."""
    settings = {"past_key_values": cache, "do_sample": False, "pad_token_id": 0}
    start = time.perf_counter()
    first = model.generate(ids, max_new_tokens=1, **settings)
    read = time.perf_counter() - start
    ids = model.generate(first, max_new_tokens=4, min_new_tokens=4, **settings)  # Allocates memory.
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **settings)
    return read, time.perf_counter() - start


def reading(
    name: str, make: Callable[[], Any], tokens: int, repeats: int, seed: int, **settings: Any
) -> Rows:
    """The speed of reading a prompt with 1/8 of the bytes kept, over that with the exact cache, and
    how often each layer is compressed."""
    model = make()
    ids, found, calls = prompt(model, tokens, seed), dict[str, list[float]](), 0
    compress = Stream._compress

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        compress(*args, **kwargs)

    with mock.patch.object(Stream, "_compress", counted):
        for _ in range(repeats):
            for way in ("exact", "ours"):
                ours = SketchCache(model.config, budget=0.125, seed=seed, **settings)
                cache = ours if way == "ours" else DynamicCache(config=model.config)
                start = time.perf_counter()
                model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                found.setdefault(way, []).append(time.perf_counter() - start)
    row = {
        "model": name,
        "settings": ", ".join(f"{n}={x!r}" for n, x in settings.items()) or "the default",
        "tokens": tokens,
        "kept": 0.125,
        "pairs": repeats,
        "prefill_speed_of_exact": ratio(found, "exact", "ours"),
        "compressions_of_a_layer": calls / repeats / model.config.num_hidden_layers,
    }
    return [row]


@functools.cache
def deep_model(seed: int) -> Any:
    """32 random layers of width 512 in bfloat16."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=40_000,
    )
    torch.manual_seed(seed)
    return _in_bfloat16(AutoModelForCausalLM.from_config(config))


@functools.cache
def packaged_model() -> Any:
    """``longeval-one-head`` in bfloat16, for prompts of any length."""
    model = _in_bfloat16(AutoModelForCausalLM.from_pretrained(resolve_model(ONE_HEAD)))
    model.config.max_position_embeddings = 1 << 20
    return model


def end_to_end(repeats: int, lengths: list[int], seed: int) -> list[Job]:
    """``longeval-one-head`` in bfloat16 with 1/8 of the bytes kept, compared with the exact cache,
    which is also compared with an empty one. Then decoding with the bytes of the exact cache's
    tokens, and reading prompts of the other lengths, and of 4,000 tokens in a model of many
    layers."""
    deep: list[dict[str, Any]] = [{}, {"bits": 16}, {"allocation": "even"}]
    few, many = min(3, repeats), partial(deep_model, seed)
    return [
        partial(_generated, lengths[0], repeats, seed),
        *(
            partial(_same_bytes, ONE_HEAD, packaged_model, slots, repeats, seed)
            for slots in (1024, 4096)
        ),
        *(partial(reading, ONE_HEAD, packaged_model, n, few, seed) for n in lengths[1:]),
        *(partial(reading, _DEEP, many, 4000, few, seed, **given) for given in deep),
    ]


def _generated(tokens: int, repeats: int, seed: int) -> Rows:
    model = packaged_model()
    ids = prompt(model, tokens, seed)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in ("exact", "ours", "empty"):
            ours = SketchCache(model.config, budget=0.125, seed=seed)
            cache = ours if name == "ours" else DynamicCache(config=model.config)
            before = ids[:, :1] if name == "empty" else ids
            read, decoded = generated(model, cache, before, 256)  # long enough to be compressed
            found.setdefault(f"{name} prefill", []).append(read)
            found.setdefault(f"{name} decode", []).append(decoded)
    row = {
        "model": ONE_HEAD,
        "tokens": tokens,
        "kept": 0.125,
        "pairs": repeats,
        "prefill_speed_of_exact": ratio(found, "exact prefill", "ours prefill"),
        "decode_speed_of_exact": ratio(found, "exact decode", "ours decode"),
        "decode_speed_of_exact_without_tokens": ratio(found, "exact decode", "empty decode"),
    }
    return [row]


@functools.cache
def wide_model(seed: int) -> Any:
    """Two random layers of Llama 3 8B's shape in bfloat16."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=HEADS * DIM,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=40_000,
    )
    torch.manual_seed(seed)
    return _in_bfloat16(AutoModelForCausalLM.from_config(config))


def layers(repeats: int, tokens: list[int], seed: int) -> list[Job]:
    """``wide_model``."""
    wide, as_many = partial(wide_model, seed), {"budget": 1.0, "bits": 4, "allocation": "even"}
    return [
        partial(_same_bytes, _WIDE, wide, 1024, repeats, seed),
        *(
            partial(_layers, wide, n, as_many if n <= 8000 else {"budget": 0.125}, repeats, seed)
            for n in tokens
        ),
        partial(reading, _WIDE, wide, tokens[0], min(3, repeats), seed),
    ]


def _layers(
    make: Callable[[], Any], tokens: int, settings: dict[str, Any], repeats: int, seed: int
) -> Rows:
    """Decoding of whole layers after a prompt, compared with the exact cache, whose attention is
    called as transformers does, and with the queries of a group packed. The exact cache is also
    compared with an empty one."""
    model = make()
    ids, decoded = prompt(model, tokens, seed), 12
    exact, empty = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ours = SketchCache(model.config, seed=seed, **settings)
    kvsketch.prefill(model, ids, ours, chunk_size=2000)
    for start in range(0, tokens, 2000):
        model(ids[:, start : start + 2000], past_key_values=exact, logits_to_keep=1)
    usual = model.config._attn_implementation

    def run(cache: Any, attention: str) -> None:
        model.set_attn_implementation(attention)
        for _ in range(decoded):
            model(ids[:, -1:], past_key_values=cache, logits_to_keep=1)
        model.set_attn_implementation(usual)

    AttentionInterface.register("packed", _packed)
    AttentionMaskInterface.register("packed", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    found = paired(
        repeats,
        ours=lambda: run(ours, usual),
        exact=lambda: run(exact, usual),
        packed=lambda: run(exact, "packed"),
        empty=lambda: run(empty, usual),
    )
    row = {
        "model": _WIDE,
        "tokens": tokens,
        "settings": ", ".join(f"{name}={value!r}" for name, value in settings.items()),
        "decode_speed_of_exact": ratio(found, "exact", "ours"),
        "decode_speed_of_packed": ratio(found, "packed", "ours"),
        "decode_speed_of_exact_without_tokens": ratio(found, "exact", "empty"),
    }
    return [row]


def _packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """torch's attention of one token, the queries of a group as queries of one head."""
    batch, heads, _, dim = query.shape
    packed = query.reshape(batch, key.shape[1], -1, dim)
    out = F.scaled_dot_product_attention(packed, key, value, scale=kwargs.get("scaling"))
    return out.reshape(batch, heads, 1, -1).transpose(1, 2).contiguous(), None


def _in_bfloat16(model: Any) -> Any:
    return model.to(torch.bfloat16).eval()


def prompt(model: Any, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (1, tokens), generator=generator)


def _same_bytes(what: str, make: Callable[[], Any], slots: int, repeats: int, seed: int) -> Rows:
    """Decoding with the default method after a prompt of four times the budget, compared with
    DynamicCache after a prompt of as many tokens as the budget. The decoding is long enough for at
    least two compressions."""
    model = make()
    ids = prompt(model, 4 * slots, seed)
    tokens = 2 * 4 * min(64, slots // 40)
    found: dict[str, list[float]] = {"ours": [], "exact": []}
    for _ in range(repeats):
        ours = SketchCache(model.config, budget=slots, seed=seed)
        found["ours"].append(generated(model, ours, ids, tokens)[1])
        exact = DynamicCache(config=model.config)
        found["exact"].append(generated(model, exact, ids[:, :slots], tokens)[1])
    row = {
        "model": what,
        "slots": slots,
        "decoded": tokens,
        "pairs": repeats,
        "decode_speed_of_as_many_tokens": ratio(found, "exact", "ours"),
    }
    return [row]


def main(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "decode",
    tokens: Annotated[str, typer.Option(help="Comma-separated. Default: the preset's own.")] = "",
    methods: Annotated[
        str, typer.Option(help="Comma-separated methods of the preset compress.")
    ] = "heavy_merge,cluster_merge,kcenter,snapkv,keydiff",
    dtypes: Annotated[str, typer.Option(help="Dtypes of the preset decode.")] = "float32,bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    repeats: Annotated[int, typer.Option(help="Paired runs, of which the median counts.")] = 5,
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.speed --preset decode --tokens 8192 --json"""
    if preset not in PRESETS:
        raise typer.BadParameter(f"--preset {preset!r} must be one of {', '.join(PRESETS)}")
    many = "8192,32768,131072"
    usual = {"decode": many, "bits": "4096,16384,131072", "compress": many, "prefill": "32768"}
    usual |= {"layers": "8000", "end_to_end": "15900,4000,65536"}
    try:
        lengths = [int(x) for x in (tokens or usual[preset]).split(",")]
    except ValueError:
        raise typer.BadParameter(f"--tokens {tokens!r} must be comma-separated integers") from None
    named, types = methods.split(","), dtypes.split(",")
    for option, given, allowed in (("methods", named, METHODS), ("dtypes", types, DTYPES)):
        unknown = [x for x in given if x not in allowed]
        if unknown:
            raise typer.BadParameter(
                f"--{option} {unknown[0]!r} must be one of {', '.join(allowed)}"
            )
    if min(lengths) < 256 or repeats < 1 or threads < 1:
        raise typer.BadParameter(
            f"--tokens {min(lengths)} must be at least 256, --repeats {repeats} and "
            f"--threads {threads} at least 1"
        )
    torch.set_num_threads(threads)
    if preset == "decode":
        parts = decode(repeats, lengths, types, seed)
    elif preset == "bits":
        parts = in_bits(repeats, lengths, threads, seed)
    elif preset == "compress":
        parts = compress(repeats, lengths, named, seed)
    elif preset == "prefill":
        parts = prefill(repeats, lengths[0], seed)
    elif preset == "layers":
        parts = layers(repeats, lengths, seed)
    else:
        parts = end_to_end(repeats, lengths, seed)
    of_preset = {"compress": {"of": named}, "decode": {"of": types}}.get(preset, {})
    settings = {"tokens": lengths, "threads": threads, "repeats": repeats, "seed": seed}
    results = Results(out, command="speed", preset=preset, **of_preset, **settings)
    console = Console(stderr=True)
    with torch.inference_mode():
        for number, part in enumerate(track(parts, preset, console=console)):
            if not results.has(part=number):
                results.add([{**row, "part": number} for row in part()])
    result = {**results.finish(), "floors": floors()}
    save(result, out)
    rows = result["results"]
    for row in rows:
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        console.print(shown)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
