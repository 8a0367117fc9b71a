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
    """Write the rows with what they were measured on to results/benchmarks/, or to `out`, and print them as a table."""
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
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(key, "–") for key in head] for row in rows]
    print(table(head, [[f"{v:.3g}" if isinstance(v, float) else v for v in row] for row in cells]))
