"""The benchmarks as a user runs them, at small sizes; docs/ has full-size results."""

from __future__ import annotations

import inspect
import itertools
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import (
    attention_error,
    compression_time,
    decode_speed,
    growth,
    guarantee,
    kl,
    longeval,
    markdown,
    measuring,
    model_families,
    options,
    page,
    page_errors,
    page_figures,
    page_readme,
    page_reread,
    prefill_peak,
    prompts,
    ruler,
    streaming_memory,
    svg_figures,
    theorems,
    tolerance,
)
from benchmarks.ablation import everything
from benchmarks.attention_error import held_bytes
from benchmarks.equal_bytes import Fit, Held, held, held_by, state_bytes
from benchmarks.peers import exchange
from kvsketch import SketchCache, Slots
from kvsketch.cache import windowed
from kvsketch.evaluation.runner.setups import parse_method
from kvsketch.hf.activations import capture
from kvsketch.methods.registry import SKETCHES
from kvsketch.page.page import Page
from kvsketch.page.quantized import Bits

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, ok=True):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if ok else done.stderr


def grown(*words):
    app = typer.Typer()
    app.command()(growth.main)
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("benchmark", [attention_error, kl, longeval])
def test_default_methods_are_known(benchmark):
    """All default methods are known; no other test runs a benchmark with all of them."""
    default = inspect.signature(benchmark.main).parameters["methods_"].default
    others = {"exact", *getattr(benchmark, "PEERS", ())}
    assert "heavy_merge" in [method.name for method in options.methods(default, others)]


@pytest.mark.slow
def test_growth_measures_every_sketch(tmp_path):
    figure = tmp_path / "growth.svg"
    done = grown("--largest", "4096", "--no-million", "--json", "--plot", str(figure))
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {(r["sketch"], r["n"]): r for r in result["results"]}
    assert len(rows) == 2 * len(result["exponents"])
    for name, found in result["exponents"].items():
        if name != "balancekv_streaming":  # logarithmic growth, which is no power at such lengths
            assert found["bytes"] <= 0.55 or name == "merge_reduce", (name, found)
    for name in ("sliding_window", "sliding_window_sampled"):
        assert rows[name, 1024]["bytes"] == rows[name, 4096]["bytes"]
    # one more level per doubling, and at most a batch in each instance
    assert rows["merge_reduce", 4096]["slots"] <= 256 * 6
    assert figure.read_text().startswith("<?xml")


@pytest.mark.slow
def test_decoding_is_timed_against_dynamic_cache():
    methods = "uniform,heavy_merge"
    small = ("--slots", "128", "--tokens", "10", "--repeats", "1")
    result = invoke(decode_speed.main, "--methods", methods, *small)
    assert [row["method"] for row in result["results"]] == methods.split(",")
    assert all(0.01 < row["ratio"] < 10 for row in result["results"])


@pytest.mark.slow
def test_prefill_peak_and_model_families_run() -> None:
    result = invoke(prefill_peak.main, "--tokens", "400", "--budgets", "0.25")
    peaks = {(r["method"], r["allocation"]): r["peak_over_exact"] for r in result["results"]}
    assert peaks["snapkv", "even"] < 0.5 < peaks["snapkv", "measured"] < 0.8
    result = invoke(model_families.main, "--families", "llama,gpt_neo")
    assert [row["list"] for row in result["results"]] == ["right", "refused"]


@pytest.mark.slow
def test_a_streaming_prefill_stays_within_its_bound():
    small = ("--tokens", "1500", "--budget", "200", "--chunk", "256")
    result = invoke(streaming_memory.main, "--methods", "uniform,heavy_merge", *small)
    for row in result["results"]:
        assert row["peak_kv_bytes"] <= row["bound_bytes"] < row["exact_kv_bytes"]


@pytest.mark.slow
def test_a_tolerance_is_checked_on_the_tokens_that_follow():
    """For at least 90% of heads the error on the tokens that follow the prompt is within the
    tolerance times ``SLACK``."""
    small = ("--models", "longeval-one-head", "--tolerances", "0.1", "--prompts", "1")
    result = invoke(tolerance.main, *small)
    (row,) = [row for row in result["results"] if "within" in row]
    assert row["within"] >= 0.9
    assert 0 < row["kept"] < 1


