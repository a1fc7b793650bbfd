"""Functions shared by all scripts that write pages."""

from __future__ import annotations

from typing import Any


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


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
