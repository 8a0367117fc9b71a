"""The table of what trials found names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_table_names_exists() -> None:
    named: set[tuple[str, str]] = set()
    for row in (ROOT / "docs/dev-notes/trials.md").read_text(encoding="utf-8").splitlines():
        file = ""
        for path, test in re.findall(r"(tests/[\w/]+\.py)|(?:::|, )(test_\w+)", row):
            file = path or file
            if test:
                named.add((file, test))
    assert len(named) > 100
    assert not [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")]
