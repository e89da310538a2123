"""Did the kernel take another activation that is nearly the same?

The tanh approximation of gelu is off by 5e-4 at most, below the rounding of 16 bits, so no limit on
errors sees it. But what it adds is known for every output. The errors of all cases together are
therefore projected onto that difference: a kernel that took the other activation stands at 1, one
that did not at 0, give or take the chance that the size of rounding leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosel.compare import Verdict
from autosel.core import AccuracyClass
from autosel.errors import field_error
from autosel.verify_cases import Case

#: Standard deviations by which 0 and 1 must be apart for the question to be asked. Correct kernels
#: stand below 0.25 (rounded weights are alike in every call), so that 0.5 is far from either.
SEPARATION = 8.0

#: (errors along the difference, the difference's own size), which add up over cases.
Evidence = tuple[float, float]


def evidence(outputs: Sequence[tuple[Case, torch.Tensor]], accuracy: AccuracyClass) -> Evidence:
    """What finite outputs say for the rival; (0, 0) for an activation that has none.

    Nothing of 8-bit activations: gelu's curvature turns their errors into a difference that is
    larger than the rival's and like it.
    """
    matched = size = 0.0
    if accuracy == "a8":
        return matched, size
    for case, out in outputs:
        if case.rival is None:
            continue
        judged = case.judged
        scale = judged.scales[accuracy].double()
        precision = torch.where(scale > 0, scale.square().reciprocal(), 0.0)  # [M, H]
        error = out.to(judged.reference.device).double() - judged.reference.double()
        rival = case.rival.double()
        matched += float((error * rival * precision).sum())
        size += float((rival.square() * precision).sum())
    return matched, size


def rival_verdict(found: Evidence) -> Verdict | None:
    """A verdict of wrong when the evidence points at the rival; None when not, or too little."""
    matched, size = found
    if size < SEPARATION**2 or matched < 0.5 * size:
        return None
    share = f"{matched / size:.2f} of what another gelu would differ by"
    reason = field_error("all cases", "activation", share, "about 0")
    return Verdict("wrong", reason, score=2 * matched / size)
