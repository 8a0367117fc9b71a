"""What a person can mend."""

from __future__ import annotations


class Problem(Exception):
    """One clear line: what is wrong, what was expected and the way out. The command prints it and exits with 2."""


def one_line(error: BaseException) -> str:
    """What an error of someone else's says, short enough for the end of a line."""
    return short(str(error), 300) or type(error).__name__


def short(text: str, most: int) -> str:
    """A text on one line, cut where it is longer."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def shown(value: object) -> str:
    """A value as a message quotes it."""
    try:
        return short(repr(value), 80)
    except (ValueError, RecursionError):  # more digits, or deeper, than Python writes
        return "a value too large to write"


class Stopped(Exception):
    """What was asked to stop by a signal, and has written its checkpoint, says so."""

    def __init__(self, signal: int, said: str) -> None:
        super().__init__(signal, said)  # of which another process can make it again
        self.signal, self.said = signal, said

    def __str__(self) -> str:
        return self.said
