"""Without a GPU the Triton kernels run in the interpreter, which must be chosen before import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