def test_growth_names_a_wrong_sketch():
    done = grown("--sketches", "subgn")
    assert done.exit_code == 2
    assert "subgn" in done.stderr


@pytest.mark.slow
def test_guarantee_holds_at_the_calculated_parameters(monkeypatch, tmp_path):
    """With the shorter searches for what breaks even, the least of them among these, and a stream a
    little longer than that."""
    few = [case for case in theorems.BREAK_EVEN if case["d"] <= 2]
    monkeypatch.setattr(theorems, "BREAK_EVEN", few)
    saving = [case for case in guarantee.SAVES if case["n"] <= 300_000]
    monkeypatch.setattr(guarantee, "SAVES", [{**case, "n": 40_000} for case in saving])
    figure = tmp_path / "guarantee.svg"
    result = invoke(
        guarantee.main,
        "--trials",
        "5",
        "--balance-trials",
        "1",
        "--rows",
        "128",
        "--covering-trials",
        "1",
        "--saves-trials",
        "1",
        "--plot",
        str(figure),
    )
    assert {r["sketch"] for r in result["results"]} == {"subgen", "balancekv_streaming"}
    for row in result["results"]:
        assert row["failures"] == 0
        assert 0 < row["median_eps"] < row["eps"]
    index = {row["method"]: row for row in result["index"]}
    assert index["exact"]["advantage"] == 1.0
    for name, row in index.items():
        assert name == "exact" or row["advantage"] < 0.4, row
    assert any("says nothing useful" in row["subgen"] for row in result["real"])
    assert figure.exists()
    for row in [*result["merge_and_reduce"], *result["saves"]]:
        assert row["failures"] == 0
        assert row["slots_needed"] < row["n"]
    assert len(result["saves"]) == 1
    assert all(row["slots_held"] < row["slots_needed"] for row in result["saves"])
    for row in result["covering"]:
        found = max(row["inside"], row["surface"], row["farthest_first"])
        assert found <= min(row["proven"], row["e_to_the_d"])
    assert min(row["zero_share"] for row in result["sparsity"]) >= 0.99
    assert min(row["tokens"] for row in result["break_even"] if row["constant"] == 30) > 17_000


# --- error benchmarks -----------------------------------------------------------------------------


def slots_of(heads=2, n=200, dim=8, mass=False):
    g = torch.Generator().manual_seed(n)
    keys, values = torch.randn(2, 1, heads, n, dim, generator=g)
    return Slots(keys, values, torch.ones(1, heads, n) if mass else None)


def test_bytes_are_counted_by_one_rule():
    """A number counts 2 bytes, a mass 4, and quantised slots as ``Page`` stores them."""
    assert held_bytes(slots_of()) == 200 * 32
    assert held_bytes(slots_of(mass=True)) == 200 * 36
    slots = slots_of(mass=True)
    page = Page(slots, None, 0, Bits(8, 4), 10, 20)
    stored = sum(t.nbytes for part in page.middle.packed.values() for t in part.tensors()) / 2
    assert held_bytes(slots, Bits(8, 4), 10, 20) == stored + 30 * 32 + 200 * 4
    dead = slots.only(torch.arange(200) < 150)
    assert held_bytes(dead) == 150 * 36


@pytest.mark.parametrize("method", [name for name in SKETCHES if name != "one_dimensional"])
def test_a_sketchs_state_is_counted(method):
    """The bytes of a sketch are its whole state, with keys and values at 2 bytes a number and all
    else as stored, and the exact tokens around it."""
    slots = slots_of(n=300)
    reducer = windowed(method, 4, 20)
    found = reducer(slots, 100)
    counted = held(None, [found], reducers=[reducer])
    state = 0
    for name, tensor in reducer.sketch.state.items():
        of_the_model = name.endswith(("keys", "values")) or name == "reservoir"
        state += tensor.numel() * (2 if of_the_model else tensor.element_size())
    assert counted.bytes == state / 2 + 24 * 32
    assert counted.bytes > held_bytes(found) / 2
    # without the sketch, only its visible slots are counted
    assert held(None, [found]).bytes == held_bytes(found) != counted.bytes


