"""A short check of compatible results on this machine: are the winners right, and do they win?

Every winner of an entry runs here and is compared with the emulation; at three token counts the
winner is then timed against the runner-up. What fails here is not used; what passes decides from
then on, and the result is kept so that this runs once. It takes at most :data:`BUDGET_S` seconds
beside reading the weights: whoever does not get through in that time has not passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

import torch

from autosel import registry, stats
from autosel.compare import compare
from autosel.core import Candidate, CanonicalExperts, Decision, Device, Routing
from autosel.dtypes import torch_dtype
from autosel.error_scale import judge
from autosel.expert_map import local_map, localize
from autosel.failures import failed, is_passing
from autosel.handlers import let_through
from autosel.interfaces import PackedExperts
from autosel.layer_check import make_probe
from autosel.packs.canary_results import CanaryResult
from autosel.packs.library import why_illegal
from autosel.packs.model import Entry
from autosel.routing_synthetic import make_routing
from autosel.timing import Timer, TimingSettings, time_candidates, timer_for
from autosel.verify_cases import activation_size

#: Seconds that one check may take.
BUDGET_S = 10.0
#: A winner that is clearly (95 % interval) slower than its runner-up by more than this has lost
#: its place. Less than that was perhaps a tie on the other machine as well.
TOLERANCE = 0.05
#: Tokens of a timed call whose rows are compared with the emulation, the last one among them.
JUDGED_ROWS = 2
#: Inputs and outputs of one timed call may take this much.
MOST_BYTES = 4 << 30
#: Tokens of the first call that tells how long a larger one takes, and how many times as many the
#: next one has.
FIRST_TOKENS, MORE = 64, 4
#: Calls of each candidate at the full count: to try, to warm up, to time and to judge.
FULL_CALLS = 6


class _RefusedError(Exception):
    """Why the check is not passed, in words."""


@dataclass
class _Canary:
    entry: Entry
    experts: CanonicalExperts
    device: Device
    expert_map: torch.Tensor | None
    timer: Timer | None
    deadline: float
    packed: dict[str, PackedExperts] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def run(self) -> str:
        """What was found, in words; raises _RefusedError when it is not passed."""
        for decision in self.entry.decisions:
            for candidate in filter(None, (decision.winner, decision.runner_up)):
                tokens = decision.bucket.measured
                why = why_illegal(candidate, self.entry.problem, self.device, tokens)
                if why and candidate == decision.winner:
                    raise _RefusedError(why)
        probe = make_probe(self.experts, self.expert_map)
        winners = dict.fromkeys(d.winner for d in self.entry.decisions)
        for candidate in winners:
            out = self._call(candidate, probe.x, probe.routing)()
            self._judge(candidate, out, probe.judged, "the winner")
        chosen = three(self.entry.decisions)
        for decision in chosen:
            self._time(decision)
        counts = ", ".join(str(d.bucket.measured) for d in chosen)
        return f"{len(winners)} winners are right and hold their place at {counts} tokens"

    def _time(self, decision: Decision) -> None:
        tokens = decision.bucket.measured
        problem = self.entry.problem
        rival = decision.runner_up
        if rival is not None and why_illegal(rival, problem, self.device, tokens):
            rival = None
        self._check_size(tokens)
        _ = self._size  # what is needed once is not to count as what each token takes
        self._check_pace(decision.winner, rival, tokens)
        x, routing = self._inputs(tokens)
        calls = {decision.winner: self._call(decision.winner, x, routing)}
        if rival is not None:
            try:
                trial = self._call(rival, x, routing)
                trial()
                calls[rival] = trial
            except Exception as error:
                let_through(error)
                self._left()  # a rival that does not run here wins nothing
        left = self._left()
        cache: Literal["cold", "hot"] = "hot" if self.entry.timing.get("cache") == "hot" else "cold"
        settings = TimingSettings(
            cache=cache, rounds=5, samples_per_round=4, limit_s=max(0.05, left / 8)
        )
        timer = self.timer or timer_for(self.device, settings)
        timed = time_candidates(calls, settings, timer)
        mine = timed[decision.winner]
        if mine.error is not None:
            why = failed(mine.error, f"{decision.winner.key} time")[1]
            raise _RefusedError(why) from mine.error
        self._judge_rows(decision.winner, calls[decision.winner](), x, routing)
        quantile = stats.ranking_quantile(self.device.kind)
        winner = stats.estimate(mine.times_us, quantile)
        figures = {"winner_us": winner.us, "made_us": decision.winner_us}
        other = timed.get(rival) if rival is not None else None
        if other is not None and other.error is None and other.times_us:
            second = stats.estimate(other.times_us, quantile)
            figures["runner_up_us"] = second.us
            if winner.over(second).exceeds(TOLERANCE, 0.95):
                raise _RefusedError(
                    f"at {tokens} tokens {decision.winner.key} takes {winner.us:.4g} us here and "
                    f"{rival.key if rival else ''} {second.us:.4g} us"
                )
        self.figures[str(tokens)] = figures
        self._left()

    @cached_property
    def _size(self) -> float:
        return activation_size(self.experts)

    def _inputs(self, tokens: int) -> tuple[torch.Tensor, Routing]:
        problem = self.entry.problem
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, problem.hidden_size, generator=generator)
        x = (x * self._size).to(torch_dtype(problem.act_dtype))
        x = x.to(self.experts.w13.codes.device)
        return x, make_routing(self.entry.routing, tokens, problem, seed=0, device=x.device)

    def _check_size(self, tokens: int) -> None:
        """The count is a number in a stranger's file: refuse before anything is allocated."""
        problem = self.entry.problem
        # x in float32 and in the act dtype, two outputs, and the routing's random numbers.
        values = problem.hidden_size * (4 + 3 * torch_dtype(problem.act_dtype).itemsize)
        needed = tokens * (values + 16 * problem.num_experts)
        if needed > MOST_BYTES:
            raise _RefusedError(
                f"at {tokens} tokens inputs and outputs take {needed / 2**30:.3g} GiB, the check "
                f"allows {MOST_BYTES / 2**30:.3g} GiB"
            )

    def _check_pace(self, winner: Candidate, rival: Candidate | None, tokens: int) -> None:
        """Refuse a count that would not get through in what is left of the budget.

        A call cannot be broken off, so smaller counts tell how long it would take. In proportion
        they tell too much, since a part does not depend on the count: that is enough to go on.
        What comes on top from one count to the next is enough to refuse.
        """
        count, before, before_s = FIRST_TOKENS, 0, 0.0
        while count < tokens:
            took_s = self._sample_s(winner, rival, count)
            left = self._left()
            if took_s * tokens / count <= left:
                return
            each_s = max(0.0, took_s - before_s) / (count - before) if before else 0.0
            expected_s = took_s + each_s * (tokens - count)
            if expected_s > left:
                raise _RefusedError(
                    f"at {tokens} tokens it would take about {expected_s:.3g} s, found "
                    f"{left:.3g} s left of {BUDGET_S:g}"
                )
            before, before_s, count = count, took_s, count * MORE

    def _sample_s(self, winner: Candidate, rival: Candidate | None, tokens: int) -> float:
        """What inputs and all calls of both take at so many tokens."""
        began = time.monotonic()
        x, routing = self._inputs(tokens)
        took_s = time.monotonic() - began + FULL_CALLS * self._seconds(winner, x, routing)
        if rival is not None:
            try:
                took_s += FULL_CALLS * self._seconds(rival, x, routing)
            except Exception as error:
                let_through(error)
        return took_s

    def _seconds(self, candidate: Candidate, x: torch.Tensor, routing: Routing) -> float:
        """One call after a first one, which may compile."""
        call = self._call(candidate, x, routing)
        for _ in range(2):
            began = time.monotonic()
            call()
            if x.device.type != "cpu":
                torch.accelerator.synchronize(x.device)
            self._left()
        return time.monotonic() - began

    def _call(
        self, candidate: Candidate, x: torch.Tensor, routing: Routing
    ) -> Callable[[], torch.Tensor]:
        """A call of the candidate's backend with an output of its own."""
        params = candidate.params_dict
        try:
            backend = registry.get(candidate.backend)
            support = backend.supports(self.entry.problem, self.device)
            if not support:
                raise _RefusedError(f"{candidate.key} is not supported here: {support}")
            if candidate.layout not in self.packed:
                made = backend.layout(self.entry.problem, params).pack(self.experts)
                self.packed[candidate.layout] = made
            packed = self.packed[candidate.layout]
            local = localize(routing, self.entry.problem, self.expert_map, device=x.device)
            out = torch.full_like(x, torch.nan)
        except _RefusedError:
            raise
        except Exception as error:
            raise _RefusedError(failed(error, f"{candidate.key} pack")[1]) from error
        self._left()

        def call() -> torch.Tensor:
            return backend.run(packed, x, local, params, out)

        return call

    def _judge_rows(
        self, candidate: Candidate, out: torch.Tensor, x: torch.Tensor, routing: Routing
    ) -> None:
        rows = torch.linspace(0, len(x) - 1, min(JUDGED_ROWS, len(x)), device=x.device).long()
        some = Routing(routing.topk_ids[rows], routing.topk_weights[rows])
        wide = torch.float64 if self.entry.problem.act_dtype == "float32" else torch.float32
        judged = judge(x[rows], self.experts, some, expert_map=self.expert_map, dtype=wide)
        self._judge(candidate, out[rows], judged, f"the winner at {len(x)} tokens")

    def _judge(self, candidate: Candidate, out: torch.Tensor, judged: Any, what: str) -> None:
        accuracy = registry.get(candidate.backend).accuracy(candidate.params_dict)
        verdict = compare(
            out,
            judged.reference,
            accuracy=accuracy,
            act_dtype=self.entry.problem.act_dtype,
            scale=judged.scales[accuracy],
            overflows=judged.overflows,
        )
        if not verdict:
            raise _RefusedError(f"{what} {candidate.key} is {verdict.status}: {verdict.reason}")

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _RefusedError(f"it did not get through in {BUDGET_S:g} s")
        return left


