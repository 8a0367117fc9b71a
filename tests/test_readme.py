"""The README's example runs as printed, and is what `espalier demo` trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import espalier.app
from espalier.app import cli

ROOT = Path(__file__).parents[1]
EXAMPLE = Path(espalier.app.__file__).with_name("example.py")


def first_block() -> str:
    match = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_example_is_the_demo() -> None:
    assert first_block() == EXAMPLE.read_text()


def test_the_example_runs_and_structures(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("import torch\ntorch.manual_seed(0)\n" + first_block())
    run = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, check=True)
    found = re.search(r"weighted group sparsity ([\d.]+)%", run.stdout)
    accuracy = re.search(r"accuracy ([\d.]+)%", run.stdout)
    assert found is not None
    assert accuracy is not None
    assert float(found[1]) > 30
    assert float(accuracy[1]) > 85


def test_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["espalier", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert espalier.__version__ in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["espalier", "dance"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "demo" in capsys.readouterr().err
