"""The documentation site builds, and the targets of its links exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from benchmarks import longeval_markdown, page_choice, page_papers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
TEXTS.append(ROOT / "examples" / "README.md")
pytestmark = pytest.mark.pages


def listed(entry: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in listed(part)]


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    text = re.sub(
        r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", "", text)


def slugs(path: Path) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown names them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    cleaned = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in found)
    return {re.sub(r"[\s-]+", "-", heading) for heading in cleaned}


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def test_the_navigation_has_every_page_once() -> None:
    pages = listed(SITE["nav"])
    assert sorted(pages) == [path.relative_to(DOCS).as_posix() for path in PAGES]
    first = SITE["nav"][0]
    assert first == {"Start in five minutes": "index.md"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_relative_link_is_dead(path: Path) -> None:
    """The file of every link and picture exists, and so does the heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = unquote(target).partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        assert not found.is_relative_to(DOCS) or file != "", target
        if path.is_relative_to(DOCS):  # the site can only link to files that it contains
            assert found.is_relative_to(DOCS), target
        if anchor:
            assert anchor in slugs(found), target


def test_generated_pages_are_what_the_scripts_write() -> None:
    """`python -m benchmarks.page_choice` and `page_papers` write them anew."""
    assert (DOCS / "which-method.md").read_text(encoding="utf-8") == page_choice.page()
    assert (DOCS / "papers.md").read_text(encoding="utf-8") == page_papers.page()
    results = json.loads((DOCS / "results" / "longeval.json").read_text(encoding="utf-8"))
    assert (DOCS / "longeval.md").read_text(encoding="utf-8") == longeval_markdown.page(results)


def test_lines_of_papers_are_given_to_the_paper_that_has_them() -> None:
    found = {(m.paper.split()[0], m.line): m.where for m in page_papers.mentions()}
    assert "subgen" in found["SubGen", "Lemma 1"]
    assert "one_dimensional" in found["Compression", "Algorithm 2"]
    assert ("BalanceKV", "Theorem 3.1") in found
    assert not {("SubGen", "Theorem 15"), ("BalanceKV", "Theorem 25")} & set(found)


def test_the_reference_has_everything_that_is_exported() -> None:
    import kvsketch

    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)
    shown = {name.rpartition(".")[2] for name in names} | set(re.findall(r"\b\w+Error\b", text))
    constants = {"ALL_METHODS", "METHODS", "SKETCHES", "__version__"}
    assert set(kvsketch.__all__) - constants <= shown


def test_every_term_of_the_glossary_has_one_entry() -> None:
    """Entries are in alphabetical order and have a text each, no term has two, a term to which a
    text refers has one, and the Python names in the texts exist."""
    head, *rest = (DOCS / "glossary.md").read_text(encoding="utf-8").strip().split("\n\n")
    assert head == "# Glossary"
    parts = [entry.partition("\n:   ") for entry in rest[1:]]
    entries, texts = [entry for entry, _, _ in parts], [text for _, _, text in parts]
    assert len(entries) >= 20
    assert all(texts)
    assert not [entry for entry in entries if "\n" in entry]
    assert entries == sorted(entries, key=str.lower)
    terms = [term.lower() for entry in entries for term in entry.split(", ")]
    assert sorted(set(terms)) == sorted(terms)
    text = " ".join(" ".join(texts).split())
    assert set(re.findall(r"see \*(.+?)\*", text)) <= set(terms)
    names = re.findall(r"`(kvsketch(?:\.\w+)+)`", text)
    assert "kvsketch.methods.Compressor" in names
    for name in names:
        resolve_name(name)


def test_the_readme_is_short() -> None:
    """What does not fit belongs to the pages. Names of methods with suffixes need them, too."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert not re.search(r"@global|\+int4|\+16bit|@measured", text)


class Resources(HTMLParser):
    """The addresses of what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        name = {"link": "href", "script": "src", "img": "src", "iframe": "src"}.get(tag, "")
        if values.get("rel") not in ("canonical", "prev", "next") and values.get(name):
            self.found.append(str(values[name]))


@pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("mkdocstrings") and find_spec("material")),
    reason="mkdocs-material and mkdocstrings are not installed (kvsketch[docs])",
)
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        [*words, "-f", str(ROOT / "mkdocs.yml")],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        reader = Resources()
        reader.feed(page.read_text(encoding="utf-8"))
        assert reader.found
        for target in reader.found:
            assert not re.match(r"(https?:)?//", target), (page.name, target)
            file = unquote(target.split("#")[0].split("?")[0])
            base = tmp_path if file.startswith("/") else page.parent
            file = file.removeprefix("/kvsketch").lstrip("/") if file.startswith("/") else file
            assert (base / file).exists() or target.startswith("data:"), (page.name, target)
    reference = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert "slots kept per KV head" in reference  # an argument's text, from the source
