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

#: Standard deviations by which 0 and 1 must be apart for the question to be asked.
SEPARATION = 12.0


def rival_verdict(
    outputs: Sequence[tuple[Case, torch.Tensor]], accuracy: AccuracyClass
) -> Verdict | None:
    """A verdict of wrong when the errors point at the rival; None when not, or without one."""
    matched = size = 0.0
    for case, out in outputs:
        if case.rival is None:
            return None
        judged = case.judged
        scale = judged.scales[accuracy].double()
        precision = torch.where(scale > 0, scale.square().reciprocal(), 0.0)  # [M, H]
        error = out.to(judged.reference.device).double() - judged.reference.double()
        rival = case.rival.double()
        matched += float((error * rival * precision).sum())
        size += float((rival.square() * precision).sum())
    if size < SEPARATION**2 or matched < 0.5 * size:
        return None
    found = f"{matched / size:.2f} of what another gelu would differ by"
    reason = field_error("all cases", "activation", found, "about 0")
    return Verdict("wrong", reason, score=2 * matched / size)
