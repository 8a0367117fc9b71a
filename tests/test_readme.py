"""The README's example runs as printed, and the demo shows what the README promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def first_block() -> str:
    match = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_example_runs_and_structures(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(first_block())
    run = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, check=True)
    # of the weights themselves, without structured(): the schedule told the optimizer when the run ends
    zero, removed, accuracy = (
        float(re.findall(pattern, run.stdout)[0])
        for pattern in (
            r"([\d.]+)% of the penalised weights are in groups that are zero",
            r"shrink would remove ([\d.]+)%",
            r"accuracy ([\d.]+)%",
        )
    )
    assert zero > 65
    assert removed > 80
    assert accuracy > 94


def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "espalier.app.cli", "demo"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    rows = {m[1]: m[0] for m in re.finditer(r"│ (dense|structured|shrunk) .*", run.stdout)}
    accuracy = {name: float(re.findall(r"([\d.]+) %", row)[0]) for name, row in rows.items()}
    assert accuracy["structured"] >= 96
    assert accuracy["shrunk"] == accuracy["structured"]
    assert float(re.findall(r"([\d.]+) %", rows["structured"])[1]) >= 50
    assert int(re.findall(r"\((\d+)%\)", rows["shrunk"])[0]) <= 50
    page = tmp_path / re.findall(r"Report: (.*)", run.stdout)[0]
    assert "scikit-learn" in page.read_text()
    assert run.stderr == ""
