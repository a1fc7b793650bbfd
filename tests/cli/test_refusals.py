"""Usage errors are one line that names the argument and what is allowed, with exit code 2. They
come quickly: without importing torch or transformers, and with one request to a Hub that is
unreachable."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvsketch import SketchCache
from kvsketch.arguments import check_arguments
from kvsketch.errors import InputError
from kvsketch.evaluation.runner.devices import DEVICE_KINDS
from kvsketch.evaluation.runner.files import try_folder
from kvsketch.evaluation.runner.store import Store
from kvsketch.method_names import METHOD_NAMES, NEED_REREAD
from kvsketch.methods.registry import ALL_METHODS, REREADING
from kvsketch.writing import save_bytes
from tiny_model import save_tiny_model, tiny_case

#: an address at which no server listens
CLOSED = "http://127.0.0.1:9"
#: runs commands one by one; prints exit code, output and heavy modules imported so far
RUNNER = """
import contextlib, io, json, sys
from {module} import main
for words in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["kvsketch", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    heavy = sorted({{"torch", "transformers"}} & set(sys.modules))
    print(json.dumps([code, out.getvalue(), err.getvalue(), heavy]))
"""
CALIBRATE = ("calibrate", "text.txt", "--out", "c.json")
#: a command, and what its error contains: the argument, and what is allowed
REFUSED = [
    # options that typer checks
    ("--nope", "--nope", "kvsketch --help"),
    ("evil", "command='evil'", "Allowed: append, ask, calibrate"),
    ("compress none.txt -o d.kvs", "FILE none.txt", "is not a file"),
    ("compress text.txt -o text.txt/d.kvs", "--out text.txt/d.kvs", "cannot be written"),
    ("compress text.txt -o d.kvs --method snapvk", "'snapvk'", "snapkv"),
    ("compress text.txt -o d.kvs --budget 2.0", "2.0", "(0, 1]"),
    ("compress text.txt -o d.kvs --budget 9 --tolerance 0.1", "--budget 9", "exclude each other"),
    ("compress text.txt -o d.kvs --method kvzip", "--method kvzip", "--queries reread"),
    ("compress text.txt -o d.kvs --bits 5", "bits=5", "16"),
    ("info text.txt", "text.txt", "is not a kvsketch file"),
    ("ask none.kvs what", "none.kvs", "is not a file"),
    ("ask none.kvs", "QUESTION...", "--questions"),
    ("ask none.kvs what --text text.txt", "--text text.txt", "no effect without --server"),
    ("ask none.kvs what --server http://localhost:1", "--text is missing", "none.kvs"),
    ("ask none.kvs what --server localhost:1 --text text.txt", "--server localhost:1", "http://"),
    (
        "ask none.kvs what --server http://localhost:1 --text text.txt --model x",
        "--model and --device",
        "--server",
    ),
    ("ask none.kvs what --server http://localhost:1 --text text.txt", "none.kvs", "not a file"),
    ("append none.kvs text.txt", "none.kvs", "is not a file"),
    ("merge none.kvs none.kvs -o d.kvs", "none.kvs", "is not a file"),
    ("chat --context none.kvs", "none.kvs", "is not a file"),
    ("chat --max-new-tokens 0", "--max-new-tokens=0", ">= 1"),
    ("eval", "'TASK...'", "kvsketch eval --help"),
    ("eval longeval --recents 3", "--recents", "Possible options: --lengths, --recent"),
    ("eval longeval --recent", "'--recent' requires", "kvsketch eval --help"),
    ("eval longeval --recent many", "'--recent'", "integer"),
    ("eval longeval --gpus many", "'--gpus'", "valid"),
    ("calibrate", "'FILE...'", "kvsketch calibrate --help"),
    ("calibrate text.txt", "'--out'", "kvsketch calibrate --help"),
    ("report", "'STORE...'", "kvsketch report --help"),
    ("demo --seed x", "'--seed'", "integer"),
    ("demo more", "more", "kvsketch demo --help"),
    ("inspect --limit x", "'--limit'", "integer"),
    ("methods --nope", "--nope", "kvsketch methods --help"),
    # kvsketch eval
    ("eval lngeval", "task='lngeval'", "did you mean 'longeval'? Allowed: attention_error, kl,"),
    ("eval longeval --methods kcentre", "method='kcentre'", "did you mean 'kcenter'? Allowed:"),
    (
        "eval longeval --methods kcenter@x",
        "allocation 'x'",
        "even, measured, layer, global, variance, or a file",
    ),
    (
        "eval longeval --methods h2o@measured+int5",
        "'int5'",
        "Allowed: 16bit, int4, int8,",
    ),
    ("eval longeval --methods exact+int4", "'exact+int4'", "no bits"),
    ("eval longeval --methods ,", "--methods", "allowed: exact, uniform"),
    (
        "eval longeval --allocation x",
        "allocation 'x'",
        "even, measured, layer, global, variance, or a file",
    ),
    ("eval longeval --queries twice", "--queries", "prompt, reread"),
    ("eval longeval --queries reread", "--queries reread", "--question unseen"),
    ("eval longeval --methods kvzip", "--methods kvzip", "--queries reread"),
    ("eval longeval --budgets lots", "budget='lots'", "a share in (0, 1] such as 0.25"),
    ("eval longeval --budgets 0", "budget=0", "an int >= 1"),
    ("eval longeval --budgets 1.5", "budget=1.5", "must be <= 1"),
    ("eval longeval --budgets ,", "--budgets", "shares such as 0.25"),
    ("eval longeval --budgets 8", "budget=8", "smaller than sink=4 + recent=32"),
    ("eval longeval --tolerances 3", "tolerance=3.0", "(0, 1)"),
    ("eval longeval --tolerances x", "--tolerances 'x'", "numbers, separated by commas"),
    ("eval longeval --tolerances 0.1 --prefill streaming", "tolerance=0.1", "must be 'exact'"),
    ("eval longeval --seeds x", "--seeds 'x'", "ints, separated by commas"),
    ("eval longeval --question later", "--question 'later'", "seen, unseen"),
    ("eval longeval --prefill later", "--prefill 'later'", "exact, streaming"),
    ("eval longeval --dtype float8", "--dtype 'float8'", "float32, bfloat16, float16"),
    ("eval longeval --device warp", "--device 'warp'", "cpu, cuda"),
    ("eval longeval --device cuda:x", "--device 'cuda:x'", "such as cuda:1"),
    ("eval longeval --question unseen --batch-size 2", "--question unseen", "one case at a time"),
    ("eval longeval --sink -1", "--sink -1", "at least 0"),
    ("eval longeval --limit 0", "--limit 0", "at least 1"),
    ("eval longeval --subtasks foo", "--subtasks has no effect on longeval", "use it: ruler"),
    ("eval longeval --lengths 1000,1800", "--lengths has no effect", "use it: needle, ruler, kl,"),
    ("eval longeval --config depths.yaml", "--depths has no effect", "use it: needle"),
    (
        "eval longbench ruler --num-cases 2 --lines 9",
        "--lines has no effect on longbench, ruler",
        "use it: longeval, sessions, kl, perplexity, attention_error",
    ),
    (
        "eval longeval --budgets 0.5 --tolerances 0.1",
        "--budgets 0.5 and --tolerances 0.1",
        "exclude each other",
    ),
    ("eval longeval --lines many", "--lines 'many'", "int >= 1"),
    ("eval longeval --cases no.jsonl", "--cases no.jsonl", "No such file"),
    ("eval longeval --cases text.txt", "--cases text.txt:1", "JSON"),
    ("eval longeval text.txt", "text.txt is not a task", "follow --cases"),
    ("eval longeval --model ./none", "--model './none'", "a Hugging Face id"),
    ("eval longeval --model .", "--model .", "config.json"),
    ("eval longeval --model a..b", "--model 'a..b'", "not a local folder"),
    ("eval longeval --model some/name", "--model 'some/name'", f"{CLOSED} cannot be reached: "),
    ("eval longeval --out text.txt", "text.txt:1", "give another file"),
    ("eval longeval --out /proc/none/run.jsonl", "--out /proc/none/run.jsonl", "cannot be written"),
    ("eval longeval --ray local --workers 0", "--workers 0", "at least 1"),
    ("eval longeval --workers 4", "--workers 4 is for Ray", "--ray local"),
    ("eval longeval --gpus 0.5", "--gpus 0.5 is for Ray", "--ray local"),
    ("eval longbench --data none", "data='none'", "is not a folder"),
    ("eval longbench --datasets none", "datasets='none'", "Allowed: 2wikimqa"),
    ("eval longbench", "data=None", f"{CLOSED} cannot be reached: "),
    ("eval needle --form none", "form='none'", "Allowed: line, number, sandwich."),
    ("eval needle --data none", "haystack none", "give one that holds .txt files"),
    ("eval needle --depths 2", "depth=2", "[0, 1]"),
    ("eval ruler --subtasks none", "subtask='none'", "Allowed: cwe, fwe"),
    ("eval kl --data none", "--data none", "allowed: a .txt or .jsonl file"),
    ("eval kl --lengths 0", "--lengths '0'", "int >= 1"),
    # the configuration file of kvsketch eval
    ("eval longeval --config none.yaml", "--config none.yaml", "No such file"),
    ("eval longeval --config no.yaml", "--config no.yaml", "is not YAML"),
    ("eval longeval --config list.yaml", "--config list.yaml", "a mapping of options to values"),
    ("eval longeval --config unknown.yaml", "option='method'", "did you mean 'methods'"),
    ("eval longeval --config type.yaml", "'--recent'", "integer"),
    ("eval longeval --config value.yaml", "budget=2.5", "must be <= 1"),
    # other commands
    ((*CALIBRATE, "--method", "snapv"), "method='snapv'", "did you mean 'snapkv'"),
    ((*CALIBRATE, "--follow", "0"), "--follow 0", "at least 1"),
    ((*CALIBRATE, "--dtype", "x"), "--dtype 'x'", "float32, bfloat16, float16"),
    ((*CALIBRATE, "--device", "x"), "--device 'x'", "cpu, cuda"),
    ((*CALIBRATE, "--model", "some/name"), "--model 'some/name'", "cannot be reached"),
    ("calibrate none.txt --out c.json", "none.txt", "No such file"),
    ("calibrate text.txt --out text.txt/c.json", "--out text.txt/c.json", "cannot be written"),
    ("inspect ./none", "--model './none'", "a Hugging Face id"),
    ("inspect packaged none.txt", "none.txt", "No such file"),
    ("inspect --limit 0", "--limit 0", "at least 256"),
    ("inspect --retrieval --layers 0", "--layers has no effect", "with --retrieval"),
    ("inspect --retrieval packaged none.txt", "FILE has no effect", "with --retrieval"),
    ("inspect --lines 3", "--lines has no effect", "without --retrieval"),
    ("inspect --retrieval --task vt --lines 3", "--lines has no effect", "--task vt"),
    ("inspect --retrieval --length 3", "--length has no effect", "--task longeval"),
    ("inspect --retrieval --task cw", "task='cw'", "cwe"),
    ("inspect --retrieval --cases 0", "--cases 0", "at least 1"),
    ("inspect --layers x", "--layers 'x'", "e.g. 0,3"),
    ("inspect --dtype x", "--dtype 'x'", "float32, bfloat16, float16"),
    ("inspect --device x", "--device 'x'", "cpu, cuda"),
    ("inspect --out text.txt", "--out text.txt", "cannot be written"),
    ("report none.jsonl", "none.jsonl", "No such file"),
    ("report text.txt", "text.txt:1", "not a line of a results store"),
    ("report text.txt --out text.txt/page.html", "--out text.txt/page.html", "cannot be written"),
    ("report text.txt --out none/page.html", "text.txt:1", "not a line of a results store"),
    ("methods heavy_marge", "method='heavy_marge'", "did you mean 'heavy_merge'? Allowed:"),
]
if find_spec("accelerate") is None:
    REFUSED.append(("eval longeval --device auto", "--device auto", "pip install accelerate"))


def words_of(command: str | tuple[str, ...]) -> list[str]:
    return command.split() if isinstance(command, str) else list(command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run commands in, with files of wrong content."""
    found = tmp_path_factory.mktemp("refusals")
    for name, text in {
        "text.txt": "no store, and no case\n",
        "no.yaml": "[1",
        "list.yaml": "- 1",
        "unknown.yaml": "method: h2o",
        "type.yaml": "recent: many",
        "value.yaml": "budgets: [2.5]",
        "depths.yaml": "depths: [0.5]",
    }.items():
        (found / name).write_text(text, encoding="utf-8")
    return found


def environment(home: Path, **changes: str) -> dict[str, str]:
    """The environment of commands: an unreachable Hub, and an empty cache of its files."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    kept = {k: v for k, v in kept.items() if not k.lower().endswith("_proxy")}
    return {**kept, "HF_ENDPOINT": CLOSED, "HF_HOME": str(home / "hf"), **changes}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    code = "import sys; sys.argv[1:] = ['methods']; from kvsketch.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = ['--version']; from kvsketch.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('\\xe4\\u6587.kvs')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(tmp_path, PYTHONIOENCODING="ascii"),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "\\xe4\\u6587.kvs"


def outcomes(module: str, commands: list[list[str]], folder: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", RUNNER.format(module=module)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(folder),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def refusals(folder: Path) -> list[Any]:
    """The outcomes of all commands, run in one process: where one imports torch, it shows in its
    own outcome and in all later ones."""
    return outcomes("kvsketch.cli", [words_of(command) for command, _, _ in REFUSED], folder)


@pytest.mark.parametrize(
    ("number", "named", "allowed"),
    [(number, named, allowed) for number, (_, named, allowed) in enumerate(REFUSED)],
    ids=[" ".join(words_of(command)) for command, _, _ in REFUSED],
)
def test_a_usage_error_is_one_line_and_needs_no_torch(
    refusals: list[Any], number: int, named: str, allowed: str
) -> None:
    code, out, err, heavy = refusals[number]
    assert heavy == [], f"{heavy} imported for: {err}"
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert allowed in line
    assert (code, out) == (2, "")


def test_nothing_is_left_behind(refusals: list[Any], folder: Path) -> None:
    """Refused commands leave neither stores nor folders."""
    assert {file.name for file in folder.iterdir()} <= {
        *("text.txt", "no.yaml", "list.yaml", "unknown.yaml", "type.yaml", "value.yaml", "hf"),
        "depths.yaml",
    }
    with pytest.raises(InputError):
        try_folder(folder / "text.txt" / "new", "--out")
    try_folder(folder / "a" / "b", "--out")
    assert not (folder / "a").exists()


def test_help_needs_no_torch(folder: Path) -> None:
    commands = [[], ["eval"], ["inspect"], ["report"], ["calibrate"], ["demo"], ["methods"]]
    found = outcomes("kvsketch.cli", [[*words, "--help"] for words in commands], folder)
    for code, out, err, heavy in found:
        assert (code, err, heavy) == (0, "", [])
        assert "Usage: kvsketch" in out


@pytest.mark.parametrize("command", ["--help", "eval longeval --methods kcentre"])
def test_a_second_is_enough(command: str, folder: Path) -> None:
    """A command is refused within a second. The fastest of three runs counts, since other tests run
    at the same time."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "kvsketch", *command.split()],
            capture_output=True,
            cwd=folder,
            env=environment(folder),
        )
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1