@pytest.mark.parametrize(
    ("held_per_slot", "budget"),
    [(32, 100), (36, 88), (20, 160), (16, 200)],
    ids=["plain", "with mass", "fewer bits", "never above what there is"],
)
def test_fit_spends_the_bytes_of_plain_tokens(held_per_slot, budget):
    runs = []

    def run(slots):
        runs.append(slots)
        return Held(slots, slots * held_per_slot, held_per_slot, 32)

    fit = Fit()
    assert fit(run, 100, 10, 200)[0] == budget
    assert len(runs) <= 3
    assert fit(run, 50, 10, 200)[0] == budget // 2
    assert len(runs) <= 4  # the bytes per slot are known by then


def test_fit_gives_up_on_what_never_fits():
    assert Fit()(lambda slots: Held(None, 10_000, 36, 32), 100, 10, 200) is None


def test_fit_goes_below_sizes_that_come_in_steps():
    fitted = Fit()(lambda slots: Held(None, 64 * (1 + slots // 64) * 36, 36, 32), 100, 10, 200)
    assert fitted[1].bytes == 64 * 36


@pytest.mark.parametrize(
    ("middle", "kept"), [(368, 11), (368, 184), (1905, 927), (1905, 101), (7, 3)]
)
def test_halvings_leave_any_number_of_slots(middle, kept):
    parts = attention_error.halvings(middle, kept)
    assert sum(tokens for tokens, _ in parts) == middle
    assert sum(tokens >> times for tokens, times in parts) == kept
    assert all(tokens % 2**times == 0 for tokens, times in parts)


def test_a_method_is_read_with_its_endings():
    assert options.parse("heavy_merge@calibrated+int4") == options.Method(
        "heavy_merge@calibrated+int4", "heavy_merge", "calibrated", 4
    )
    assert options.parse("heavy_merge+int4").spent == "measured"
    assert options.parse("heavy_merge@even").spent == "even"
    assert options.parse("h2o@measured").spent == "measured"
    assert options.parse("snapkv") == options.Method("snapkv", "snapkv")
    assert options.parse("int8") == options.Method("int8", None, bits=8)


@pytest.fixture(scope="module")
def packaged():
    """The packaged model, and the ids of a record of 20 lines."""
    model, tokenizer = prompts.load("longeval-one-head")
    (text,) = prompts.answered(model, tokenizer, 1, 20, 0)
    return model, text.ids[:, : text.cut]


LABELS = ["heavy_merge@even", "heavy_merge@measured", "h2o@measured", "heavy_merge+int4"]
LABELS += ["heavy_merge@even+int4", "subgen@measured"]


@pytest.mark.parametrize("method", ["subgen", "merge_reduce"])
def test_a_sketch_in_a_cache_is_counted_with_its_state(packaged, method):
    """The state also counts where the heads of a sketch have different numbers of slots, as those
    of ``merge_reduce``."""
    model, prompt = packaged
    cache = SketchCache(model.config, method, budget=100, keep=["decoded"])
    prompts.prefill(model, prompt, cache)
    counted = held_by(cache, 4, 32)
    found = []
    for layer in cache.layers:
        window = layer.stream.method
        around = layer.stream.slots.count - window.sketch.slots.count
        found.append(state_bytes(window.sketch) + around * counted.token)
    assert counted.bytes == pytest.approx(sum(found) / len(found))


def test_masses_count_where_they_are_stored(packaged):
    """Heads of different size are read with dead slots, which take no memory."""
    model, prompt = packaged
    for method, bits in itertools.product(("h2o", "heavy_merge"), (16, 4)):
        budget = bits / 80  # few enough that something goes
        cache = SketchCache(model.config, method, budget=budget, bits=bits, allocation="global")
        prompts.prefill(model, prompt, cache)
        streams = [layer.stream for layer in cache.layers]
        assert any(len(set(stream.held[0].tolist())) > 1 for stream in streams)
        for stream in streams:
            held = [part.fields for part in (stream.page.exact, stream.page.middle) if part]
            stored = any("log_mass" in fields for fields in held)
            assert stored is (method == "heavy_merge")
            assert all((s.mass is not None) is stored for s, _ in measuring.parts_of(stream))


def compressed_as(packaged, label):
    """The budget and the cache that a label gives at the bytes of 0.3 of the tokens."""
    model, prompt = packaged
    tokens = round(0.3 * prompt.shape[1])
    budget, held = kl.compressed(model, prompt, options.parse(label), tokens, Fit(), None)
    return budget, held.what


def streams_of(cache):
    return [layer.stream for layer in cache.layers]


@pytest.mark.parametrize("label", [*options.USUAL, *LABELS])
def test_a_label_means_what_it_means_in_the_command_line(packaged, label):
    """A bare name of a method is the default of ``SketchCache``, and ``@even``, ``@measured`` and
    ``+int4`` mean the same as for ``kvsketch eval --methods``, in a model of 16 bits."""
    budget, found = compressed_as(packaged, label)
    setup, given = parse_method(label), {}
    if label not in options.USUAL:
        given = {"allocation": setup.allocation, "bits": setup.bits}
    model, prompt = packaged
    cache = SketchCache(model.config, setup.method, budget=budget, **given)
    cache.plan.itemsize = 2
    prompts.prefill(model, prompt, cache)
    for ours, theirs in zip(streams_of(found), streams_of(cache), strict=True):
        tensors = (stream.slots.tensors() for stream in (ours, theirs))
        torch.testing.assert_close(*tensors, rtol=0, atol=0)


def test_bare_names_differ_from_even_ones_only_where_the_default_is_measured(packaged):
    """Only measured budgets give heads of several sizes; else the test above could not tell labels
    apart."""
    labels = ("heavy_merge", "heavy_merge@even", "h2o", "h2o@even", "h2o@measured")
    sizes = {
        x: {n for s in streams_of(compressed_as(packaged, x)[1]) for n in s.held[0].tolist()}
        for x in labels
    }
    for label in ("heavy_merge@even", "h2o", "h2o@even"):
        assert len(sizes[label]) == 1
    assert len(sizes["heavy_merge"]) > 1
    assert len(sizes["h2o@measured"]) > 1


@pytest.mark.parametrize("label", ["heavy_merge@measured", "h2o@measured", "snapkv@even"])
def test_single_layers_spend_their_budget_as_a_cache_does(label):
    """Single layers have heads of the same sizes as a cache, on a prompt of more queries than a
    cache keeps for measuring."""
    model, tokenizer = prompts.load("longeval-one-head")
    (ids,) = prompts.line_prompts(tokenizer, 1, 60, 0)
    window = {"sink": 16, "recent": 64}
    layers = [attention_error.layer_of(x, 64) for x in capture(model, ids)]
    n = layers[0].slots.count
    method, budget = options.parse(label), round(0.4 * n)
    held = attention_error.ours(method, *window.values())(layers, budget, 0)

    cache = SketchCache(
        model.config,
        method.name,
        budget=budget,
        allocation=parse_method(label).allocation,
        **window,
    )
    cache.plan.itemsize = 2
    prompts.prefill(model, ids[:, :n], cache)
    for slots, layer in zip(held.what, cache.layers, strict=True):
        heads = slots.keys.shape[1]
        live = slots.live()
        mine = [slots.count] * heads if live is None else live.sum(-1)[0].tolist()
        assert mine == layer.stream.held[0].tolist()


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: options.methods("uniform,snapkw"), "did you mean 'snapkv'"),
        (lambda: options.methods("one_dimensional"), "'one_dimensional' is unknown"),
        (lambda: options.methods("snapkv+int3"), "'int3' is unknown; did you mean 'int"),
        (lambda: options.methods("exact"), "'exact' is unknown"),
        (lambda: options.methods("snapkv@measure"), "did you mean '@measured'"),
        (
            lambda: options.methods("snapkv@prompt"),
            "Allowed: @calibrated, @even, @global, @layer, @measured",
        ),
        (lambda: compression_time.evenly_spent("heavy_merge"), "use heavy_merge@even"),
        (lambda: compression_time.evenly_spent("snapkv+int4"), "'snapkv.int4' must be one of"),
        (lambda: options.paths("nowhere.txt,pyproject.toml"), "nowhere.txt: no such file"),
        (lambda: options.positive(seeds=0), "--seeds 0 must be at least 1"),
        (lambda: options.among("preset", "defalt", ["default"]), "'defalt' must be one of"),
        (lambda: options.fractions("budgets", "0.5,1.5"), r"-separated numbers in \(0, 1\]"),
        (lambda: options.fractions("budgets", "half"), "--budgets 'half'"),
        (lambda: options.integers("layers", "1,b"), "--layers '1,b'"),
    ],
)
def test_bad_options_are_named(monkeypatch, read, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(typer.BadParameter, match=message):
        read()


def invoke(main, *arguments):
    """Run a benchmark's ``main`` in this process; returns its JSON."""
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


SMALL = {
    "attention_error": ["--prompts", "1", "--seeds", "2"],
    "kl": ["--texts", "1", "--follow", "8", "--queries", "agnostic"],
}
MAINS = {"attention_error": attention_error.main, "kl": kl.main}


@pytest.fixture
def short(monkeypatch):
    """Arguments for the packaged model, with records of 20 lines."""
    monkeypatch.setattr(prompts, "_LINES", 20)
    return ["--models", "longeval-one-head"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_method_holds_the_same_bytes(short, name):
    """No method takes more bytes than plain tokens do at the same kept share, and those of any size
    take at least 97% of them: with masses, merging, a streaming sketch, measured shares and 4
    bits. At the largest share and the least one; the error of single layers also between them."""
    methods = "streaming_llm,uniform,heavy_merge@even,subgen,snapkv@calibrated,heavy_merge"
    methods += ",heavy_merge@calibrated+16bit,heavy_merge@even+int4"
    methods += ",heavy_merge@calibrated+int4,int4"
    fewer = {"attention_error": ["--seeds", "1"], "kl": ["--shares", "0.5,0.0625"]}[name]
    result = invoke(MAINS[name], *short, *SMALL[name], *fewer, "--methods", methods)
    assert result["complete"]
    rows = {(r["method"], r["kept"]): r for r in result["results"]}
    plain = {kept: r for (method, kept), r in rows.items() if method == "streaming_llm"}
    assert sorted(plain) == ([1 / 16, 1 / 2] if name == "kl" else [1 / 16, 1 / 8, 1 / 4, 1 / 2])
    tokens = 1 / (plain[0.5]["bytes_per_token"] / 128 / plain[0.5]["slots_per_token"])
    assert tokens == pytest.approx(1, abs=1e-3)  # a plain token is 128 bytes
    for (method, kept), row in rows.items():
        assert row["queries"] == "agnostic"
        if kept == 1:
            continue
        limit = plain[kept]["bytes_per_token"]
        assert row["bytes_per_token"] <= limit + 1e-3, (method, kept)
        if method == "uniform":
            assert row["slots_per_token"] < plain[kept]["slots_per_token"]
        if method.endswith("+int4"):
            assert row["slots_per_token"] > plain[kept]["slots_per_token"]
        elif method != "subgen" and row["slots_per_token"] < 0.9:  # else some layers keep all
            assert row["bytes_per_token"] > 0.97 * limit, (method, kept)
    assert rows["int4", 1.0]["bytes_per_token"] < 80


@pytest.mark.slow
def test_kl_compresses_before_or_after_the_question(short):
    """Both kinds of queries use the same texts, which are cut before or after the question; with 4
    bits and all tokens both have nearly the exact predictions."""
    result = invoke(
        kl.main, *short, "--texts", "2", "--methods", "snapkv,int4", "--queries", "agnostic,aware"
    )
    assert {r["queries"] for r in result["results"]} == {"agnostic", "aware"}
    found = {(r["method"], r["queries"]): r for r in result["results"] if r["kept"] in (0.5, 1)}
    for queries in ("agnostic", "aware"):
        assert found["int4", queries]["kl"] < 0.1
        assert found["int4", queries]["top1"] > 0.9
    model, tokenizer = prompts.load("longeval-one-head")
    for seed in (0, 1):
        apart, together = (
            prompts.answered(model, tokenizer, 1, 20, seed, queries)[0]
            for queries in ("agnostic", "aware")
        )
        assert torch.equal(apart.ids, together.ids)
        assert apart.asked == together.asked == together.cut > apart.cut
        record = tokenizer.decode(apart.ids[0, : apart.cut])
        asked = tokenizer.decode(apart.ids[0, apart.cut : apart.asked])
        assert "Tell me" not in record
        assert "Tell me" in asked
        assert tokenizer.decode(apart.ids[0, apart.asked :]).strip().startswith("The <REG")


def test_texts_without_a_question_leave_a_gap(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("line one-two: REGISTER_CONTENT is <123>\n" * 40)
    model, tokenizer = prompts.load("longeval-one-head")
    cuts = {}
    for queries in prompts.PROTOCOLS:
        source, (text,) = prompts.texts_for(
            "longeval-one-head", model, tokenizer, 1, 0, [file], 30, queries
        )
        assert source == "files"
        assert text.ids.shape[1] - text.asked == 30
        cuts[queries] = text.asked - text.cut
    assert cuts == {"agnostic": prompts.GAP, "aware": 0}


@pytest.mark.parametrize("name", SMALL)
def test_a_killed_run_loses_one_method_at_most(monkeypatch, tmp_path, short, name):
    """A run that is killed in its second method keeps the first one's rows when it is run again;
    with another setting it starts anew."""
    out = tmp_path / "rows.json"
    module = {"attention_error": attention_error, "kl": kl}[name]
    arguments = [*short, *SMALL[name], "--methods", "streaming_llm,knorm", "--out", str(out)]
    measure, calls = module.measure, []

    def dying(*args):
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(module, "measure", dying)
    app = typer.Typer()
    app.command()(module.main)
    assert CliRunner().invoke(app, arguments).exit_code != 0
    left = json.loads(out.read_text())
    assert left["complete"] is False
    assert [r["method"] for r in left["results"]] == ["streaming_llm"] * 4

    calls.clear()
    calls.extend([None] * 10)  # the second run is not killed
    result = invoke(module.main, *arguments)
    assert len(calls) == 10 + 4
    assert result["complete"] is True
    assert result["results"][:4] == left["results"]
    assert [r["method"] for r in result["results"][4:]] == ["knorm"] * 4
    assert json.loads(out.read_text()) == result

    out.write_text(json.dumps(left))
    invoke(module.main, *arguments, "--seed", "1")
    assert len(calls) == 14 + 8


def test_longeval_with_the_question_seen(monkeypatch, tmp_path):
    """The whole question is compressed with the record."""
    monkeypatch.setattr(longeval, "OFFICIAL", tmp_path)
    read = []

    def compressed(model, ids, *arguments, **options):
        read.append(tokenizer.decode(ids[0]))
        return kl.compressed(model, ids, *arguments, **options)

    tokenizer = prompts.load(prompts.ONE_HEAD)[1]
    monkeypatch.setattr(longeval, "compressed", compressed)
    arguments = ["--lines", "20", "--count", "1", "--budgets", "0.5", "--methods", "exact,snapkv"]
    arguments += ["--model", prompts.ONE_HEAD]
    for question in ("unseen", "seen"):
        result = invoke(longeval.main, *arguments, "--question", question)
        exact, snapkv = result["results"]
        assert exact["accuracy"] == 1.0
        assert snapkv["queries"] == {"unseen": "agnostic", "seen": "aware"}[question]
        assert f"question {question} at compression" in page_errors.longeval(result)
    prompt = longeval.cases(20, 1, 0)[1][0]["prompt"]
    unseen, seen = read
    assert "Now the record is over" not in unseen
    assert seen.startswith(unseen)
    assert prompt == seen


def test_with_the_question_seen_the_answer_is_that_of_generate():
    model, tokenizer = prompts.load(prompts.ONE_HEAD)
    case = longeval.questions(tokenizer, longeval.cases(20, 1, 0)[1])[0]
    asked = longeval.as_read(model, case, "seen")
    for budget in (60, 250):
        one, other = (SketchCache(model.config, "snapkv", budget=budget) for _ in range(2))
        prompts.prefill(model, case.ids, one)
        out = model.generate(case.ids, past_key_values=other, max_new_tokens=case.new_tokens)
        said = tokenizer.decode(out[0, case.ids.shape[1] :], skip_special_tokens=True)
        assert longeval.answer(model, tokenizer, asked, one) == said


def test_an_answer_that_ends_at_once_is_empty():
    model, tokenizer = prompts.load(prompts.ONE_HEAD)
    ids = torch.tensor([[1, 2, model.config.eos_token_id]])
    asked = prompts.Asked(ids, 2, float, 18, begun=1)
    assert longeval.answer(model, tokenizer, asked, SketchCache(model.config)) == ""


@pytest.mark.parametrize("main", [longeval.main, ruler.main])
def test_an_unknown_question_is_refused(main):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(main)
    done = CliRunner().invoke(app, ["--question", "unseen,seen"])
    assert done.exit_code == 2
    assert "--question 'unseen,seen' must be one of unseen, seen" in done.output


@pytest.mark.slow
def test_longeval_at_equal_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(longeval, "OFFICIAL", tmp_path)
    methods = "exact,streaming_llm,heavy_merge@calibrated,heavy_merge@calibrated+int4,int4"
    result = invoke(
        longeval.main,
        *["--lines", "20", "--count", "2", "--budgets", "0.5", "--methods", methods],
    )
    assert result["source"] == "generated"
    rows = {r["method"]: r for r in result["results"]}
    assert rows["exact"]["accuracy"] == rows["int4"]["accuracy"] == 1.0
    assert {r["queries"] for r in rows.values()} == {"agnostic"}
    plain = rows["streaming_llm"]
    for name in ("heavy_merge@calibrated", "heavy_merge@calibrated+int4"):
        assert rows[name]["bytes_per_token"] <= plain["bytes_per_token"] + 1e-3
    assert rows["heavy_merge@calibrated+int4"]["slots_per_token"] > plain["slots_per_token"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "defalt"], "must be one of default, balancekv"),
        (["--methods", "unifrm"], "did you mean 'uniform'"),
        (["--layers", "7", "--models", "longeval-one-head"], "layers: 7 must be in 0 .. 3"),
        (["--prompts", "0"], "--prompts 0"),
    ],
)
def test_attention_error_names_what_is_wrong(arguments, message):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(attention_error.main)
    done = CliRunner().invoke(app, ["--methods", "knorm", "--prompts", "1", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_missing_peer_is_left_out_with_its_reason(monkeypatch, tmp_path, short):
    monkeypatch.setenv(exchange.VARIABLE, str(tmp_path / "nowhere"))
    monkeypatch.delenv("KVSKETCH_BALANCEKV", raising=False)
    app = typer.Typer()
    app.command()(attention_error.main)
    names = "knorm,peer:quantized_cache-int4,peer:balancekv"
    done = CliRunner().invoke(
        app, [*short, "--prompts", "1", "--seeds", "1", "--methods", names, "--json"]
    )
    assert {r["method"] for r in json.loads(done.stdout.splitlines()[-1])["results"]} == {"knorm"}
    said = " ".join(done.stderr.split())
    assert "left out: peer:quantized_cache-int4" in said
    assert "run `make peers`" in said
    assert "KVSKETCH_BALANCEKV is not set" in said


@pytest.mark.slow
def test_the_page_is_written_from_what_the_benchmarks_leave(monkeypatch, tmp_path, short, capsys):
    monkeypatch.setattr(page, "DOCS", tmp_path)
    folder = tmp_path / "results"
    for name, main in MAINS.items():
        arguments = [*short, *SMALL[name], "--methods", "knorm,heavy_merge,int4"]
        invoke(main, *arguments, "--out", str(folder / f"{name}.json"))
    whole = json.loads((folder / "attention_error.json").read_text())
    page.save(whole | {"complete": False}, folder / "attention_error_balancekv.json")
    where = {name: whole[name] for name in ("seed", "versions", "hardware")}
    row = {"part": "no fit", "source": "x", "kept": 0.5, "relative_error": 0.1}
    page.save({"results": [row | {"bytes_per_token": 3.2}], **where}, folder / "ablation.json")
    times = [{"method": "knorm", "seconds": 0.123456}, {"method": "h2o", "of_prefill": 2}]
    page.save({"results": times, **where}, folder / "compression_time.json")
    page.main()
    text = (tmp_path / "errors.md").read_text()
    assert "Equal bytes" in text
    assert "**longeval-one-head:longeval-20, queries unseen**" in text
    assert "| int4 | all tokens: " in text
    assert "| no fit | 0.100 | 3 |" in text
    assert "| knorm | 0.1235 |  |" in text
    said = capsys.readouterr().out
    assert "attention_error_balancekv.json is not complete" in said
    assert "longeval_unseen.json is not there" in said


def test_the_readme_compares_ours_with_the_best_of_others(tmp_path):
    """The last row of README's table has the best of the other methods by default: without ours,
    without budgets as we allocate them and without caches of all tokens."""
    accuracy = {
        "snapkv": 0.2,
        "merge_reduce": 0.3,
        "cluster_merge": 0.5,
        "heavy_merge": 0.9,
        "snapkv@calibrated": 0.8,
    }
    rows = [{"method": m, "budget": 0.5, "accuracy": a, "cases": 7} for m, a in accuracy.items()]
    rows += [
        {"method": name, "budget": 1.0, "accuracy": 1.0, "cases": 7} for name in ("exact", "int4")
    ]
    unseen = {"results": rows, "model": "spread", "lines": 20, "source": "generated"}
    again = {"method": "kvzip/reread", "budget": 0.5, "accuracy": 0.7, "cases": 7}
    assert page_readme.compared(unseen) == ["snapkv", "merge_reduce"]
    readme = tmp_path / "README.md"
    readme.write_text("before <!-- unseen:begin -->old<!-- unseen:end --> after")
    lengths = [
        {
            "lines": lines,
            "count": 50,
            "results": [
                {"method": "heavy_merge", "budget": kept, "accuracy": right / 50, "cases": 50}
                for kept in (0.1, 0.05)
            ]
            + [{"method": f"{lines}", "budget": 0.05, "accuracy": 1.0, "cases": 50}],
        }
        for lines, right in ((200, 34), (300, 44))
    ]
    costs = {"results": [], "peers": []}
    block = page_readme.block(unseen, {"results": [again]}, costs, lengths)
    page.write_block("unseen", block, readme)
    text = readme.read_text()
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert "old" not in text
    assert "| exact cache (all bytes) | 1.00 | 0 |\n| kvsketch, its default | 0.90 | 0 |" in text
    assert "| KVzip | 0.70 |" in text
    assert "| best of 2 others that read once | 0.30 (merge_reduce) | 0 |" in text
    assert "\n\nThe packaged model `spread` is trained for LongEval's line retrieval, so" in text
    more = (
        "at 5% of the bytes to 100 questions (50 each of 200, 300 lines): kvsketch, its default: 78"
    )
    assert f" Right answers {more}. All methods" in text
    assert "| heavy_merge | 0.78 (0.69-0.85) | 0.68 / 0.88 |" in page_reread.all_lengths(
        [{**one, "results": one["results"][1:]} for one in lengths]
    )


def test_pages_show_a_heading_and_a_paragraph_and_fold_the_tables():
    """Nothing is lost by folding, and sections without a table stay open."""
    shown = "# Page\n\n| a |\n| --- |\n| 1 |\n\n"
    section = "## Part\n\nWhat comes out.\n\nHow.\n\n| b |\n| --- |\n| 2 |\n| 3 |\n"
    open_ = "## Text\n\nOne.\n\nTwo.\n"
    text = markdown.folded(shown + section + open_)
    assert text.startswith(f'{shown}## Part\n\nWhat comes out.\n\n<details markdown="1">\n')
    assert "(2 rows)</summary>\n\nHow.\n\n| b |" in text
    assert text.endswith(f"</details>\n\n{open_}")


def test_the_first_figures_of_the_pages_are_what_the_script_draws():
    for name, svg in page_figures.drawings(page.DOCS / "results").items():
        assert (page.DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8") == svg


def test_labels_at_the_ends_of_lines_do_not_overlap():
    """Labels keep their order and stay inside the panel, also where all lines end at 0."""
    places = svg_figures.apart([40.0, 200.0, 200.0, 201.0], 40, 202)
    assert places == sorted(places)
    assert all(b - a >= svg_figures.ROW for a, b in pairwise(places))
    assert places[0] >= 40
    assert places[-1] <= 202


def test_no_label_of_the_results_is_unknown():
    """Every method in docs/results is named as ``options`` names it."""
    for name in ("attention_error", "attention_error_balancekv", "kl", "longeval_unseen"):
        result = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
        others = ["exact", *attention_error.PEERS]
        labels = {row["method"] for row in result["results"]} | set(result["methods"])
        found = {method.label for method in options.methods(",".join(labels), others)}
        assert found == labels
    ablation = json.loads((ROOT / "docs" / "results" / "ablation.json").read_text())
    assert {row["part"] for row in ablation["results"]} == set(everything())
    times = json.loads((ROOT / "docs" / "results" / "compression_time.json").read_text())
    compression_time.evenly_spent(",".join(row["method"] for row in times["results"]))
