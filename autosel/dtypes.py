"""The torch dtype behind the names that :mod:`autosel.core` carries as text."""

from __future__ import annotations

import torch

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of an act or scale dtype's name (``"bfloat16"``)."""
    return _DTYPES[name]
