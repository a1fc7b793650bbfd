"""Counts of the code's structure: lines, import circles, imports that run up, and what a stranger
must read to follow a prompt and a token.

    python -m benchmarks.structure --out docs/results/structure.json

The graph has every import statement, also those inside functions and of types only. The way of a
prompt and of a decoded token is recorded while the default cache of a small random model runs:
the functions of this package that were called, their files, and the classes of the objects whose
methods they are.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

from benchmarks.page import save
from kvsketch.evaluation.report.report import environment

SOURCE = Path(__file__).resolve().parent.parent / "src" / "kvsketch"
PACKAGE = "kvsketch"
#: The rooms of the package, from the ground up: a room imports only from those before it. A file
#: beside the rooms is one of its own, and stands in the first line.
FLOORS = (
    ("errors", "pieces"),
    ("method_names", "observed", "slots", "state", "budget", "writing", "models"),
    ("arguments", "estimator", "partial", "random_numbers", "farthest_first"),
    ("files", "reread"),
    ("page",),
    ("kernels",),
    ("attention", "theory"),
    ("methods",),
    ("cache",),
    ("hf",),
    ("documents",),
    ("vllm", "evaluation"),
    ("cli",),
    ("__main__",),
)
#: Rooms that are no part of the engine.
LEAVES = ("evaluation", "cli", "theory")


#: Why a file has more than 350 lines.
LONG = {
    "hf/cache.py": "SketchCache, the public class, with the documentation of all it offers",
    "cache/stream.py": "Stream: all that may happen to the page of one layer",
    "page/part.py": "Part: every operation, for heads of one size and of different sizes",
    "hf/forward.py": "Forward: one forward through all layers, also where it fails",
    "hf/layer.py": "SketchLayer: transformers' protocol of one layer",
    "methods/base.py": "Compressor: the interface of a method, most of it documentation",
    "kernels/cpu.py": "one call of the compiled kernel: what it is handed, and what it keeps",
}


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """The file of every module; of a package's face, that of its folder."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join((PACKAGE, *parts)).removesuffix(".__init__")
        found[name] = path
    return found


def imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """The modules that each module imports anywhere in its text. What the package's own face
    offers lazily is no import of it."""
    files = modules(source)
    return {
        name: set() if name == PACKAGE else set(_imported(name, path, files)) - {name}
        for name, path in files.items()
    }


