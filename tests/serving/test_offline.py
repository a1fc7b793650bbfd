"""Documents that are compressed for an engine: which tokens they hold, of which model, and that
nothing of them is squeezed."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer
from typer.testing import CliRunner

import tiny_models
from kvsketch import InputError, SketchCache, UnsupportedError
from kvsketch.cli.app import app
from kvsketch.files.format import read
from kvsketch.files.tokens import mark_of, told
from kvsketch.hf.checkpoint import Checkpoint
from kvsketch.vllm.conversion import converted
from kvsketch.vllm.offline import engine_of
from kvsketch.vllm.saved import saved_of
from kvsketch.vllm.settings import PageSettings
from kvsketch.vllm.shelf import header_of
from tiny_model import save_tiny_model, tiny_case, tiny_model, tiny_tokenizer

CONTEXT = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "doc.txt"
    path.write_text(tiny_case(30).prompt)
    return path


def kvsketch(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_a_file_says_which_tokens_it_holds(model, text, tmp_path):
    path, more = tmp_path / "doc.kvs", tmp_path / "more.kvs"
    text.write_text(tiny_case(20).prompt)
    kvsketch("compress", text, "-o", path, "--model", model)
    ids = tiny_tokenizer()(text.read_text())["input_ids"]
    assert mark_of(header_of(path)) == (len(ids), told(ids)["sha256"])
    kvsketch("append", path, text, "-o", more)
    with pytest.raises(InputError, match="does not say which tokens it holds"):
        mark_of(header_of(more))
    kvsketch("merge", path, path, "-o", more)
    with pytest.raises(InputError, match="does not say which tokens it holds"):
        mark_of(header_of(more))
    mark_of(header_of(path))


class Metrics(http.server.BaseHTTPRequestHandler):
    """Shows what a server shows of its engine."""

    text = ""

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server():
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def test_a_server_says_what_its_pages_are(tmp_path, server, monkeypatch):
    given = PageSettings("snapkv", 0.25, 2, 16, bits=8, documents=str(tmp_path), squeeze=False)
    shown = given.shown()
    assert shown == {"method": "snapkv", "budget": 0.25, "sink": 2, "recent": 16, "bits": 8}
    # as Prometheus escapes a label
    label = json.dumps({**shown, "max_model_len": 4096}).replace("\\", r"\\").replace('"', r"\"")
    other = 'other_info{settings="{}"} 1.0\n'
    text = f'{other}kvsketch:engine_info{{settings="{label}"}} 1.0\n{other}'
    monkeypatch.setattr(Metrics, "text", text)
    settings, context = engine_of(server)
    assert context == 4096
    assert settings == PageSettings("snapkv", 0.25, 2, 16, bits=8)
    monkeypatch.setattr(Metrics, "text", other)
    with pytest.raises(InputError, match="shows no settings of kvsketch on /metrics"):
        engine_of(server)
    with pytest.raises(InputError, match="/metrics gives no answer"):
        engine_of("http://127.0.0.1:9")


def test_settings_in_a_folder_of_strange_names_are_shown(tmp_path, server, monkeypatch):
    folder = tmp_path / 'a "b" \\ c'
    folder.mkdir()
    monkeypatch.chdir(folder)
    from kvsketch.cache import Curves

    ones = torch.ones(1, 2, 2, dtype=torch.float64)
    Curves(ones, torch.tensor([0.5, 1.0], dtype=torch.float64), model=None).save("c.json")
    given = PageSettings(budget=128, allocation="c.json")
    label = json.dumps({**given.shown(), "max_model_len": 900})
    label = label.replace("\\", r"\\").replace('"', r"\"")
    monkeypatch.setattr(Metrics, "text", f'kvsketch:engine_info{{settings="{label}"}} 1.0\n')
    assert engine_of(server)[0].allocation == str(folder / "c.json")


def fits(path: Path, given: str, layers: int = 2, heads: int = 2) -> dict[str, Any]:
    """Convert a document for the engine of these settings."""
    settings, context = engine_of(given)
    _, state = read(path, "cache")
    saved = saved_of(state, layers)
    sizes = [None] * layers
    if settings.allocation is not None:
        sizes = settings.sizes(context, layers, heads, "llama")
    shape = context, heads, 2, 8, torch.float32
    layouts = {number: settings.layout(*shape, sizes[number]) for number in range(layers)}
    found = converted(saved, layouts, slice(0, heads), settings, context)
    rhythm = settings.rhythm(context)
    first = rhythm.slots - rhythm.every
    room = [[first + m for m in (layouts[n].middle or [0] * heads)] for n in range(layers)]
    return {"found": found, "held": [page.held[0].tolist() for page in saved.pages], "room": room}


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("method", ["heavy_merge", "snapkv", "streaming_llm"])
def test_a_document_for_an_engine_fills_its_pages(model, text, tmp_path, bits, method):
    given = json.dumps({"method": method, "budget": 100, "bits": bits, "max_model_len": CONTEXT})
    (tmp_path / "settings.json").write_text(given)
    folder = tmp_path / "documents"  # it is made
    kvsketch("compress", text, "--model", model, "-o", folder, "--for-vllm",
             tmp_path / "settings.json")  # fmt: skip
    found = fits(folder / "doc.kvs", given)
    assert found["found"].squeezed == ""
    assert found["held"] == found["room"]


@pytest.mark.parametrize("bits", [16, 4])
def test_a_document_for_an_engine_with_curves(tmp_path, text, model, bits):
    levels = torch.tensor([1 / 16, 1 / 4, 1.0], dtype=torch.float64)
    need = torch.tensor([[1.0, 2.0], [1.0, 9.0]], dtype=torch.float64)
    error = need.unsqueeze(-1) * torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    from kvsketch.cache import Curves

    Curves(error, levels, model=None).save(tmp_path / "curves.json")
    given = {"budget": 120, "bits": bits, "max_model_len": CONTEXT}
    given = json.dumps({**given, "allocation": str(tmp_path / "curves.json")})
    kvsketch("compress", text, "--model", model, "-o", tmp_path, "--for-vllm", given)
    found = fits(tmp_path / "doc.kvs", given)
    assert found["found"].squeezed == ""
    assert found["held"] == found["room"]
    assert len({size for layer in found["room"] for size in layer}) > 1
    # the budgets are part of the file
    cache = SketchCache.load(tmp_path / "doc.kvs", loaded(model))
    assert [layer.stream.held[0].tolist() for layer in cache.layers] == found["room"]
    budgets = [layer.stream.pace.budget.slots(700)[0].tolist() for layer in cache.layers]
    assert budgets == found["room"]


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("given", [{"budget": 800}, {"method": "exact"}])
def test_a_short_document_is_kept_whole(model, text, tmp_path, given):
    given = json.dumps({**given, "max_model_len": CONTEXT})
    kvsketch("compress", text, "--model", model, "-o", tmp_path, "--for-vllm", given)
    found = fits(tmp_path / "doc.kvs", given)
    tokens = mark_of(header_of(tmp_path / "doc.kvs"))[0]
    assert found["found"].last == 0
    assert found["held"] == [[tokens] * 2] * 2


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        ("{", [], "is no JSON"),
        ("none.json", [], "no file of it"),
        ('{"budget": 100}', [], "JSON object with max_model_len"),
        ('{"budget": 100, "max_model_len": 1}', [], "max_model_len=1 must be"),
        ('{"bugdet": 100, "max_model_len": 900}', [], "did you mean 'budget'"),
        ('{"budget": 20, "max_model_len": 900}', [], "at least"),
        ('{"budget": 100, "max_model_len": 300}', [], "leaves none to a question"),
        ('{"budget": 100, "max_model_len": 900}', ["--bits", "8"], "leave --budget"),
    ],
)
def test_what_is_wrong_is_said(model, text, tmp_path, given, more, said):
    words = ["compress", text, "--model", model, "-o", tmp_path, "--for-vllm", given, *more]
    assert said in kvsketch(*words, code=2)
    assert not (tmp_path / "doc.kvs").exists()


def test_only_files_of_the_same_weights_fit_a_checkpoint(model, text, tmp_path):
    path = tmp_path / "doc.kvs"
    kvsketch("compress", text, "-o", path, "--model", model)
    config, header = loaded(model).config, header_of(path)["model"]
    Checkpoint(str(model), config).check(header)
    other = tmp_path / "other"
    tiny_model(config.vocab_size, seed=1).save_pretrained(other)
    with pytest.raises(InputError, match="other weights"):
        Checkpoint(str(other), config).check(header)
    tiny_model(config.vocab_size).save_pretrained(tmp_path / "shards", max_shard_size="10kB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    Checkpoint(str(tmp_path / "shards"), config).check(header)
    with pytest.raises(InputError, match="of another model"):
        Checkpoint(str(model), config).check({**header, "config": "0"})
    with pytest.raises(InputError, match="does not say with which weights"):
        Checkpoint(str(model), loaded(model).config).check({**header, "layers": None})
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        Checkpoint(str(tmp_path / "nothing"), loaded(model).config).check(header)


def test_what_is_no_row_of_slots_is_refused(model, tmp_path):
    tokenizer, path = tiny_tokenizer(), tmp_path / "doc.kvs"
    net = loaded(model)
    for method, rows, said in (("snapkv", 2, "2 rows"), ("subgen", 1, "a streaming sketch")):
        cache = SketchCache(net.config, method, budget=40)
        with torch.no_grad():
            net(torch.full((rows, 90), 7), past_key_values=cache)
        cache.save(path, tokenizer=tokenizer)
        with pytest.raises(UnsupportedError, match=said):
            saved_of(read(path, "cache")[1], 2)


def test_the_tokens_of_sliding_windows_are_in_the_file(tmp_path):
    net, path = tiny_models.build("gemma3_text"), tmp_path / "doc.kvs"
    layers = net.config.num_hidden_layers
    cache = SketchCache(net.config, "snapkv", budget=40, bits=16)
    with torch.no_grad():
        net(torch.randint(3, 90, (1, 90)), past_key_values=cache)
    cache.save(path)
    saved = saved_of(read(path, "cache")[1], layers)
    windows = {
        number: layer
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    assert windows
    assert saved.windows.keys() == windows.keys()
    assert len(saved.pages) == layers - len(windows)
    for number, layer in windows.items():
        assert torch.equal(saved.windows[number].keys, layer.keys)
        assert torch.equal(saved.windows[number].values, layer.values)
    _, state = read(path, "cache")
    state.values["layers"][str(min(windows))]["seen"] -= 1
    with pytest.raises(InputError, match="different numbers of tokens"):
        saved_of(state, layers)
