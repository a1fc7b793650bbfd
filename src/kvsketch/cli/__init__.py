"""The command line."""

from __future__ import annotations

import signal
import sys

#: exit code after Ctrl-C
INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Entry point of the command `kvsketch`."""
    try:
        from kvsketch.cli.app import app  # takes a moment, which Ctrl-C may fall into

        app(prog_name="kvsketch")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
