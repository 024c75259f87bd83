"""The command line. Importing it is cheap: each command imports what it needs when it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``nanopd`` command. An error of ours is one line and an exit code, never a traceback."""
    import sys

    from nanopd.cli.app import run

    sys.exit(run(sys.argv[1:]))
