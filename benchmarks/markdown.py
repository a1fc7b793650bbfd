"""Functions shared by all scripts that write pages."""

from __future__ import annotations

import re
from typing import Any


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def written_by(module: str) -> str:
    """A note for whoever edits a page, which its readers do not see."""
    return f"<!-- Written by `python -m benchmarks.{module}` from docs/results/; do not edit. -->"


def folded(sections: str) -> str:
    """The sections of a page, of which the reader sees the heading and the first paragraph. What
    follows is folded away if it has a table."""
    return "".join(_fold(part) for part in re.split(r"^(?=#{2,3} )", sections, flags=re.MULTILINE))


def _fold(section: str) -> str:
    heading, *paragraphs = section.strip("\n").split("\n\n")
    if not heading.startswith("##") or len(paragraphs) < 2 or "\n| ---" not in section:
        return section
    lead, *rest = paragraphs
    rows = sum(max(0, text.count("\n|") - 1) for text in rest if text.startswith("|"))
    what = (
        f"All numbers, and how they were measured ({rows} rows)" if rows else "How it was measured"
    )
    return f"{heading}\n\n{lead}\n\n{details(what, *rest)}\n\n"


def details(what: str, *paragraphs: str) -> str:
    """Paragraphs that are shown when the reader opens them."""
    inside = "\n\n".join(paragraphs)
    return f'<details markdown="1">\n<summary>{what}</summary>\n\n{inside}\n\n</details>'


def made_with(result: dict[str, Any]) -> str:
    """The seed, versions and hardware of a result. A note about the result comes first."""
    note = f"{result['note']}\n\n" if "note" in result else ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    hardware = ", ".join(f"{name} {value}" for name, value in result["hardware"].items())
    text = f"{note}Seed {result['seed']}; {versions}; {hardware}."
    return text + (f" {_again(result['again'])}" if "again" in result else "")


def _again(again: dict[str, Any]) -> str:
    """A description of the later run whose rows ``benchmarks.replace_rows`` added."""

    def named(methods: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in methods)

    found = (
        f"The rows of {named(again['methods'])} are from a later run of kvsketch "
        f"{again['versions']['kvsketch']}, on {again['hardware']['processor']}"
    )
    if not again["control"]:
        return found + "."
    far = ", ".join(f"{value:g} in `{name}`" for name, value in again["differences"].items())
    return f"{found}. For {named(again['control'])}, the two runs differ by at most {far}."
