"""The command line."""

from __future__ import annotations

import io
import os
import sys

from kvsketch.cli.exit_codes import INTERRUPTED


def main() -> None:
    """Entry point of the command `kvsketch`."""
    # Read when torch is loaded. Where other processes keep the cores busy, threads that wait for
    # each other in a loop make every operation many times slower (benchmarks/busy.py).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    for stream in (sys.stdout, sys.stderr):  # names of files that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from kvsketch.cli.app import app  # takes a moment, which Ctrl-C may fall into

        app(prog_name="kvsketch")
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.filename is not None:
            raise
        # Python writes what is left once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("error: the output cannot be written:", error.strerror, file=sys.stderr)
        sys.exit(1)
