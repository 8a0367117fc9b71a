"""What a person can mend."""

from __future__ import annotations


class Problem(Exception):
    """One clear line: what is wrong, what was expected and the way out. The command prints it and exits with 2."""


def one_line(error: BaseException) -> str:
    """What an error of someone else's says, short enough for the end of a line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 300 else f"{said[:297]}..."


class Stopped(Exception):
    """What was asked to stop by a signal, and has written its checkpoint, says so."""

    def __init__(self, signal: int, said: str) -> None:
        super().__init__(signal, said)  # of which another process can make it again
        self.signal, self.said = signal, said

    def __str__(self) -> str:
        return self.said
