"""SHA-256 of the files that a run lives from, so that bits which flip on a disk are noticed.

A checkpoint carries its own digest, because a second file could not be replaced at the same moment: a process killed
between the two would leave a good checkpoint that looks damaged. What a finished run delivers has its digests in
run.json, which is written after all of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from espalier.app.errors import Problem

NOTE = b"espalier sha256 "
EMPTY = b"\0\0"  # how a zip archive without a comment ends: the comment's length
LENGTH = len(EMPTY) + len(NOTE) + 64
CHUNK = 1 << 20
# of a finished run, in the order in which damage is told
DELIVERED = ("model.safetensors", "examples.pt", "metrics.jsonl", "structure.json", "words.json")
MADE_AGAIN = DELIVERED[:2]


def save(state: Any, file: IO[bytes]) -> None:
    """`torch.save`, then the digest of what was written, as the comment of that zip archive."""
    torch.save(state, file)
    file.seek(0)
    note = _note(hashlib.file_digest(file, "sha256"))  # type: ignore[arg-type]
    file.seek(-len(EMPTY), os.SEEK_END)
    file.write(note)


def intact(path: Path) -> bool | None:
    """Whether a file is as `save` wrote it; None if it has no digest, as in older versions."""
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - LENGTH
        if left < 0:
            return None
        file.seek(left)
        end = file.read()
        if not end[len(EMPTY) :].startswith(NOTE):
            return None
        file.seek(0)
        found = hashlib.sha256()
        while left and (part := file.read(min(CHUNK, left))):
            found.update(part)
            left -= len(part)
        found.update(EMPTY)
        return end == _note(found)


def digests(directory: Path) -> dict[str, str]:
    """The digests of what a finished run delivers."""
    return {name: _digest(directory / name) for name in DELIVERED if (directory / name).is_file()}


def verify(directory: Path, recorded: Mapping[str, str]) -> None:
    """Refuse a file of a finished run that is not as it was written. One that was deleted is not damaged."""
    for name in DELIVERED:
        path = directory / name
        if name not in recorded or not path.is_file() or _digest(path) == recorded[name]:
            continue
        way_out = "restore it from a copy"
        if name in MADE_AGAIN:
            way_out = f"delete it and run `espalier train ... --resume --out={directory}`, which makes it again"
        raise Problem(
            f"{path} is damaged, or was changed: its SHA-256 is not the one in run.json. Now {way_out}. "
            f'If you changed it yourself, delete "{name}" from "sha256" in run.json'
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _note(found: Any) -> bytes:
    text: bytes = NOTE + found.hexdigest().encode()
    return len(text).to_bytes(2, "little") + text
