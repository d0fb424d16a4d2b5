"""Triton reads TRITON_INTERPRET when a kernel is decorated: without a GPU the kernels' tests run in its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
