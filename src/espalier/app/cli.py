"""The `espalier` command: a problem is one line and exit code 2, never a traceback."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

NO_MEMORY = (
    "there is not enough memory. Take a smaller batch (--set batch=..., or --set accumulate=2 for the same steps), or "
    "fewer processes (--at-once, --set data.workers=...)"
)


def main() -> None:
    """Run the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that its encoding does not have
    try:
        from espalier.app.commands import app
        from espalier.app.errors import Problem, Stopped, one_line
    except ModuleNotFoundError as error:
        _leave(f'{error.name} is missing: pip install "torch-espalier[app]"')
    except (ImportError, MemoryError) as error:
        _leave(NO_MEMORY if _out_of_memory(error) else f"a package can't be loaded: {error}")

    try:
        app()
    except Problem as problem:
        _leave(str(problem))
    except OSError as error:
        # a full disk, a directory that may not be written to
        where = f"{error.filename}: " if error.filename else ""
        _leave(f"{where}{error.strerror or error}")
    except (ImportError, MemoryError, RuntimeError) as error:
        if _out_of_memory(error):
            _leave(NO_MEMORY)
        if isinstance(error, ImportError):
            _leave(f"a package can't be loaded: {one_line(error)}")
        raise
    except Stopped as stopped:
        way_on = {"train": " The same command with --resume goes on.", "compare": " The same command goes on."}
        print(f"espalier: {stopped}.{way_on.get(sys.argv[1], '')}", file=sys.stderr)
        sys.exit(128 + stopped.signal)


def _out_of_memory(error: BaseException) -> bool:
    """Of the host: torch and the loader of shared libraries have their own words for it."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in ("allocate memory", "not enough memory"))


def _leave(said: str) -> NoReturn:
    print(f"espalier: {said}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
