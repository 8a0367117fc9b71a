"""Tests work on tensors too small for two threads to help, and beside other workers the second one only waits."""

import os
import sys
from collections.abc import Iterator

# before torch and NumPy are imported, here and in the commands that tests start
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)
# without a GPU the kernels run in Triton's interpreter, which it chooses when it is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    # tests drive λ to extremes on purpose; those of the warning itself ask for it
    config.addinivalue_line("filterwarnings", "ignore::espalier.StructureWarning")


@pytest.fixture(autouse=True)
def nothing_timed_yet() -> Iterator[None]:
    """What one test made up as a layer's time is not for the next."""
    yield
    if timing := sys.modules.get("espalier.compact.timing"):
        timing._measured.clear()
