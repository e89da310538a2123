"""Is this output right? The only place with tolerances.

An error is measured in units of what rounding explains: for every output element
:mod:`autosel.error_scale` gives the standard deviation of a correct kernel's error, and the
limits below are multiples of it. Nothing is a guess about a shape, an activation or a router.
Outputs of a token that err together (weights of one sign) are one draw rather than many: the
limits of a token and of a whole output then move towards that of a single element.

How the limits were set: the emulation in the act dtype (``reference.moe(rounded=True)``), which
rounds wherever a kernel may, stands at 0.4 to 0.65 as a root mean square, below 1 on its worst
token and below 4 on its worst of a million elements, over the shapes, activations and types that
``tests/verify/test_calibration.py`` prints. The limits leave three to five times that for the
orders of summation and 16-bit partial sums of real kernels. A wrong zero point, permutation or
expert stands in the tens to thousands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autosel.core import AccuracyClass, CertifiedCase, ErrorFigures, Limits, Status
from autosel.dtypes import torch_dtype
from autosel.error_scale import Judged, Rounding
from autosel.errors import AutoselError, field_error

LIMITS: dict[AccuracyClass, Limits] = {
    "exact": Limits(rms=2.0, token=3.0, element=8.0, bias=0.08),
    # Kernels differ in how they find the scale of a row (percentiles of its range, asymmetric
    # codes), which the error scale does not know; and errors of 8 bits are large enough for the
    # activation's curvature to turn some of them into a bias.
    "a8": Limits(rms=2.5, token=4.0, element=10.0, bias=0.2),
}

#: The most that :mod:`autosel.audit` may find against a single weight. The largest of 10**9 normal
#: scores is about 6.2, and those of a correct kernel spread by 0.65 at most: none above 3.5 is met
#: in ``tests/verify/test_audit.py``.
AUDIT_LIMIT = 7.0

#: Relative size of the error scale on plain data, in unit roundoffs of the act dtype, and the
#: share that 8-bit activations add: what :func:`compare` assumes when it is given no scale.
NOMINAL_UNITS = 2.4
NOMINAL_A8 = 2.5e-2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification found.

    ``score`` is the share of its limit that the error used (above 1 is wrong), None when nothing
    could be compared. ``audit_score`` is the evidence against the most suspicious single weight,
    None without an audit. ``repeatable`` says that a second run gave the same bits, None if there
    was none.
    ``weights_changed`` says that the candidate wrote into its packed weights, which are then
    spoiled for others. ``cases`` are the names of the cases that were run, ``results`` what came
    of each, ``runs`` the number of calls. ``bias`` is the mean error towards zero in units of the
    error scale. ``fault`` is the property (:data:`autosel.core.PROPERTIES`) that a side effect
    broke, ``missed`` those that optional cases cost. ``rival`` is the evidence for another
    activation (:mod:`autosel.rivals`).
    """

    status: Status
    reason: str = ""
    errors: ErrorFigures | None = None
    score: float | None = None
    audit_score: float | None = None
    repeatable: bool | None = None
    weights_changed: bool = False
    cases: tuple[str, ...] = ()
    results: tuple[CertifiedCase, ...] = ()
    bias: float | None = None
    fault: str = ""
    missed: tuple[str, ...] = ()
    rival: tuple[float, float] = (0.0, 0.0)
    runs: int = 0

    def __bool__(self) -> bool:
        return self.status == "ok"


def compare(
    out: torch.Tensor,
    ref: torch.Tensor,
    *,
    accuracy: AccuracyClass,
    act_dtype: str,
    scale: torch.Tensor | None = None,
    overflows: torch.Tensor | bool = False,
    shared: torch.Tensor | None = None,
) -> Verdict:
    """Judge ``out`` ``[M, H]`` in the act dtype against ``ref`` ``[M, H]`` in float32 or float64.

    scale      error scale ``[M, H]`` of the same accuracy class; without it the error is taken
               relative to the size of each reference row
    overflows  True, or bool ``[M]``: the layer has numbers that do not fit the act dtype
    shared     ``[M]``: share of each token's error that its outputs have in common

    The status is ok, wrong or nonfinite; nonfinite never depends on a difference with NaN. A
    reference that is not finite itself cannot judge and raises AutoselError.
    """
    if tuple(out.shape) != tuple(ref.shape):
        return Verdict("wrong", field_error("output", "shape", list(out.shape), list(ref.shape)))
    if out.dtype != torch_dtype(act_dtype):
        return Verdict("wrong", field_error("output", "dtype", out.dtype, torch_dtype(act_dtype)))
    _require_finite("reference", ref)
    if scale is not None:
        _require_finite("error scale", scale)
    if not out.isfinite().all():
        return Verdict("nonfinite", _nonfinite_reason(out, ref, act_dtype, overflows))
    if out.numel() == 0:
        return Verdict("ok", errors=ErrorFigures(0.0, 0.0, 0.0, 0.0), score=0.0)

    ref = ref.double()
    error = out.to(ref.device).double() - ref  # [M, H]
    if scale is None:
        scale = nominal_scale(ref, accuracy, act_dtype)
    figures = error_figures(error, ref)
    # No rounding can explain an error where the scale is 0, and no error needs explaining.
    units = torch.where(error == 0, 0.0, error.abs() / scale.double())  # [M, H]
    checks = _checks(units, LIMITS[accuracy], shared)
    where, found, limit = max(checks, key=lambda check: check[1] / check[2])
    if found <= limit:
        return Verdict("ok", "", figures, found / limit)
    reason = field_error(where, "error over rounding", f"{found:.3g}", f"at most {limit:.3g}")
    return Verdict("wrong", reason, figures, found / limit)


