"""The `espalier` command: a problem is one line and exit code 2, never a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command."""
    try:
        from espalier.app.commands import app
    except ModuleNotFoundError as error:
        print(f'espalier: {error.name} is missing: pip install "torch-espalier[app]"', file=sys.stderr)
        sys.exit(2)
    from espalier.app.errors import Problem, Stopped

    try:
        app()
    except Problem as problem:
        print(f"espalier: {problem}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # a full disk, a directory that may not be written to
        where = f"{error.filename}: " if error.filename else ""
        print(f"espalier: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        way_on = {"train": " The same command with --resume goes on.", "compare": " The same command goes on."}
        print(f"espalier: {stopped}.{way_on.get(sys.argv[1], '')}", file=sys.stderr)
        sys.exit(128 + stopped.signal)


if __name__ == "__main__":
    main()