def _imported(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in files or base in files:
                    yield inner if inner in files else base


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a loop (Tarjan's components of two or more)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def room(module: str) -> str:
    """The room that a module is in: a folder of the package, or a file beside them."""
    return module.split(".")[1] if "." in module else module


def upwards(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports from a room to one that does not stand below it."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    return sorted(
        (name, other)
        for name, others in graph.items()
        for other in others
        if room(name) != room(other)
        and other != PACKAGE
        and floor[room(other)] >= floor[room(name)]
    )


def mutual(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of rooms that import each other."""
    arrows = {(room(a), room(b)) for a, others in graph.items() for b in others}
    return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


def lines() -> dict[str, int]:
    """Lines of every room, docstrings included."""
    found: dict[str, int] = {}
    for name, path in modules().items():
        count = len(path.read_text(encoding="utf-8").splitlines())
        found[room(name)] = found.get(room(name), 0) + count
    return found


def told(path: Path) -> int:
    """How many lines of a file are docstrings, comments, or empty."""
    text = path.read_text(encoding="utf-8")
    every = [line.strip() for line in text.splitlines()]
    count = sum(not line or line.startswith("#") for line in every)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            assert first.end_lineno is not None
            inside = every[first.lineno - 1 : first.end_lineno]
            count += sum(bool(line) and not line.startswith("#") for line in inside)
    return count


def long_files() -> dict[str, dict[str, int]]:
    """The files of more than 350 lines: how many, and how many without docstrings, comments and
    empty lines."""
    found = {}
    for path in modules().values():
        every = len(path.read_text(encoding="utf-8").splitlines())
        if every > 350:
            name = path.relative_to(SOURCE).as_posix()
            found[name] = {"lines": every, "of_code": every - told(path)}
    return dict(sorted(found.items(), key=lambda item: -item[1]["lines"]))


def storage_types() -> list[str]:
    """Classes that hold what a layer has: those of the rooms of storage that can list their tensors
    or lay them out in given memory, parts of others (named with an underscore) excepted."""
    found = []
    for name, path in modules().items():
        if room(name) not in ("page", "cache", "vllm"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                verbs = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                if {"append", "drop"} <= verbs or "views" in verbs or {"extend", "drop"} <= verbs:
                    found.append(node.name)
    return sorted(found)


#: Kinds of pages and of methods, whose verbs should do without being asked what they are.
KINDS = {"Page", "SketchPage", "Part", "WindowedSketch", "Compressor", "Sketch"}


_ASKING = ("isinstance", "issubclass")


def type_tests() -> list[str]:
    """The places of the engine that ask whether something is one of ``KINDS``, as FILE:LINE."""
    found = []
    for name, path in modules().items():
        if room(name) in ("evaluation", "cli", "theory"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asks = isinstance(node, ast.Call) and ast.unparse(node.func) in _ASKING
            if asks and KINDS & set(re.findall(r"\w+", ast.unparse(node))):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    return sorted(found)


def names_twice() -> list[str]:
    """Names of classes, without an underscore, that more than one file defines."""
    found: dict[str, int] = {}
    for path in modules().values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name] = found.get(node.name, 0) + 1
    return sorted(name for name, count in found.items() if count > 1)


def schedules() -> list[str]:
    """Classes of the engine that say when a layer is compressed: those that
    hold the number of tokens from one compression to the next."""
    return sorted(
        node.name
        for path in modules().values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "every"
            for one in node.body
        )
    )


def compressions() -> list[str]:
    """Files of the engine that reduce the slots of a layer by a method: calls with ``scored=``, but
    those that measure errors on copies."""
    found = set()
    for name, path in modules().items():
        if room(name) in ("evaluation", "cli", "theory", "methods"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "scored" in {word.arg for word in node.keywords}:
                found.add(str(path.relative_to(SOURCE)))
    return sorted(found - {"cache/measure.py", "hf/measuring.py", "cache/window.py"})


def arguments() -> list[str]:
    """The arguments of ``SketchCache``."""
    from kvsketch import SketchCache

    every = inspect.signature(SketchCache).parameters.values()
    return [one.name for one in every if one.kind is not inspect.Parameter.VAR_KEYWORD]


@cache
def _absolute(name: str) -> Path:
    """The path of a file of code, whose name is relative if PYTHONPATH is."""
    return Path(name).resolve()


def travelled(call: Callable[[], object]) -> dict[str, list[str]]:
    """The files, functions and classes of this package that a call enters, by name.

    Raises:
        RuntimeError: the call enters none, as where the package is imported from another folder.
    """
    files: set[str] = set()
    functions: set[str] = set()
    classes: set[str] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = _absolute(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(SOURCE):
            return
        name = frame.f_code.co_name
        if name.startswith("<"):  # a comprehension, or a module that is imported
            return
        file = path.relative_to(SOURCE).as_posix()
        owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
        kind = owner if isinstance(owner, type) else type(owner)
        own = [one for one in kind.__mro__ if name in vars(one) or name == "__init__"]
        if owner is not None and own and own[0].__module__.startswith(PACKAGE):
            classes.add(kind.__name__)
            name = f"{own[0].__name__}.{name}"
        files.add(file)
        functions.add(f"{file}:{name}")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    if not files:
        raise RuntimeError(f"no function of {SOURCE} was called")
    return {
        "classes": sorted(classes),
        "files": sorted(files),
        "functions": sorted(functions),
    }


def ways() -> dict[str, dict[str, list[str]]]:
    """The way of the default's prompt, and of decoded tokens: of most ("token"), at which nothing
    is due (``hf.decoding``), and of one that ``Forward`` runs ("forward_token"). Then ("plain") the
    same with an even budget in 16 bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvsketch import SketchCache
    from kvsketch.hf import decoding

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt, token = torch.randint(64, (1, 2000)), torch.randint(64, (1, 1))
    found = {}
    for name, given in (("", {}), ("plain_", {"allocation": "even", "bits": 16})):
        cache = SketchCache(config, budget=0.25, **given)

        def read(ids: torch.Tensor, cache: SketchCache = cache) -> None:
            with torch.no_grad():
                model(ids, past_key_values=cache, use_cache=True)

        found[f"{name}prompt"] = travelled(lambda read=read: read(prompt))
        read(token)  # which allocates
        with patch.object(decoding, "_LEAST", 1 << 40):
            found[f"{name}forward_token"] = travelled(lambda read=read: read(token))
        read(token)  # the first of a run looks things up
        found[f"{name}token"] = travelled(lambda read=read: read(token))
    return found


def counted() -> dict[str, Any]:
    """All counts."""
    graph, each = imports(), lines()
    engine = [path for name, path in modules().items() if room(name) not in LEAVES]
    way = ways()
    return {
        "lines": sum(each.values()),
        "lines_of_the_engine": sum(n for name, n in each.items() if name not in LEAVES),
        "of_these_docstrings_comments_and_empty": sum(map(told, engine)),
        "lines_of_rooms": dict(sorted(each.items(), key=lambda item: -item[1])),
        "circles": [len(group) for group in circles(graph)],
        "modules_in_circles": circles(graph),
        "rooms_that_import_each_other": mutual(graph),
        "imports_that_run_up": upwards(graph),
        "storage_types": storage_types(),
        "names_of_several_classes": names_twice(),
        "schedules": schedules(),
        "compressions": compressions(),
        "tests_of_a_kind": type_tests(),
        "arguments_of_the_cache": arguments(),
        "files_over_350_lines": {
            name: {**size, "reason": LONG.get(name)} for name, size in long_files().items()
        },
        "ways": {
            name: {kind: len(found) for kind, found in one.items()} for name, one in way.items()
        },
        "classes_of_a_token": way["token"]["classes"],
        "files_of_a_token": way["token"]["files"],
    }


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    show: Annotated[
        str, typer.Option(help="A way: prompt, token, forward_token, or plain_ before one.")
    ] = "",
) -> None:
    """Example: python -m benchmarks.structure --out structure.json"""
    if show:
        for kind, names in ways()[show].items():
            print(f"{len(names)} {kind}", *names, sep="\n  ")
        return
    result = counted()
    for name, value in result.items():
        print(f"{name}: {_short(value)}")
    save({"command": "structure", **result, "seed": 0, **environment()}, out)


def _short(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(str(value)) > 300:
        return f"{len(value)}"
    return value


if __name__ == "__main__":
    typer.run(main)