def compare_judged(
    out: torch.Tensor, judged: Judged, *, accuracy: AccuracyClass, act_dtype: str
) -> Verdict:
    """:func:`compare` with everything that is known about one judged input."""
    return compare(
        out,
        judged.reference,
        accuracy=accuracy,
        act_dtype=act_dtype,
        scale=judged.scales[accuracy],
        overflows=judged.overflows,
        shared=judged.shared[accuracy],
    )


def nominal_scale(ref: torch.Tensor, accuracy: AccuracyClass, act_dtype: str) -> torch.Tensor:
    """Error scale ``[M, 1]`` assumed for a reference ``[M, H]`` of which nothing else is known.

    A row that is small by cancellation still carries the errors of its large terms, so no row
    counts as smaller than a quarter of the whole.
    """
    relative = NOMINAL_UNITS * Rounding.of(torch_dtype(act_dtype)).unit
    if accuracy == "a8":
        relative = math.hypot(relative, NOMINAL_A8)
    size = ref.double().square().mean(dim=-1, keepdim=True).sqrt()  # [M, 1]
    whole = size.square().mean().sqrt()
    return relative * size.maximum(whole / 4)


def error_figures(error: torch.Tensor, ref: torch.Tensor) -> ErrorFigures:
    """Figures relative to the reference's own size, for people; both ``[M, H]``, float64.

    A row whose reference is 0 counts only if it has an error, and then its figure is None.
    """
    rows, ref_rows = error.norm(dim=-1), ref.norm(dim=-1)
    worst = torch.where(rows == 0, 0.0, rows / ref_rows).max()
    size = ref.square().mean().sqrt()

    def ratio(value: torch.Tensor) -> float | None:
        found = float(torch.where(value == 0, 0.0, value / size))
        return found if math.isfinite(found) else None

    return ErrorFigures(
        rel_rms=ratio(error.square().mean().sqrt()),
        rel_rms_worst_token=float(worst) if worst.isfinite() else None,
        rel_max=ratio(error.abs().max()),
        bias=ratio(error.mean()),
    )


def _require_finite(name: str, values: torch.Tensor) -> None:
    unusable = int((~values.isfinite()).sum())
    if unusable:
        raise AutoselError(field_error(name, "values", f"{unusable} not finite", "finite"))


def _checks(
    units: torch.Tensor, limits: Limits, shared: torch.Tensor | None
) -> list[tuple[str, float, float]]:
    """(where, found, limit) of the three limits."""
    tokens = units.square().mean(dim=-1).sqrt()  # [M]
    part = torch.zeros_like(tokens) if shared is None else shared.to(tokens)
    bounds = (limits.token**2 + part * (limits.element**2 - limits.token**2)).sqrt()  # [M]
    token = int((tokens / bounds).argmax())
    place = int(units.argmax())
    row, column = divmod(place, units.shape[-1])
    # What all outputs of a token share does not average out over them, only over tokens.
    spare = float(part.mean()) * (limits.element**2 - limits.rms**2) / len(tokens)
    return [
        (f"token {token}", float(tokens[token]), float(bounds[token])),
        (f"token {row} output {column}", float(units[row, column]), limits.element),
        ("all tokens", float(tokens.square().mean().sqrt()), math.sqrt(limits.rms**2 + spare)),
    ]


def _nonfinite_reason(
    out: torch.Tensor, ref: torch.Tensor, act_dtype: str, overflows: torch.Tensor | bool
) -> str:
    bad = ~out.isfinite()
    row, column = (int(i) for i in bad.nonzero()[0])
    nans = int(out.isnan().sum())
    found = f"{nans} NaN and {int(bad.sum()) - nans} infinite of {out.numel()} values"
    reason = field_error(
        "output",
        "non-finite",
        f"{found}, first at token {row} output {column}",
        "finite as the reference",
    )
    rows = bad.any(dim=-1)
    largest = torch.finfo(torch_dtype(act_dtype)).max
    excused = (ref.abs() > largest).any(dim=-1).to(rows.device)
    excused |= torch.as_tensor(overflows, device=rows.device)
    if excused[rows].all():
        reason += f"; it overflows {act_dtype}: a number on the way is above {largest:g}"
    return reason