# --- the second command --------------------------------------------------------------------------


def harness(folder: Path, *words: str) -> Any:
    (found,) = outcomes("kvsketch.evaluation.runner.harness", [list(words)], folder)
    return found


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_extra_is_named(folder: Path) -> None:
    code, _, _, heavy = harness(folder, "--help")
    assert "pip install 'kvsketch[lm-eval]'" in code  # the message with which Python exits
    assert heavy == []


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("method=snapvk", "did you mean 'snapkv'"),
        ("budget=1.5", "budget=1.5"),
        ("budget=8", "budget=8 is smaller than sink"),
        ("tolerance=2", "tolerance=2 must be"),
        ("budget=0.3,tolerance=0.1", "exclude each other"),
        ("sink=many", "sink='many' must be an int >= 0"),
        ("one_shot=maybe", "one_shot='maybe'"),
        ("bits=3", "bits=3 must be"),
        ("prefill=chunked", "prefill='chunked'"),
        ("allocation=fair", "allocation='fair'"),
        ("method=exact,budget=0.3", "has no effect with method='exact'"),
        (
            "budget=0.3",
            f"pretrained 'some/name' is not a local folder .*{CLOSED} cannot be reached",
        ),
    ],
)
def test_the_harness_command_refuses_without_torch(
    arguments: str, message: str, folder: Path
) -> None:
    given = f"pretrained=some/name,{arguments}"
    code, _, _, heavy = harness(
        folder, "--model", "kvsketch", "--tasks", "gsm8k", "--model_args", given
    )
    assert re.search(f"^error: .*{message}", code)
    assert heavy == []


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
def test_the_harness_knows_its_own_models_beside_ours(folder: Path) -> None:
    code = (
        "import sys, kvsketch.evaluation.runner.harness\n"
        "from lm_eval.api.registry import get_model, model_registry\n"
        "print('torch' in sys.modules, 'hf' in model_registry)\n"
        "print(get_model('kvsketch') is kvsketch.evaluation.runner.harness.SketchLM)\n"
    )
    done = run(code, folder)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


