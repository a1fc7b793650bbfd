"""What SECURITY.md promises about files and names from others, and pages that show them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvsketch.errors import InputError
from kvsketch.evaluation.runner.setups import Setup
from kvsketch.evaluation.runner.store import Record, Store
from kvsketch.evaluation.tasks.longbench import LongBench
from kvsketch.evaluation.tasks.ruler import Ruler

ROOT = Path(__file__).resolve().parent.parent
INSPECTED = ROOT / "docs" / "results" / "inspect.json"
HOSTILE = "</script></style><img src=x onerror=alert(1)>{{7*7}}\"'&\x00\x1b../../evil"
#: modules that turn data into objects or code, and calls that do
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "runpy",
    "code",
}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    *("torch.load", "torch.hub", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("numpy.load", "np.load", "os.system", "os.popen", "pandas.read_pickle"),
}


def dangerous(source: str) -> list[str]:
    """The names in a source by which it could run the data that it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [node.module] if node.module.split(".")[0] in MODULES else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in CALLS else []
        elif isinstance(node, ast.Attribute):
            found += [name] if (name := ast.unparse(node)) in ATTRIBUTES else []
        if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code"):
            found += [] if isinstance(node.value, ast.Name) else [f"{node.arg}="]
    return found


def test_nothing_is_unpickled_or_run() -> None:
    """Our own source uses nothing that runs data, nor `weights_only=False` or `allow_pickle`."""
    for text in ("import pickle", "from dill import loads", "x = eval(y)", "torch.load(f)"):
        assert dangerous(text)
    assert dangerous("f(shell=True)")
    for path in sorted((ROOT / "src").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert dangerous(source) == [], path
        assert "weights_only=False" not in source
        assert "allow_pickle" not in source


def answered(name: str, setup: Setup, score: float, label: str | None = None) -> Record:
    """A record in which every text is `name`, which comes from others."""
    identity = {
        **dict.fromkeys(("model", "model_fingerprint", "kvsketch", "device", "dtype"), name),
        **dict.fromkeys(("preset", "prefill", "anything"), name),
        "task": name,
        "case": name,
        "question": name,
        "max_new_tokens": 4,
        "sink": 4,
        "recent": 32,
        "one_shot": False,
        **setup.identity(),
    }
    result = {
        "score": score,
        "group": {name: name},
        "label": label or setup.label,
        "kept": setup.kept,
        "answers": [name],
        "text": name,
        "slots": 5.0,
        **dict.fromkeys(("kv_bytes", "exact_kv_bytes", "peak_kv_bytes"), 1000.0),
        **dict.fromkeys(("final_kv_bytes", "final_exact_kv_bytes"), 1000.0),
        "prompt_tokens": 10,
        "decode_tokens": 2,
        "prefill_seconds": 1.0,
        "decode_seconds": 1.0,
    }
    return Record(identity, result)


def store_of(path: Path, name: str) -> Path:
    h2o = Setup("h2o", 0.5)
    with Store(path) as store:
        store.add(answered(name, Setup("exact"), 1.0))
        store.add(answered(name, h2o, 0.5))
        store.add(answered(name, replace(h2o, seed=1), 0.25, label=name))
    return path


class Page(HTMLParser):
    """The tags of a page with their attributes, and all of its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_hostile_text_as_text(tmp_path: Path) -> None:
    """A page of a store and an inspection in which every text is hostile shows it as mere text."""
    pytest.importorskip("matplotlib")
    from kvsketch.evaluation.report.html import build

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: spoiled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [spoiled(v) for v in value]
        return HOSTILE if isinstance(value, str) else value

    looked = json.loads(INSPECTED.read_text(encoding="utf-8"))
    looked = looked["results"][0] if "results" in looked else looked
    result = {**spoiled(looked), "tsne": []}
    inspection = tmp_path / "inspect.json"
    inspection.write_text(json.dumps(result), encoding="utf-8")
    store = store_of(tmp_path / "<img src=x onerror=alert(1)>.jsonl", HOSTILE)
    html = build([store], inspection).html
    page = Page()
    page.feed(html)
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == names.count("body") == 1
    assert names.count("style") == 1 + names.count("svg")  # each drawing has an empty one
    assert "img" not in names
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href"):  # nothing comes from elsewhere
            assert (attributes.get(name) or "#").startswith(("#", "data:image/")), attributes
    assert "{{7*7}}" in page.text  # shown, and not taken for a template
    assert "onerror=alert(1)" in page.text
    assert not set("\x00\x1b") & set(html)
    (policy,) = (a["content"] or "" for t, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    assert re.search(r"script-src 'sha256-[^']+';", policy)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..\\evil", "a\x00b", "con.svg", ""])
def test_no_name_becomes_a_path(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    from kvsketch.evaluation.report.html import build, save

    given = tmp_path / "given"
    given.mkdir()
    page = build([store_of(tmp_path / "run.jsonl", name)])
    files = save(page, given / "report.html", given)
    assert files
    assert {path.name for path in given.iterdir()} == {"report.html", *files}
    assert all(re.fullmatch(r"[a-z0-9-]+\.(svg|png)", file) for file in files)
    assert {path.name for path in tmp_path.iterdir()} == {"given", "run.jsonl"}


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "qasper/../../evil", "qasper.jsonl"])
def test_data_sets_are_names_and_no_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is unknown"):
        LongBench([name], tmp_path)
    with pytest.raises(InputError, match="is unknown"):
        Ruler([name], [1000])


def test_every_promise_names_a_test_that_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) >= 6
    for path, test in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, (path, test)
