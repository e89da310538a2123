"""Is the error signed? Truncation and biased rounding are small in each number and never cancel.

Rounding to nearest errs to both sides alike. A kernel that truncates, or rounds up too often, errs
the same way everywhere: too small a share of the limits on size to be seen there, and plain in the
mean over the tens of thousands of outputs of the judged cases. Two means are taken, in units of the
error scale: towards zero (what truncation does to either sign) and to one side.

How the limit was set: over the shapes, schemes and weights (plain, all of one sign, all equal) of
``tests/verify/test_bias.py`` the correct emulation stands below 0.05, and at up to 0.18 on tiny
layers with weights all alike, where chance and rounded weights allow more. Truncating the weights,
the first GEMM's output or the activation stands at 0.2 to 1.5, truncating all of them at 1 to 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autosel.core import AccuracyClass
from autosel.error_scale import Judged

#: Standard deviations of the mean that chance may explain: nothing above 4 is met in the tests.
CHANCE = 6.0


@dataclass(frozen=True, slots=True)
class SignedError:
    """Sums over outputs, which add up over cases.

    count     outputs with an error scale
    inward    sum of errors towards zero, in units of the scale; sideways that of the errors
    spread    variance of such a sum when errors are rounding of the size that the scale says
    known     sums that rounding the weights alone explains, (inward, sideways) of each way
    """

    count: int = 0
    inward: float = 0.0
    sideways: float = 0.0
    spread: float = 0.0
    known: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def of(out: torch.Tensor, judged: Judged, accuracy: AccuracyClass) -> SignedError:
        """Of a finite output ``[M, H]``."""
        scale = judged.scales[accuracy].double()
        ref = judged.reference.double()
        served = scale > 0  # [M, H]
        inverse = torch.where(served, scale, 1.0).reciprocal() * served
        sign = ref.sign()

        def sums(error: torch.Tensor) -> tuple[float, float]:
            units = error * inverse
            return -float((units * sign).sum()), float(units.sum())

        inward, sideways = sums(out.to(ref.device).double() - ref)
        width = served.sum(dim=1).double()  # [M]
        shared = judged.shared[accuracy].double()
        return SignedError(
            count=int(served.sum()),
            inward=inward,
            sideways=sideways,
            spread=float((width + shared * width.square()).sum()),
            known=tuple(sums(shift.double()) for shift in judged.shifts),
        )

    def __add__(self, other: SignedError) -> SignedError:
        if not self.count:
            return other
        if not other.count:
            return self
        return SignedError(
            self.count + other.count,
            self.inward + other.inward,
            self.sideways + other.sideways,
            self.spread + other.spread,
            tuple((a + c, b + d) for (a, b), (c, d) in zip(self.known, other.known, strict=True)),
        )

    @property
    def towards_zero(self) -> float:
        """Mean error towards zero, in units of the error scale."""
        return self.inward / self.count if self.count else 0.0

    @property
    def to_one_side(self) -> float:
        """Mean error, in units of the error scale."""
        return self.sideways / self.count if self.count else 0.0

    def worst(self, limit: float) -> tuple[str, float, float]:
        """(which mean, its value, what it may be) of the one nearer to what it may be.

        That is ``limit``, what rounding the weights explains and :data:`CHANCE` deviations.
        """
        if not self.count:
            return "towards zero", 0.0, limit
        chance = CHANCE * self.spread**0.5
        means = (("towards zero", self.inward, 0), ("to one side", self.sideways, 1))
        found = [
            (
                name,
                value / self.count,
                limit + (chance + sum(abs(k[which]) for k in self.known)) / self.count,
            )
            for name, value, which in means
        ]
        return max(found, key=lambda item: abs(item[1]) / item[2])
