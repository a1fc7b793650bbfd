"""Broken, foreign or hostile files cause an error that names the reason, and nothing worse."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import mutants, parts, signed, with_header

from families import build
from forked import result_of
from kvsketch import Curves, InputError, KVSketchError, SketchCache
from kvsketch.cli.info_command import info, rows_of

WINDOW: dict[str, Any] = {"sink": 2, "recent": 6}
MADE: dict[str, dict[str, Any]] = {
    "bits": {"method": "heavy_merge", "budget": 0.4},
    "ragged": {"method": "heavy_merge", "budget": 0.4, "bits": 16, "keep": ["errors"]},
    "sketch": {"method": "subgen", "budget": 40, "seed": 1},
    "sketches": {
        "method": "merge_reduce",
        "budget": 48,
        "allocation": [[1.5, 0.5], [0.6, 1.4]],
    },
    "tokens": {"method": "d2o", "budget": 200},
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@torch.no_grad()
def saved(model: Any, name: str, folder: Path) -> Path:
    cache = SketchCache(model.config, **WINDOW, **MADE[name])
    ids = torch.randint(3, 90, (1, 130), generator=torch.Generator().manual_seed(0))
    model(ids, past_key_values=cache)
    for token in range(3):
        model(torch.tensor([[token + 5]]), past_key_values=cache)
    path = folder / f"{name}.kvs"
    cache.save(path)
    return path


@torch.no_grad()
def survives(model: Any, path: Path, kind: str) -> bool:
    """Whether a file was loaded; it must then work, or be refused when it is used."""
    with suppress(KVSketchError):
        rows_of(info(path))
    try:
        cache = SketchCache.load(path, model)
    except KVSketchError:
        return False
    assert kind == "knowing", "a checksum that is not the file's"
    try:
        for token in (7, 8):
            found = model(torch.tensor([[token]]), past_key_values=cache).logits
        assert found.shape[:2] == (1, 1)
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    except KVSketchError:
        pass
    return True


def fuzzed(model: Any, folder: Path, count: int, seed: int) -> dict[str, int]:
    loaded = {}
    for name in MADE:
        path, broken = saved(model, name, folder), folder / "broken.kvs"
        assert survives(model, path, "knowing")
        loaded[name] = 0
        for number, (kind, raw) in enumerate(mutants(path, count, seed)):
            broken.write_bytes(raw)
            try:
                loaded[name] += survives(model, broken, kind)
            except Exception as error:
                (folder / "culprit.kvs").write_bytes(raw)
                raise AssertionError(f"{name}, mutant {number} of seed {seed}") from error
    return loaded


def test_300_broken_files_are_refused_or_of_use(llama: Any, tmp_path: Path) -> None:
    loaded = fuzzed(llama, tmp_path, 60, 0)
    assert sum(loaded.values()) < 100  # most are refused; another seed or error may be valid


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_10_000_broken_files_are_refused_or_of_use(seed: int, llama: Any, tmp_path: Path) -> None:
    fuzzed(llama, tmp_path, 200, seed)


def test_every_changed_byte_is_noticed(llama: Any, tmp_path: Path) -> None:
    path = saved(llama, "sketch", tmp_path)
    raw, broken = path.read_bytes(), tmp_path / "broken.kvs"
    table = int.from_bytes(raw[:8], "little") + 8
    for at in [*range(0, table, 97), *range(table, len(raw), 4001), len(raw) - 1]:
        broken.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(InputError):
            SketchCache.load(broken, llama)


@pytest.mark.parametrize("name", MADE)
def test_a_tensor_that_is_missing_is_noticed(name: str, llama: Any, tmp_path: Path) -> None:
    raw, broken = saved(llama, name, tmp_path).read_bytes(), tmp_path / "broken.kvs"
    for missing in parts(raw)[0]:
        if missing != "__metadata__":
            table, data = parts(raw)
            table[f"{missing}_"] = table.pop(missing)
            broken.write_bytes(signed(table, data))
            with pytest.raises(InputError):
                SketchCache.load(broken, llama)


def test_what_is_wrong_is_said(llama: Any, tmp_path: Path) -> None:
    path = saved(llama, "bits", tmp_path)
    raw, broken = path.read_bytes(), tmp_path / "broken.kvs"

    def refused(content: bytes, says: str) -> None:
        broken.write_bytes(content)
        with pytest.raises(InputError, match=says):
            SketchCache.load(broken, llama)

    def changed(**values: Any) -> bytes:
        return with_header(raw, lambda header: header.update(values))

    def state(change: Any) -> bytes:
        return with_header(raw, lambda header: change(header["state"]))

    refused(raw[:5], "truncated")
    refused(b"", "truncated")
    refused(b"not a file of ours", "is not a kvsketch file, or a truncated one$")
    refused(raw[:-1] + bytes([raw[-1] ^ 1]), "damaged: its checksum")
    refused(
        changed(version=99),
        "version 99 of the file format, and this kvsketch reads version 4: read it with",
    )
    refused(changed(version="2"), "version '2'")
    refused(changed(kind="subgen"), "holds a 'subgen', not a 'cache'")
    refused((1 << 31).to_bytes(8, "little") + raw[8:], "is not a kvsketch file, or a truncated")
    deep = b'{"a":' * 100_000
    refused(len(deep).to_bytes(8, "little") + deep, "is not a kvsketch file, or a damaged one: ")
    refused(state(lambda s: s["arguments"].update(allocation="../../etc/passwd")), "allocation")
    refused(state(lambda s: s["arguments"].update(method="torch")), "method='torch' is unknown")
    refused(state(lambda s: s["arguments"].update(sink=[])), "arguments|sink")
    refused(state(lambda s: s.update(more=1)), "more is not known")
    layer = "layers.0.stream.page"

    def first(change: Any) -> bytes:
        return state(lambda s: change(s["layers"]["0"]["stream"]))

    refused(first(lambda s: s.update(seen=10**9)), "seen=1000000000")
    refused(first(lambda s: s.update(left=10**9)), "left=1000000000")
    refused(first(lambda s: s.update(form="sketch")), "form='sketch'")
    refused(first(lambda s: s.update(compressed=False)), "compressed=False must be what")
    refused(first(lambda s: s["page"]["exact"].update(room=10**6)), f"{layer}.exact.")
    refused(first(lambda s: s["page"]["middle"].update(base=10**6)), f"{layer}.middle.")
    refused(first(lambda s: s["page"]["exact"].update(grows=True)), f"{layer}.exact.room")
    table, data = parts(raw)
    name = f"{layer}.middle.keys.unit"
    start, end = table[name]["data_offsets"]
    worse = data[:start] + b"\xff" * (end - start) + data[end:]
    refused(signed(table, worse), f"{name} is not finite")
    longer = state(lambda s: s["layers"]["1"]["stream"].update(seen=140))
    refused(longer, "layers.1.kind=.* must be of as many rows and tokens as the other layers")
    refused(first(lambda s: s.update(seen=1)), "seen=1 must be the number of tokens")
    refused(first(lambda s: s.update(bytes=1.5)), "bytes=1.5 must be an int")
    refused(first(lambda s: s.update(bytes=True)), "bytes=True must be an int")
    size = len(raw) - 8 - int.from_bytes(raw[:8], "little")
    says = f"damaged one: it has {size - 1} bytes of data, and {size} belong to its tensors"
    refused(raw[:-1], says)
    refused(raw + b"\0" * 8, f"it has {size + 8} bytes of data, and {size} belong")
    foreign = b'{"a":{"dtype":"F8","shape":[1],"data_offsets":[0,1]}}'
    foreign = len(foreign).to_bytes(8, "little") + foreign + b"x"
    refused(foreign, "is a safetensors file that kvsketch did not write$")
    text = raw[8 : len(raw) - len(data)]
    twice = b'{"x":1,"x":1,' + text[1:]
    refused(len(twice).to_bytes(8, "little") + twice + data, "a name is there twice")
    nested = parts(raw)[0]
    nested["__metadata__"]["more"] = {"sha256": "0" * 64}
    length = len(text := json.dumps(nested, separators=(",", ":")).encode())
    refused(length.to_bytes(8, "little") + text + data, "no checksum, or more than one")
    moved = parts(raw)[0]
    moved["../../../tmp/evil"] = moved.pop(name)
    refused(signed(moved, data), "unit is missing")
    fifo = tmp_path / "pipe.kvs"
    os.mkfifo(fifo)
    with pytest.raises(InputError, match="is not a file"):
        SketchCache.load(fifo, llama)


def test_a_budget_beyond_what_is_held_is_refused(llama: Any, tmp_path: Path) -> None:
    raw, broken = saved(llama, "ragged", tmp_path).read_bytes(), tmp_path / "broken.kvs"

    def change(header: dict[str, Any]) -> None:
        header["state"]["layers"]["0"]["stream"]["budget"]["value"] = 10**7

    broken.write_bytes(with_header(raw, change))
    with pytest.raises(InputError, match="budget=10000000 must be about the"):
        SketchCache.load(broken, llama)


def test_a_file_of_another_number_of_heads_is_refused(tmp_path: Path) -> None:
    """A file that claims the model's configuration but has another number of KV heads is
    refused."""
    from kvsketch.hf.identity import config_mark

    model, path = build("llama"), tmp_path / "other.kvs"
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = 1
    other = type(model)(config).eval()
    cache = SketchCache(config, "snapkv", budget=40, **WINDOW)
    with torch.no_grad():
        other(torch.full((1, 130), 7), past_key_values=cache)
    cache.save(path)
    mark = config_mark(model.config)
    change = lambda h: h["model"].update(config=mark, layers=None)  # noqa: E731
    path.write_bytes(with_header(path.read_bytes(), change))
    with pytest.raises(InputError, match="as many KV heads as the model has"):
        SketchCache.load(path, model)


def test_a_file_does_not_name_other_files(llama: Any, tmp_path: Path) -> None:
    """The allocation of a file is a name or in the file itself, not the path of another file."""
    raw, broken = saved(llama, "bits", tmp_path).read_bytes(), tmp_path / "broken.kvs"
    kept = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    curves = Curves(torch.zeros(2, 2, 3, dtype=torch.float64), kept)
    curves.save(tmp_path / "curves.json")
    Curves.load(tmp_path / "curves.json")
    named = str(tmp_path / "curves.json")
    change = lambda h: h["state"]["arguments"].update(allocation=named)  # noqa: E731
    broken.write_bytes(with_header(raw, change))
    with pytest.raises(InputError, match=r"allocation='.* must be one of"):
        SketchCache.load(broken, llama)


def test_what_is_neither_true_nor_false_is_refused(llama: Any, tmp_path: Path) -> None:
    path, mask = tmp_path / "padded.kvs", torch.ones(1, 130, dtype=torch.int64)
    mask[0, :20] = 0
    cache = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    with torch.no_grad():
        llama(torch.full((1, 130), 7), past_key_values=cache, attention_mask=mask)
    cache.save(path)
    table, data = parts(path.read_bytes())
    start = table["live"]["data_offsets"][0]
    path.write_bytes(signed(table, data[:start] + b"\2" + data[start + 1 :]))
    with pytest.raises(InputError, match="live holds what is neither true nor false"):
        SketchCache.load(path, llama)


def test_a_header_of_two_gigabytes_is_not_read(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.kvs"
    with path.open("wb") as file:  # a sparse file, which takes no room on disk
        file.write((2_000_000_000).to_bytes(8, "little"))
        file.truncate(2_000_000_008)
    with pytest.raises(InputError, match="is not a kvsketch file, or a truncated one"):
        SketchCache.load(path, llama)


def _peak() -> int:
    """The most kilobytes that this process has taken."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _loaded(paths: list[Path]) -> list[tuple[int, bool]]:
    """For each file, the kilobytes that loading it took, and whether it was loaded."""
    model, found = build("llama"), []
    model.config.max_position_embeddings = 1 << 15
    SketchCache.load(paths[-1], model)  # what loading itself needs once
    for path in paths:
        Path("/proc/self/clear_refs").write_text("5")
        before, cache = _peak(), None
        with suppress(InputError):
            cache = SketchCache.load(path, model)
        found.append((_peak() - before, cache is not None))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_file_makes_it_allocate_beyond_four_times_its_size(llama: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(llama.config)
    config.max_position_embeddings = 1 << 15
    cache = SketchCache(config, "snapkv", budget=5_000, bits=8, **WINDOW)
    even = SketchCache(config, "snapkv", budget=9_000, **WINDOW)
    ragged = SketchCache(
        config, "snapkv", budget=9_000, allocation=[[1.5, 0.5], [0.6, 1.4]], **WINDOW
    )
    keys = torch.randn(1, 2, 18_000, 16, generator=torch.Generator().manual_seed(0))
    for one in (cache, ragged, even):
        for layer in one._sketches():
            layer.update(keys, keys)
            one._forward.observe(layer, _asked(keys))
        one._forward._updated.clear()
        one._forward._open.clear()
        one._forward._thread = None
    paths: list[Path] = []
    for name, one in (("quantized", cache), ("ragged", ragged), ("even", even)):
        path = tmp_path / f"{name}.kvs"
        one.save(path)
        raw = path.read_bytes()
        for key in ("room", "base", "appended", "total", "size", "count"):
            for value in (10**5, 10**7, 10**11):
                path = tmp_path / f"{name}{key}{value}.kvs"
                path.write_bytes(with_header(raw, lambda h, k=key, v=value: _set_all(h, k, v)))
                paths.append(path)
        path = tmp_path / f"{name}exactroom.kvs"  # of a part that may have some
        path.write_bytes(with_header(raw, lambda h: _set_room(h, 10**7)))
        paths.append(path)
        paths.append(tmp_path / f"{name}.kvs")
    assert min(path.stat().st_size for path in paths) > 1_000_000
    for path, (grown, loaded) in zip(paths, result_of(_loaded, paths), strict=True):
        size = path.stat().st_size
        assert grown * 1024 < 4 * size, (path, grown, size)
        if path.stem in ("quantized", "ragged", "even"):
            assert loaded, path  # else the memory of loading was not measured


def _set_room(values: Any, room: int) -> None:
    for name, inner in values.items():
        if isinstance(inner, dict):
            if name == "exact":
                inner["room"] = room
            _set_room(inner, room)


def _set_all(values: Any, key: str, value: int) -> None:
    for name in values:
        if name == key:
            values[name] = value
        elif isinstance(values[name], dict):
            _set_all(values[name], key, value)


def _asked(keys: torch.Tensor) -> Any:
    from kvsketch import Observed

    return Observed(keys[:, :, -64:].repeat_interleave(2, dim=1), 0.25)


# --- writing ------------------------------------------------------------------------------------

_WRITER = """
import os, sys
import torch
from pathlib import Path
from kvsketch.files.format import write
from kvsketch.state import State
path = Path(sys.argv[1])
for line in sys.stdin:
    value = int(line)
    writer = os.fork()
    if writer == 0:
        state = State({"x": torch.full((1 << 19,), value, dtype=torch.int64)}, {"value": value})
        print(os.getpid(), flush=True)
        while True:
            write(path, "test", {}, state)
    os.waitpid(writer, 0)
    print("over", flush=True)
"""


def _whole(path: Path) -> int:
    """The one number that fills a file."""
    from kvsketch.files.format import read

    _, state = read(path, "test")
    value = state.values["value"]
    assert bool((state.tensors["x"] == value).all())
    return int(value)


def _write(path: Path, value: int) -> None:
    from kvsketch.files.format import write
    from kvsketch.state import State

    tensors = {"x": torch.full((1 << 19,), value, dtype=torch.int64)}
    write(path, "test", {}, State(tensors, {"value": value}))


def _kill(path: Path, shares: list[float]) -> set[int]:
    """Kill one writer after each share of the time that writing takes, which depends on what else
    the machine does; returns the numbers that filled the file afterwards."""
    found, took = set(), []
    for _ in range(5):
        begun = time.perf_counter()
        _write(path, 1)
        took.append(time.perf_counter() - begun)
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for number, share in enumerate(shares, 2):
            print(number, file=writers.stdin, flush=True)
            writer = int(writers.stdout.readline())
            threading.Event().wait(share * sorted(took)[2])
            os.kill(writer, signal.SIGKILL)
            assert writers.stdout.readline() == "over\n"
            found.add(_whole(path))
        writers.stdin.close()
    return found


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file.kvs"
    _write(path, 1)
    assert _kill(path, [0.1, 0.7]) <= {1, 2, 3}


@pytest.mark.slow
def test_fifty_killed_writers_leave_a_whole_file(tmp_path: Path) -> None:
    import random

    path, rng = tmp_path / "file.kvs", random.Random(0)
    _write(path, 1)
    found = _kill(path, [rng.random() * 3 for _ in range(50)])
    assert len(found) > 5  # some writers finished, others did not
    # only temporary files are left
    assert all(p.name.endswith(".tmp") for p in tmp_path.iterdir() if p != path)


def test_cut_off_at_any_byte_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that dies leaves the old file, and a file cut off at any byte is refused."""
    path = tmp_path / "file.kvs"
    _write(path, 1)
    _write(tmp_path / "new.kvs", 2)
    raw = (tmp_path / "new.kvs").read_bytes()
    (tmp_path / "new.kvs").unlink()

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        _write(path, 2)
    monkeypatch.undo()
    assert _whole(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file.kvs"]
    for cut in range(0, len(raw), len(raw) // 50):  # a part of a file is refused
        (tmp_path / "part.kvs").write_bytes(raw[:cut])
        with pytest.raises(InputError):
            _whole(tmp_path / "part.kvs")


def test_of_two_writers_one_wins_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.kvs"
    start = threading.Barrier(2)

    def writes(value: int) -> None:
        start.wait()
        for _ in range(8):
            _write(path, value)

    threads = [threading.Thread(target=writes, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert _whole(path) in (1, 2)
    for thread in threads:
        thread.join()
    assert _whole(path) in (1, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["file.kvs"]


_FULL = """
import resource, sys
from pathlib import Path
import torch
from kvsketch import InputError
from kvsketch.files.format import write
from kvsketch.state import State
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write(Path(sys.argv[1]), "test", {}, State({"x": torch.zeros(1 << 20)}, {}))
except InputError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file.kvs"
    _write(path, 1)
    run = subprocess.run([sys.executable, "-c", _FULL, path], capture_output=True, text=True)
    assert f"'{path}' cannot be written" in run.stdout, run.stderr
    assert "File too large" in run.stdout
    assert _whole(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file.kvs"]


def test_the_table_of_a_file_is_checked_against_its_size(tmp_path: Path) -> None:
    path = tmp_path / "file.kvs"
    _write(path, 1)
    table, data = parts(path.read_bytes())
    for change in (
        {"data_offsets": [0, 8]},
        {"data_offsets": [0, -8]},
        {"data_offsets": [8, (1 << 22) + 8]},
        {"data_offsets": [8, 1 << 22], "shape": [(1 << 19) - 1]},
        {"shape": [1 << 60, 1 << 60]},
        {"shape": [-1]},
        {"shape": [True]},
        {"shape": "x"},
        {"dtype": "F8"},
        {"dtype": ["F32"]},
        {"more": 1},
    ):
        broken = json.loads(json.dumps(table))
        broken["x"].update(change)
        path.write_bytes(signed(broken, data))
        with pytest.raises(InputError, match="is not a kvsketch file, or a damaged one: "):
            _whole(path)
