"""Tests work on tensors too small for two threads to help, and beside other jobs the second one only waits."""

import torch

torch.set_num_threads(1)
