"""`espalier demo`: train the README's example."""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib.util import find_spec

from espalier import __version__


def main() -> None:
    """The `espalier` command."""
    parser = argparse.ArgumentParser(
        prog="espalier", description="Train neural networks that come out exactly structured."
    )
    parser.add_argument("--version", action="version", version=f"espalier {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "demo", help="train a small network on scikit-learn's digits until whole input columns are zero"
    )
    parser.parse_args()
    if find_spec("sklearn") is None:
        sys.exit('espalier demo needs scikit-learn, for its digits: pip install "torch-espalier[app]"')
    print("Training a 64-256-10 network on 1500 digits, 60 epochs of RAMDA with group lasso ...", flush=True)
    runpy.run_module("espalier.app.example")


if __name__ == "__main__":
    main()