# --- the Hub -------------------------------------------------------------------------------------


class _Hub(http.server.BaseHTTPRequestHandler):
    """A Hub that answers every request with an error."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(code: str, folder: Path, **changes: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(folder, **changes),
        timeout=60,
    )


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (
            ["longeval", "--model", "some/name"],
            "--model 'some/name' is not a local folder and could",
        ),
        (["longbench"], "data=None: data.zip of zai-org/LongBench could not be fetched"),
        (["kl", "--data", "hub:some/name"], "--data hub:some/name could not be read"),
    ],
)
def test_without_a_hub_the_refusal_takes_less_than_five_seconds(
    task: list[str], named: str, tmp_path: Path
) -> None:
    if task[0] == "kl":
        pytest.importorskip("datasets")
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kvsketch", "eval", *task],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert time.perf_counter() - start < 5
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {named}")
    assert f"{CLOSED} cannot be reached: " in line
    assert "not in the local cache" in line
    assert (done.returncode, done.stdout) == (2, "")


ASK = "from kvsketch.evaluation.runner.hub import unreachable; print(unreachable())"


def test_a_hub_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        start = time.perf_counter()
        done = run(ASK, tmp_path, HF_ENDPOINT=address, HF_HUB_ETAG_TIMEOUT="1")
    assert time.perf_counter() - start < 4
    assert done.stdout.startswith(f"{address} cannot be reached: ")


def test_a_proxy_that_is_not_there_is_named(tmp_path: Path, hub: str) -> None:
    found = run(ASK, tmp_path, HF_ENDPOINT="http://hub.invalid", http_proxy=CLOSED)
    assert "cannot be reached" in found.stdout
    behind = run(ASK, tmp_path, HF_ENDPOINT="http://hub.invalid", http_proxy=hub)
    assert behind.stdout == "None\n"


def test_a_hub_that_answers_is_asked(tmp_path: Path, hub: str) -> None:
    code = (
        "from kvsketch.evaluation.runner.loading import resolve_model\n"
        "from huggingface_hub import constants\n"
        "print(resolve_model('some/name'), constants.HF_HUB_OFFLINE)\n"
    )
    assert run(code, tmp_path, HF_ENDPOINT=hub).stdout == "some/name False\n"
    offline = run(code, tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, and it is not in the local cache" in offline.stderr


def cached(home: Path) -> None:
    """Save a model as the Hub's client stores it in ``environment``'s HF_HOME."""
    kept = home / "hf" / "hub" / "models--some--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    (kept / "snapshots").mkdir()
    save_tiny_model(kept / "snapshots" / ("0" * 40))


def test_a_model_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    cached(tmp_path)
    code = (
        "from kvsketch.evaluation.runner import loading\n"
        "name = loading.resolve_model('some/name')\n"
        "loading.load_tokenizer(name)\n"
        "print(type(loading.load_model(name, 'cpu', 'float32')).__name__)\n"
    )
    done = run(code, tmp_path)
    assert "LlamaForCausalLM" in done.stdout, done.stderr
    assert "Retrying" not in done.stderr


@pytest.mark.slow
def test_eval_answers_with_a_model_in_the_cache(tmp_path: Path) -> None:
    cached(tmp_path)
    case = tiny_case(20)
    record = {"prompt": case.prompt, "expected_number": case.expected, "num_lines": 20}
    (tmp_path / "cases.jsonl").write_text(json.dumps(record), encoding="utf-8")
    words = ["eval", "longeval", "--model", "some/name", "--cases", "cases.jsonl"]
    words += ["--recent", "8", "--max-new-tokens", "2", "--methods", "exact", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvsketch", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert json.loads(done.stdout)["results"][0]["cases"] == 1, done.stderr


# --- checks without torch agree with torch and with the classes ----------------------------------


def test_the_names_of_the_methods_are_those_of_the_classes() -> None:
    assert list(ALL_METHODS) == list(METHOD_NAMES)
    assert set(REREADING) == set(NEED_REREAD)


def test_torchs_kinds_of_devices_are_known() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.device("warp")
    (names,) = re.findall(r"Expected one of (.*) device type", str(error.value))
    assert set(names.split(", ")) <= set(DEVICE_KINDS)


def small_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "snapvk"},
        {"budget": 1.5},
        {"budget": 0},
        {"budget": "a quarter"},
        {"budget": True},
        {"budget": 8},
        {"budget": 8, "sink": 0, "recent": 9},
        {"tolerance": 2.0},
        {"tolerance": True},
        {"tolerance": 0.1, "prefill": "streaming"},
        {"tolerance": 0.1, "budget": 8},
        {"tolerance": 0.1, "budget": 1.5},
        {"prefill": 0},
        {"allocation": "fair"},
        {"allocation": Path("no such file")},
        {"bits": 3},
        {"bits": True},
        {"prefill": "chunked"},
    ],
    ids=str,
)
def test_the_cache_refuses_the_same_in_the_same_words(arguments: dict[str, Any]) -> None:
    given = {"method": "snapkv", **arguments}
    with pytest.raises(InputError) as ours:
        check_arguments(**given)
    with pytest.raises(InputError) as theirs:
        SketchCache(small_config(), **given)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"budget": 36, "bits": 8},
        {"tolerance": 0.1, "budget": 0.5, "allocation": "even"},
        {"budget": 8, "sink": 0, "recent": 8, "prefill": "streaming"},
    ],
    ids=str,
)
def test_what_the_cache_takes_is_not_refused(arguments: dict[str, Any]) -> None:
    given = {"method": "snapkv", **arguments}
    check_arguments(**given)
    SketchCache(small_config(), **given)


def test_a_store_is_discarded_only_where_it_was_made_and_is_empty(tmp_path: Path) -> None:
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    old.touch()
    for path in (new, old):
        Store(path).discard()
        Store(path, write=True).close()  # possible, since no lock was left
    Store(new).discard()
    assert new.exists()  # this Store did not create it
    assert old.exists()


@pytest.mark.parametrize(
    "damage",
    ["cut", "layers", *(pytest.param(x, marks=pytest.mark.slow) for x in ("empty", "vocabulary"))],
)
def test_a_damaged_model_is_named(tmp_path: Path, damage: str) -> None:
    """A download that stopped, or a configuration of another model: one line, and no file made with
    random weights."""
    folder = save_tiny_model(tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    said = json.loads(config.read_text())
    reason = "cannot be loaded"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:2000])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "vocabulary":
        config.write_text(json.dumps({**said, "vocab_size": said["vocab_size"] - 1}))
    else:
        config.write_text(json.dumps({**said, "num_hidden_layers": 3}))
        reason = "has no weights for model.layers.2."
    text, out = tmp_path / "text.txt", tmp_path / "text.kvs"
    text.write_text("the first line\n" * 20)
    words = ["compress", str(text), "-o", str(out), "--model", str(folder)]
    command = [sys.executable, "-m", "kvsketch", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert f"--model '{folder}' {reason}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_a_loop_of_links_becomes_a_file(tmp_path: Path) -> None:
    loop = tmp_path / "loop.kvs"
    loop.symlink_to(loop)
    save_bytes(loop, b"whole", "--out")
    assert loop.read_bytes() == b"whole"
