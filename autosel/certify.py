"""From a packed candidate to its certificate: the one function that a sweep calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime

import torch

from autosel import __version__
from autosel.compare import LIMITS, Verdict
from autosel.core import (
    PROPERTIES,
    Candidate,
    Certificate,
    Device,
    ErrorFigures,
    Level,
    Params,
    WeightsAudit,
)
from autosel.errors import AutoselError, field_error
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.properties import (
    Finding,
    Subject,
    graph_equals_eager,
    keeps_rows_apart,
    repeats_itself,
    unpacks_exactly,
)
from autosel.quarantine import code_hash
from autosel.verify import verify_candidate, with_rival, worst_of
from autosel.verify_cases import Case
from autosel.verify_suite import Suite

#: Properties that hold wherever no case broke them.
_WATCHED = ("input_untouched", "weights_untouched", "output_fully_written", "writes_in_bounds")


def certify(
    backend: Backend,
    packed: PackedExperts,
    params: Params,
    suite: Suite,
    *,
    device: Device,
    level: Level = "full",
    verified: Verdict | None = None,
) -> Certificate:
    """Judge a candidate on ``suite`` and say what was found; never raises what a candidate raises.

    packed    the layer's weights in ``backend.layout(problem, params)``
    level     ``quick``: the judged cases alone; ``full``: more of them, many calls of the same,
              rows apart, a captured graph, weights unpacked again, extreme weights
    verified  the verdict of the quick set, when it is there already
    """
    layout = backend.layout(packed.problem, params)
    checks = _Checks(backend, packed, params, suite, layout)
    if verified is None:
        verified = verify_candidate(backend, packed, params, suite.quick, experts=suite.experts)
    checks.take(verified, suite.quick)
    if level == "full" and checks.verdict:
        checks.run_full()
    return checks.certificate(device, level)


class _Checks:
    def __init__(
        self,
        backend: Backend,
        packed: PackedExperts,
        params: Params,
        suite: Suite,
        layout: Layout,
    ) -> None:
        self.backend, self.packed, self.params = backend, packed, params
        self.suite, self.layout = suite, layout
        self.subject = Subject(backend, packed, params, backend.accuracy(params))
        self.verdict = Verdict("ok")
        self.properties: dict[str, bool | None] = dict.fromkeys(PROPERTIES)
        self.exact: bool | None = None

    def take(self, verdict: Verdict, cases: list[Case]) -> None:
        """Add what a set of cases showed."""
        before = self.verdict
        together = with_rival(worst_of(before, verdict))
        self.verdict = replace(
            together,
            results=before.results + verdict.results,
            runs=before.runs + verdict.runs,
        )
        if verdict.fault:
            self.properties[verdict.fault] = False
        results = {result.name: result.passed for result in verdict.results}
        for case in cases:
            if case.proves and case.name in results:
                self._note(case.proves, results[case.name])
        if verdict:
            for name in _WATCHED:
                self._note(name, True)
        self._note("deterministic", verdict.repeatable)

    def run_full(self) -> None:
        """Everything beyond the quick set, until something is wrong."""
        steps: tuple[Callable[[], None], ...] = (
            self._more_cases,
            self._repeated,
            self._apart,
            self._graph,
            self._unpacked,
            self._extreme,
        )
        for step in steps:
            try:
                step()
            except (MemoryError, torch.OutOfMemoryError) as error:
                self.verdict = replace(self.verdict, status="oom", reason=_line(error))
            except AutoselError as error:
                self.verdict = replace(self.verdict, status="failed", reason=str(error))
            except Exception as error:  # a third party's kernel may raise anything
                reason = f"{type(error).__name__}: {_line(error)}"
                self.verdict = replace(self.verdict, status="failed", reason=reason)
            if not self.verdict:
                return

    def _more_cases(self) -> None:
        cases = self.suite.more
        self.take(verify_candidate(self.backend, self.packed, self.params, cases), cases)

    def _repeated(self) -> None:
        self._found("deterministic", repeats_itself(self.subject, _many_rows(self.suite.quick)))

    def _apart(self) -> None:
        case = _many_rows(self.suite.quick)
        self._found("batch_invariant", keeps_rows_apart(self.subject, case))

    def _graph(self) -> None:
        case = _many_rows(self.suite.quick)
        self._found("graph_equals_eager", graph_equals_eager(self.subject, case))

    def _unpacked(self) -> None:
        self.exact = unpacks_exactly(self.layout, self.packed, self.suite.experts)
        if self.exact is False:
            reason = field_error(
                "audit", "unpacked weights", "other bits", "those that were packed"
            )
            self.verdict = replace(self.verdict, status="wrong", reason=reason)

    def _extreme(self) -> None:
        experts, cases = self.suite.extreme
        try:
            packed = self.backend.layout(experts.problem, self.params).pack(experts)
        except Exception:  # a layout may refuse values that this layer does not have
            return
        verdict = verify_candidate(self.backend, packed, self.params, cases, repeats=1)
        numbers = verdict.status in ("ok", "wrong", "nonfinite")
        self.properties["handles_extreme_weights"] = bool(verdict) if numbers else None
        self.verdict = replace(self.verdict, runs=self.verdict.runs + verdict.runs)

    def _found(self, name: str, finding: Finding) -> None:
        self._note(name, finding.value)
        runs = self.verdict.runs + finding.calls
        self.verdict = replace(self.verdict, runs=runs)
        if finding.fault is not None:
            fault = finding.fault
            if fault.fault:
                self.properties[fault.fault] = False
            self.verdict = replace(
                self.verdict, status=fault.status, reason=fault.reason, score=fault.score
            )

    def _note(self, name: str, value: bool | None) -> None:
        """A property holds only while every check says so."""
        known = self.properties[name]
        self.properties[name] = value if known is None else known and value is not False

    def certificate(self, device: Device, level: Level) -> Certificate:
        verdict = self.verdict
        score = verdict.audit_score
        failed = verdict.reason.startswith("audit:")
        passed = None if score is None and self.exact is None else not failed
        return Certificate(
            problem=self.packed.problem,
            candidate=Candidate.of(self.backend.name, self.params, self.layout.key),
            device=device,
            status=verdict.status,
            level=level,
            limits=LIMITS[self.subject.accuracy],
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            autosel_version=__version__,
            code=code_hash(getattr(self.backend, "wrapped", self.backend), self.layout),
            accuracy=self.subject.accuracy,
            reason=verdict.reason,
            cases=verdict.results,
            errors=_finite_figures(verdict.errors),
            score=_finite(verdict.score),
            bias=_finite(verdict.bias),
            properties=tuple(self.properties.items()),
            audit=WeightsAudit(
                passed,
                self.packed.problem.num_local_experts if score is not None else 0,
                self.layout.key,
                _finite(score),
                self.exact,
            ),
            runs=verdict.runs,
        )


def _many_rows(cases: list[Case]) -> Case:
    """The uniform case of most tokens."""
    return max((case for case in cases if case.kind == "uniform"), key=lambda case: len(case.x))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite_figures(errors: ErrorFigures | None) -> ErrorFigures | None:
    if errors is None:
        return None
    return ErrorFigures(**{f.name: _finite(getattr(errors, f.name)) for f in fields(ErrorFigures)})


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
