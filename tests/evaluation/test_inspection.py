"""`kvsketch inspect`: every number against a plain reference, all families, the command and its
errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import typer
from transformers import BloomConfig
from typer.testing import CliRunner

from families import CONFIGS, VOCABULARY, build
from kvsketch import InputError, UnsupportedError
from kvsketch.cli import inspect_command
from kvsketch.cli.app import _Group
from kvsketch.estimator import attend
from kvsketch.evaluation.inspection import measures as inspection_measures
from kvsketch.evaluation.inspection.inspection import (
    LEAST_TOKENS,
    METHODS,
    choose_layers,
    inspect_model,
    steps,
)
from kvsketch.evaluation.inspection.measures import SHARES, attention, cover
from kvsketch.evaluation.inspection.readings import TOLERANCES
from kvsketch.evaluation.inspection.rows import BINS, EIGHTH
from kvsketch.hf.activations import Activations, capture
from kvsketch.hf.measuring import measure_curves
from kvsketch.models import packaged_model
from kvsketch.observed import Observed, causal
from kvsketch.slots import Slots
from tiny_model import POSITIONS, save_tiny_model, tiny_case, tiny_model, tiny_tokenizer

TOKENS = 280
FEW = ("uniform", "heavy_merge")


def ids_of(tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def measured(llama):
    return inspect_model(llama, [ids_of(seed=0), ids_of(300, seed=1)])


def test_norms_are_those_of_all_prompts(llama, measured):
    caught = [capture(llama, ids_of(seed=0)), capture(llama, ids_of(300, seed=1))]
    for layer, row in enumerate(measured["layers"]):
        assert (row["layer"], row["tokens"]) == (layer, [TOKENS, 300])
        both = [prompt[layer] for prompt in caught]
        for name, tensors in (
            ("query", [c.queries for c in both]),
            ("key", [c.keys for c in both]),
            ("value", [c.values for c in both]),
        ):
            norms = torch.cat([t[0].norm(dim=-1) for t in tensors], dim=1)
            found = row["norms"][name]
            assert found["mean"] == pytest.approx(float(norms.mean()), rel=1e-4)
            assert found["max"] == pytest.approx(float(norms.max()), rel=1e-4)
            assert found["heads"] == pytest.approx(norms.mean(1).tolist(), rel=1e-4)
            assert len(found["counts"]) == BINS
            assert len(found["edges"]) == BINS + 1
            assert sum(found["counts"]) == norms.numel()
        pairs = [
            c.queries[0, head].norm(dim=-1)[:, None] * c.keys[0, head // 2].norm(dim=-1) * c.scaling
            for c in both
            for head in range(4)
        ]
        most = max(float(p.max()) for p in pairs)
        assert row["norms"]["score"]["max"] == pytest.approx(most, rel=1e-4)
        # every prompt has the same weight
        mean = sum(float(p.mean()) for p in pairs) / len(pairs)
        assert row["norms"]["score"]["mean"] == pytest.approx(mean, rel=1e-4)


def known(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys ``[1, 1, n, n]`` that have the given scores, row by row."""
    return scores[None, None], torch.eye(scores.shape[1])[None, None]


def test_attention_that_is_known():
    n = 100
    even, last = attention(*known(torch.zeros(n, n)), 1.0), torch.arange(n - 63, n + 1).double()
    assert float(even["entropy"]) == pytest.approx(1.0)
    assert float(even["sink"]) == pytest.approx(float((4 / last).mean()))
    overlap = (last - 4).clamp(max=32)  # sinks do not count as recent
    assert float(even["recent"]) == pytest.approx(float((overlap / last).mean()))
    assert float(even["holding"]) == pytest.approx(float((0.9 * last - 1e-9).ceil().mean()))
    own = attention(*known(200.0 * torch.eye(n)), 1.0)
    for name, value in {"entropy": 0, "sink": 0, "recent": 1, "holding": 1}.items():
        assert float(own[name]) == pytest.approx(value, abs=1e-9)
    first = torch.zeros(n, n)
    first[:, :2] = 50.0
    halves = attention(*known(first), 1.0)
    assert float(halves["sink"]) == pytest.approx(1.0)
    assert float(halves["holding"]) == 2
    assert float(halves["entropy"]) == pytest.approx(float((math.log(2) / last.log()).mean()))
    # a softcap evens out the scores
    capped = attention(*known(first), 1.0, softcap=1e-6)
    assert float(capped["entropy"]) == pytest.approx(1.0)