def run(
    entry: Entry,
    experts: CanonicalExperts,
    device: Device,
    *,
    expert_map: torch.Tensor | None = None,
    timer: Timer | None = None,
    budget_s: float = BUDGET_S,
) -> CanaryResult:
    """Check ``entry`` on ``device``, where ``experts`` lie. Raises nothing: what fails is told.

    expert_map  int32 ``[num_experts]``, as of :class:`autosel.FusedMoE`; left out where all
                experts are here, and made for rank 0 where they are not
    timer       a clock of the caller's own
    """
    began = time.monotonic()
    problem = entry.problem
    if expert_map is None and problem.num_local_experts != problem.num_experts:
        expert_map = local_map(problem, device=experts.w13.codes.device)
    canary = _Canary(entry, experts, device, expert_map, timer, began + budget_s)
    cause: BaseException | None = None
    try:
        passed, why = True, canary.run()
    except _RefusedError as refused:
        passed, why, cause = False, str(refused), refused.__cause__
    except Exception as error:
        passed, why, cause = False, failed(error, "the check")[1], error
    return CanaryResult(
        passed,
        " ".join(why.split())[:1000],
        round(time.monotonic() - began, 3),
        datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        canary.figures,
        passing=cause is not None and is_passing(cause),
    )


def three(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """The decisions of the smallest, a middle and the largest token count, each once."""
    ordered = sorted(decisions, key=lambda d: d.bucket.measured)
    places = dict.fromkeys((0, len(ordered) // 2, len(ordered) - 1)) if ordered else {}
    return tuple(ordered[place] for place in places)
