"""The command line."""

from __future__ import annotations

import sys

from kvsketch.cli.exit_codes import INTERRUPTED


def main() -> None:
    """Entry point of the command `kvsketch`."""
    try:
        from kvsketch.cli.app import app  # takes a moment, which Ctrl-C may fall into

        app(prog_name="kvsketch")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
