"""Functions shared by all scripts that write pages."""

from __future__ import annotations

from typing import Any


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def made_with(result: dict[str, Any]) -> str:
    """What a result was made with; before that, what else to know of it until it is made anew."""
    note = f"{result['note']}\n\n" if "note" in result else ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    hardware = ", ".join(f"{name} {value}" for name, value in result["hardware"].items())
    return f"{note}Seed {result['seed']}; {versions}; {hardware}."