def test_attention_against_a_loop(llama):
    (caught,) = capture(llama, ids_of(60), [1])
    found = attention(caught.queries, caught.keys, caught.scaling, last=5)
    for head in range(4):
        entropy, holding, recent = [], [], []
        for i in range(55, 60):
            scores = caught.keys[0, head // 2, : i + 1] @ caught.queries[0, head, i]
            share = (scores.double() * caught.scaling).softmax(0)
            entropy.append(-float((share * share.log()).sum()) / math.log(i + 1))
            ranked, total, count = sorted(share.tolist(), reverse=True), 0.0, 0
            while total < 0.9:
                total += ranked[count]
                count += 1
            holding.append(count)
            recent.append(float(share[-32:].sum()))
        for name, values in (("entropy", entropy), ("holding", holding), ("recent", recent)):
            assert float(found[name][0, head]) == pytest.approx(sum(values) / 5, rel=1e-5)


def test_planted_clusters_are_found():
    """64 tokens in 8 tight clusters: n/8 balls of the clusters' radius cover them, and fewer do
    not. Spread out points need far larger balls."""
    generator = torch.Generator().manual_seed(0)
    centers = 10 * torch.eye(8).repeat_interleave(8, dim=0)
    tight = centers + 0.01 * torch.randn(64, 8, generator=generator)
    loose = torch.randn(64, 8, generator=generator)
    radius, balls = cover(torch.stack([tight, loose])[None])
    at = SHARES.index(EIGHTH)
    assert float(radius[0, 0, at]) < 0.02
    assert float(radius[0, 0, at - 1]) > 1
    assert float(radius[0, 1, at]) > 0.5
    assert balls[0].tolist() == [8 / 64, pytest.approx(float(balls[0, 1]))]
    assert float(balls[0, 1]) > 0.3
    # neither scaling nor shifting all points changes the result
    torch.testing.assert_close(cover(7 * tight[None, None] + 3)[0][0, 0], radius[0, 0])
    alike, one = cover(torch.ones(1, 1, 64, 8))
    assert not bool(alike.any())
    assert float(one) == 1 / 64


def test_errors_are_those_of_the_curves(llama, measured):
    """The errors of one layer and method equal those of ``measure_layer``, called as by
    ``measure_curves``."""
    from kvsketch.cache import windowed
    from kvsketch.cache.held_out import held_out_for, measure_layer

    expected = []
    for prompt in (ids_of(seed=0), ids_of(300, seed=1)):
        c = capture(llama, prompt)[0]
        n = c.keys.shape[2]
        after = held_out_for(n, 4, 32)
        level = (0.25 * (n - after) - 36) / (n - after - 36)
        curves = measure_layer(
            Slots(c.keys, c.values),
            Observed(c.queries, c.scaling),
            windowed("snapkv", 4, 32, 0),
            after,
            4,
            32,
            (level,),
        )
        assert float(curves.kept) == pytest.approx(0.25, abs=1 / (n - after))
        expected.append(curves.relative[0, :, 0])
    heads = torch.stack(expected).mean(0)
    row = measured["layers"][0]
    assert row["errors_by_head"]["snapkv"] == pytest.approx(heads.tolist(), rel=1e-4)
    assert row["errors"]["snapkv"] == pytest.approx(float(heads.mean()), rel=1e-4)
    means = [row["errors"]["snapkv"] for row in measured["layers"]]
    assert measured["errors"]["snapkv"] == pytest.approx(sum(means) / 2, rel=1e-4)


def test_readings_say_what_the_numbers_say(measured):
    errors = measured["errors"]
    assert list(errors) == list(METHODS)
    best, after = sorted(errors, key=errors.get)[:2]
    said = measured["readings"]["errors"]
    assert f"{best} has the lowest relative attention error, {errors[best]:.3f}" in said
    assert f"{1 - errors[best] / errors[after]:.0%} below {after} ({errors[after]:.3f})" in said
    for row in measured["layers"]:
        needed = [row["within"][str(t)] for t in TOLERANCES]
        assert needed == sorted(needed, reverse=True)
        assert 0 < needed[-1] <= needed[0] <= 1
        theory = row["theory"]
        assert theory["query_norm"] == row["norms"]["query"]["max"]
        for name in ("subgen", "balancekv"):
            asked = theory[name]["slots"]
            useless = asked is None or asked >= theory["n"]
            assert useless == ("nothing useful" in theory[name]["verdict"] or asked is None)
    assert "Theorem 1 asks for fewer slots" in measured["readings"]["theory"]
    assert measured["readings"]["tsne"] == ""


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(llama, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(inspection_measures, "POINTS", 100)
    count = 0

    def advance() -> None:
        nonlocal count
        count += 1

    def once(seed: int, **kwargs):
        return inspect_model(llama, [ids_of()], projected=[1], seed=seed, **kwargs)

    first, again, other = once(3, advance=advance), once(3), once(4)
    assert count == steps(1, 2, len(METHODS), projected=2)  # one KV head at a time
    assert first == again
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert first["errors"]["uniform"] != other["errors"]["uniform"]
    assert first["errors"]["snapkv"] == other["errors"]["snapkv"]  # it has no randomness
    assert [(v["layer"], v["head"], v["what"]) for v in first["tsne"]] == [
        (1, head, what) for head in (0, 1) for what in ("keys", "values")
    ]
    radii = {(v["head"], v["what"]): v["radius"] for v in first["tsne"]}
    better = sum(radii[head, "keys"] < radii[head, "values"] for head in (0, 1))
    assert f"in {better} of 2 heads the keys need smaller ones" in first["readings"]["tsne"]
    (caught,) = capture(llama, ids_of(), [1])
    for view in first["tsne"]:  # every head has the embedding of its own points
        points = (caught.keys if view["what"] == "keys" else caught.values)[0, view["head"]]
        alone = inspection_measures.embed(points, 3)
        assert (view["points"], view["centers"]) == (alone["points"], alone["centers"])
    for view in first["tsne"]:
        assert len(view["points"]) == 100
        assert len(set(view["centers"])) == 16
        assert view["centers"] != sorted(view["centers"])


def test_long_prompts_are_thinned_for_the_picture(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(inspection_measures, "POINTS", 50)
    view = inspection_measures.embed(
        torch.randn(120, 4, generator=torch.Generator().manual_seed(0)), 0
    )
    assert len(view["points"]) == len(view["positions"]) == 50
    assert (view["positions"][0], view["positions"][-1]) == (0, 119)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(family):
    model = build(family)
    try:
        capture(model, ids_of(8))
    except Exception:  # whatever error capture raises, the model is refused by name
        assert family == "gemma2"  # transformers 5.3's sdpa refuses its softcap
        with pytest.raises(UnsupportedError, match=type(model).__name__):
            inspect_model(model, [ids_of()])
        return
    result = inspect_model(model, [ids_of(LEAST_TOKENS)], methods=FEW)
    layers = [row["layer"] for row in result["layers"]]
    # their sliding-window layer is not inspected
    assert layers == ([1, 2] if family in ("gemma2", "gemma3") else [0, 1])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for row in result["layers"]:
        assert 0 < row["attention"]["entropy"] <= 1
        assert 0 < row["errors"]["heavy_merge"] < 2


def test_layers_are_checked_without_weights():
    config = CONFIGS["gemma2"]()
    assert choose_layers(config) == [1, 2]
    assert choose_layers(config, [2]) == [2]
    assert choose_layers(CONFIGS["opt"]()) == [0, 1]
    with pytest.raises(InputError, match=r"layers: 0 has a sliding window .* allowed: 1, 2"):
        choose_layers(config, [0])
    with pytest.raises(InputError, match=r"layers: 3 must be in 0 \.\. 2"):
        choose_layers(config, [1, 3])
    config.layer_types = ["sliding_attention"] * 3
    with pytest.raises(UnsupportedError, match="Gemma2Config has no full-attention layer"):
        choose_layers(config)
    assert choose_layers(CONFIGS["mpt"]()) == [0, 1]
    with pytest.raises(UnsupportedError, match="BloomForCausalLM does not use"):
        choose_layers(BloomConfig(n_layer=2, n_head=4, hidden_size=64))


def test_what_is_caught_of_mpt_is_what_its_attention_computes():
    """Attention over the captured activations, with ALiBi, gives the module's own output."""
    model, ids = build("mpt"), ids_of(40)
    outputs: list[torch.Tensor] = []
    hooks = [
        block.attn.register_forward_hook(lambda module, _, out: outputs.append(out[0]))
        for block in model.transformer.blocks
    ]
    caught = capture(model, ids)
    for hook in hooks:
        hook.remove()
    assert [c.layer for c in caught] == [0, 1]
    assert [c.layer for c in capture(model, ids, [1])] == [1]
    assert not any(m._forward_pre_hooks for m in model.modules())
    for c, out in zip(caught, outputs, strict=True):
        assert c.keys.shape == c.values.shape == (1, 4, 40, 16)
        mask = causal(40, 40, ids.device)
        o = c.observed
        heads = attend(c.queries, c.slots, scaling=c.scaling, mask=mask, slopes=o.slopes)
        module = model.transformer.blocks[c.layer].attn
        mine = module.out_proj(heads.transpose(1, 2).flatten(2))
        torch.testing.assert_close(mine, out, rtol=1e-4, atol=1e-4)
        without = attend(c.queries, c.slots, scaling=c.scaling, mask=mask)
        assert not torch.allclose(without, heads, atol=1e-3)


def test_mpt_is_measured_with_its_positions(monkeypatch):
    """The curves of an MPT include its ALiBi slopes: without the slopes they differ."""
    model, ids = build("mpt"), ids_of()
    found = measure_curves(model, [ids], "snapkv", follow=64)
    assert found.error.shape[:2] == (2, 4)
    monkeypatch.setattr(Activations, "slots", property(lambda c: Slots(c.keys, c.values)))
    with pytest.raises(InputError, match="positions"):
        measure_curves(model, [ids], "snapkv", follow=64)
    without = property(lambda c: Observed(c.queries, c.scaling))
    monkeypatch.setattr(Activations, "observed", without)
    other = measure_curves(model, [ids], "snapkv", follow=64)
    assert not torch.allclose(other.error, found.error, rtol=1e-2)


def test_mpt_attention_is_read_with_its_slopes():
    model, ids = build("mpt"), ids_of(LEAST_TOKENS)
    rows = inspect_model(model, [ids], methods=("uniform",))["layers"]
    for row, c in zip(rows, capture(model, ids), strict=True):
        entropy = attention(c.queries, c.keys, c.scaling, slopes=c.slopes)["entropy"][0]
        assert row["attention"]["heads"]["entropy"] == pytest.approx(entropy.tolist(), rel=1e-4)
        without = attention(c.queries, c.keys, c.scaling)["entropy"][0]
        assert not torch.allclose(without, entropy, rtol=1e-2)


def test_every_layer_that_is_named_gets_a_picture():
    assert inspect_command.pictured([1, 3, 5, 7, 9], named=True) == [1, 3, 5, 7, 9]
    assert inspect_command.pictured([1, 3, 5, 7, 9], named=False) == [1, 5, 9]
    assert inspect_command.pictured([4], named=False) == [4]


def test_alibi_is_part_of_where_attention_goes():
    """With keys and queries of 0 a slope of log 2 halves the attention with every step back."""
    nothing, n = torch.zeros(1, 2, 100, 4), 100
    slopes = torch.tensor([0.0, math.log(2)])
    found = attention(nothing, nothing, 1.0, slopes=slopes)
    assert float(found["entropy"][0, 0]) == pytest.approx(1.0)
    assert float(found["holding"][0, 1]) == 4  # 1/2 + 1/4 + 1/8 + 1/16 >= 0.9
    bits = 2 * math.log(2) / torch.arange(n - 63, n + 1).double().log()
    assert float(found["entropy"][0, 1]) == pytest.approx(float(bits.mean()), rel=1e-6)


def test_prompts_are_checked(llama):
    with pytest.raises(InputError, match="prompts is empty"):
        inspect_model(llama, [])
    with pytest.raises(InputError, match="a prompt of 255 tokens is too short: at least 256"):
        inspect_model(llama, [ids_of(LEAST_TOKENS - 1)])


def test_the_softcap_is_the_models(llama, monkeypatch):
    """The entropy is that of capped scores where the model has a softcap, as Gemma 2 does."""
    monkeypatch.setattr(llama.config, "attn_logit_softcapping", 1e-4, raising=False)
    row, _ = inspect_model(llama, [ids_of(LEAST_TOKENS)], methods=FEW)["layers"]
    assert row["attention"]["entropy"] == pytest.approx(1.0, abs=1e-4)


# The command.

app = typer.Typer(cls=_Group, pretty_exceptions_enable=False)
app.command("inspect", epilog=inspect_command.EPILOG)(inspect_command.inspect_command)


@app.callback()
def _root() -> None:
    """A callback, without which typer would run the only command without its name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("texts") / "prompt.txt"
    path.write_text(tiny_case(30).prompt, encoding="utf-8")
    return str(path)


def run(*words: str, code: int = 0):
    result = CliRunner().invoke(app, ["inspect", *words])
    assert result.exit_code == code, result.output
    return result


def refused(*words: str) -> str:
    result = run(*words, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_command_writes_what_it_prints(folder, text, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(inspection_measures, "POINTS", 100)
    out = tmp_path / "new" / "inspected"
    result = run(folder, text, "--out", str(out), "--json", "--layers", "1", "--seed", "7")
    shown = json.loads(result.stdout)
    assert json.loads((out / "inspect.json").read_text(encoding="utf-8")) == shown
    assert (shown["command"], shown["source"], shown["seed"]) == ("inspect", "files", 7)
    assert shown["tokens"] == [len(tiny_tokenizer()(Path(text).read_text())["input_ids"])]
    assert [row["layer"] for row in shown["layers"]] == [1]
    assert set(shown["figures"]) == {"norms", "clusterability", "tsne", "entropy", "errors"}
    for name, figure in shown["figures"].items():
        assert "<svg" in (out / figure["svg"]).read_text(encoding="utf-8")
        assert (out / figure["png"]).read_bytes().startswith(b"\x89PNG")
        assert min((out / figure[kind]).stat().st_size for kind in ("svg", "png")) > 5000
        assert shown["readings"][name] in figure["caption"]
        assert len(figure["caption"]) > 60
    assert "relative error, 25% kept" in result.stderr
    before = {file.name: file.read_bytes() for file in out.glob("*.svg")}
    run(folder, text, "--out", str(out), "--layers", "1", "--seed", "7")
    assert {file.name: file.read_bytes() for file in out.glob("*.svg")} == before


def test_command_shows_tables(folder, text):
    shown = run(folder, text, "--limit", str(LEAST_TOKENS)).stdout
    for words in ("norms: mean (largest)", "entropy", "heavy_merge", "has the lowest"):
        assert words in shown
    assert "{" not in shown


@pytest.mark.slow
def test_without_files_the_model_writes_its_own(folder):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    words = (folder, "--json", "--limit", "270", "--layers", "0")
    first = json.loads(run(*words).stdout)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (first["source"], first["tokens"], first["figures"]) == ("sampled", [270, 270], {})
    assert json.loads(run(*words).stdout) == first
    assert json.loads(run(*words, "--seed", "1").stdout)["layers"] != first["layers"]


@pytest.mark.skipif(not (packaged_model() / "config.json").is_file(), reason="no packaged model")
def test_without_anything_the_packaged_model_reads_longeval():
    shown = json.loads(run("--json", "--limit", "300").stdout)
    assert (shown["source"], shown["tokens"]) == ("longeval-100", [300, 300])


def test_refusals_before_the_model_is_loaded(folder, text, tmp_path, monkeypatch):
    def loaded(*_):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("kvsketch.evaluation.runner.loading.load_model", loaded)
    short, latin, empty = (tmp_path / name for name in ("short.txt", "latin.txt", "empty.txt"))
    short.write_text("calm-dark", encoding="utf-8")
    latin.write_bytes(b"caf\xe9")
    empty.write_text(" \n", encoding="utf-8")
    for words, message in (
        ((folder, str(tmp_path / "none.txt")), "none.txt cannot be read: No such file"),
        ((folder, str(tmp_path)), "cannot be read: Is a directory"),
        ((folder, text, str(latin)), "latin.txt is not UTF-8 text"),
        ((folder, str(empty)), "empty.txt is empty"),
        ((folder, text, str(short)), "short.txt: a prompt of 3 tokens is too short"),
        ((folder, text, "--layers", "2"), "layers: 2 must be in 0 .. 1"),
        ((folder, text, "--layers", "0,x"), "--layers '0,x' must be layers with commas"),
        ((folder, text, "--layers", ","), "--layers ',' must be"),
        ((folder, text, "--limit", "255"), "--limit 255 must be at least 256"),
        ((folder, text, "--dtype", "float8"), "--dtype 'float8' must be one of"),
        ((folder, text, "--device", "abacus"), "--device 'abacus' cannot be used here"),
        ((folder, text, "--out", str(short)), f"--out {short} cannot be written: File exists"),
        ((str(tmp_path), text), "has no config.json"),
        ((str(short),), "is not a folder; give one, or a Hugging Face id"),
    ):
        assert message in refused(*words), words
    with pytest.raises(AssertionError, match="weights were loaded"):
        CliRunner().invoke(app, ["inspect", folder, text], catch_exceptions=False)


def test_figures_without_their_libraries(folder, text, tmp_path, monkeypatch):
    def missing(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(inspection_measures.importlib, "import_module", missing)
    line = refused(folder, text, "--out", str(tmp_path / "out"))
    assert "the figures need matplotlib" in line
    assert "kvsketch[report]" in line
    assert not (tmp_path / "out").exists()


def test_models_with_too_few_positions(tmp_path):
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    model.config.max_position_embeddings = 128
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "has 128 positions, at least 256 are needed" in refused(str(tmp_path))


def test_prompts_are_cut_to_the_models_positions(folder, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text(tiny_case(30).prompt * 6, encoding="utf-8")
    shown = json.loads(run(folder, str(long), "--json", "--layers", "0").stdout)
    assert shown["tokens"] == [POSITIONS]


def test_nan_is_an_error():
    """Activations that are not finite are an error."""
    keys = torch.full((1, 1, TOKENS, 4), float("nan"))
    with pytest.raises(InputError, match="not finite"):
        cover(Activations(0, keys, keys, keys, 1.0).keys)


def test_the_page_is_what_its_results_say():
    from benchmarks.inspect_page import DOCS, RESULTS, page

    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert (DOCS / "inspect.md").read_text(encoding="utf-8") == page(result)
    for found in result["results"]:
        for figure in found["figures"].values():
            assert 0 < (DOCS / "figures" / figure["svg"]).stat().st_size < 400_000
