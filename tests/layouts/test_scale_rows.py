"""Scale tables that disagree with the declared group size are refused, with both numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosel.errors import CheckpointError
from autosel.interfaces import Layout
from autosel.layouts.exllama import Exllama
from autosel.layouts.flashinfer_mxint4 import FlashInferMxInt4
from autosel.layouts.humming import Humming
from autosel.layouts.marlin import Marlin
from autosel.layouts.nfirst_bytes import NFirstBytes
from tests.layouts import make

LAYOUTS = [Marlin(), Humming(), NFirstBytes(), Exllama("bfloat16"), FlashInferMxInt4()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_all_rows_of_an_unsplit_layer(layout: Layout) -> None:
    """Half of 512 inputs in groups of 32, but the scale rows of all of them."""
    share, whole = make.problem(256, 256), make.problem(256, 512)
    experts, other = make.experts(share), make.experts(whole)
    wrong = replace(experts, w2=replace(experts.w2, scales=other.w2.scales))
    with pytest.raises(CheckpointError, match=r"w2\.scales: shape: found \[2, 256, 16\], expected"
                                              r" \[2, 256, 8\]"):  # fmt: skip
        layout.pack(wrong)
