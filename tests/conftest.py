"""Tests work on tensors too small for two threads to help, and beside other jobs the second one only waits."""

import os

import torch

torch.set_num_threads(1)
# without a GPU the kernels run in Triton's interpreter, which it chooses when it is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
