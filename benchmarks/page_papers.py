"""Writes docs/papers.md, which lists the class or function that implements each line of a paper,
from the docstrings in src/kvsketch.

    python -m benchmarks.page_papers
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import table

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvsketch"
ALGORITHMS = ROOT / "docs" / "algorithms.md"
PAGE = ROOT / "docs" / "papers.md"
#: The papers, each with a pattern. A docstring is about a paper if it, or its module's, matches.
PAPERS = {
    "SubGen / ClusterGen (arXiv:2402.06082)": r"SubGen|ClusterGen",
    "BalanceKV (arXiv:2502.07861)": r"BalanceKV|MergeAndReduce|SoftmaxBalance|self-balancing",
    "Compression Barriers": r"Compression Barriers|INDEX|Haris",
}
NAMED = re.compile(
    r"\b(Algorithms?|Lemmas?|Theorems?|Corollary|Definitions?|Remark|[Ee]quations?|Appendix|[Ss]ections?)"
    r"\s+([A-Z]?\d*(?:\.\d+)*[a-z]?)\b"
)


@dataclass(frozen=True)
class Mention:
    """A line of a paper in a docstring.

    Attributes:
        paper: the name of the paper.
        line: the line of the paper, such as "Theorem 3.1".
        where: the object's dotted path within kvsketch.
        file: the object's file within the repository.
    """

    paper: str
    line: str
    where: str
    file: str


def objects(path: Path) -> Iterator[tuple[str, str]]:
    """The dotted paths and docstrings of a module and of the objects that it defines."""
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield module, ast.get_docstring(tree) or ""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                below = f"{name}.{child.name}"
                yield below, ast.get_docstring(child) or ""
                yield from inside(child, below)

    yield from inside(tree, module)


def named(doc: str) -> list[tuple[str, int]]:
    """The lines of papers that a docstring names, with their positions in it."""
    found = []
    for match in NAMED.finditer(doc):
        kind, number = match.group(1).capitalize(), match.group(2)
        if number and kind not in ("Section", "Sections"):
            found.append((f"{kind.removesuffix('s')} {number}", match.start()))
    return found


def known() -> dict[str, set[str]]:
    """The lines of each paper in docs/algorithms.md, which a test compares with the papers."""
    found: dict[str, set[str]] = {paper: set() for paper in PAPERS}
    paper = None
    for row in ALGORITHMS.read_text(encoding="utf-8").splitlines():
        if row.startswith("| **"):
            paper = next((p for p, pattern in PAPERS.items() if re.search(pattern, row)), None)
        elif paper and row.startswith("| "):
            found[paper] |= {line for line, _ in named(row.split(" | ")[0])}
    return found


def paper_of(doc: str, place: int, others: Sequence[str]) -> list[str]:
    """The papers to which a line may belong, the most likely first: the last one named before it,
    then others in the docstring, then those in the docstrings of the enclosing objects."""
    last = sorted(
        (
            (match.start(), paper)
            for paper, pattern in PAPERS.items()
            for match in re.finditer(pattern, doc[:place])
        ),
        reverse=True,
    )
    near = [
        p for text in (doc, *others) for p, pattern in PAPERS.items() if re.search(pattern, text)
    ]
    return list(dict.fromkeys([*(paper for _, paper in last), *near]))


def mentions() -> list[Mention]:
    lines = known()
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] not in ("methods", "theory"):
            continue
        everything = list(objects(path))
        for where, doc in everything:
            if any(part.startswith("_") for part in where.split(".")):
                continue
            owner = next((d for w, d in everything if w == where.rpartition(".")[0]), "")
            for line, place in named(doc):
                owners = [paper for paper in PAPERS if line in lines[paper]]
                likely = paper_of(doc, place, (owner, everything[0][1]))
                paper = next((paper for paper in likely if paper in owners), None)
                if paper is None and len(owners) == 1:
                    paper = owners[0]
                if paper is not None:
                    found.add(Mention(paper, line, where, path.relative_to(ROOT).as_posix()))
    return sorted(found, key=lambda m: (m.paper, order(m.line), m.where))


def order(line: str) -> tuple[str, list[tuple[int, str]]]:
    kind, _, number = line.partition(" ")
    return kind, [(int(part) if part.isdigit() else -1, part) for part in number.split(".")]


def repository() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'^Repository = "([^"]+)"', text, re.MULTILINE)[0]


def page() -> str:
    found = mentions()
    parts = [
        "# The papers, line by line\n\n"
        "<!-- Written by `python -m benchmarks.page_papers` from the docstrings in src/kvsketch; "
        "do not edit. -->\n\n"
        "The table lists the classes and functions whose docstrings refer to a numbered item of a "
        "paper. [The papers' algorithms](algorithms.md) has the file and the test of every item "
        "and the errors in the papers. [Guarantees](guarantees.md) has the measurements.\n"
    ]
    for paper in PAPERS:
        lines = dict.fromkeys(m.line for m in found if m.paper == paper)
        rows = []
        for line in lines:
            places = [m for m in found if (m.paper, m.line) == (paper, line)]
            rows.append(
                [
                    line,
                    ", ".join(f"[`{m.where}`]({repository()}/blob/main/{m.file})" for m in places),
                ]
            )
        parts.append(f"## {paper}\n\n{table(['line', 'in `kvsketch`'], rows)}\n")
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
