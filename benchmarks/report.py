"""What a benchmark prints and writes down."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from espalier.tables import table


def report(name: str, device: str, rows: list[dict[str, Any]], out: Path | None) -> None:
    """Print the rows as a table; write them with what they were measured on to results/benchmarks/, or to `out`."""
    print(table(list(rows[0]), [[f"{v:.3g}" if isinstance(v, float) else v for v in row.values()] for row in rows]))
    cpu = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name"))
    found = {
        "command": " ".join([f"python benchmarks/{name}.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu.split(": ")[1],
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    out = out or Path("results") / "benchmarks" / f"{name}-{device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
