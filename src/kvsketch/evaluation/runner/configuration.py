"""Options of a command from a YAML file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from kvsketch.errors import InputError, unknown_name


def read_config(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Values by option name ("max_new_tokens" or "max-new-tokens"). Lists become text with commas,
    except ``tasks`` and ``cases``, which take several values.

    Raises:
        InputError: a file that cannot be read, is not YAML or not a mapping, or an option the
            command does not have.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"--config {path} must be a mapping of options to values")
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        name = {"json": "as_json"}.get(name, name)
        if name not in names:
            raise unknown_name(f"--config {path}: option", name, sorted(names))
        if isinstance(value, list):
            values[name] = value if name in ("tasks", "cases") else ",".join(map(str, value))
        elif value is not None:
            values[name] = value if isinstance(value, bool) else str(value)
    if isinstance(values.get("tasks"), str):
        values["tasks"] = values["tasks"].replace(",", " ").split()
    return values
