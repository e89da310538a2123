"""Ranks of scripted groups, forked from one process that has imported everything once.

Reads lines of JSON: folder, number of ranks, scenario, ranks that will not end. Each rank writes
RANK.json into the folder; "done" is printed when all others have ended. Scenarios are functions of
a :class:`Stage`: what they return, or the line they raise, is the answer.
"""

import json
import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from autosel.canonical import check_experts
from autosel.core import Candidate, Decision, Measurement, Reason, Support, TokenBucket
from autosel.device import detect, pretend
from autosel.errors import AutoselError
from autosel.layer import FusedMoE
from autosel.ranks import Patience, Ranks
from autosel.ranks_sweep import sweep_together
from autosel.reference import moe
from autosel.registry import register
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_types import SweepSettings
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, PlainLayout

COLD = (("cache", "cold"), ("clock", "scripted"))
SHORT = Patience(meet=60.0, silence=5.0, beat=0.2)


class Fake(FakeBackend):
    """Takes local ids, as backends get them where experts are elsewhere."""

    def run(self, packed, x, routing, params, out):
        problem = packed.problem
        if problem.num_local_experts == problem.num_experts:
            return super().run(packed, x, routing, params, out)
        local = torch.arange(problem.num_experts, dtype=torch.int32)
        local[problem.num_local_experts :] = -1
        experts = self.plain.unpack(packed)
        return out.copy_(moe(x, experts, routing, expert_map=local, dtype=torch.float32))


@dataclass
class Stage:
    rank: int
    size: int
    folder: Path
    fakes: ExitStack

    def register(self, name: str, **hooks) -> FakeBackend:
        fake = Fake(Clock(), **hooks)
        fake.__class__ = type(name.title(), (Fake,), {"name": name})
        self.fakes.enter_context(register(fake))
        return fake

    def experts(self, problem=PROBLEM):
        experts = RandomSource(problem, seed=self.rank).load()
        check_experts(experts)
        return experts

    def store(self, *winners: str, problem=PROBLEM) -> Path:
        """A database of this rank's own: every candidate measured, the first one decided."""
        path = self.folder / f"rank{self.rank}.db"
        with Store.open(path) as store:
            for us, name in enumerate(winners, 10):
                store.add_measurement(measured(name, us, problem))
            store.add_decision(decided(winners[0], problem), CPU, COLD)
        return path

    def layer(self, db, problem=PROBLEM, **options) -> FusedMoE:
        options.setdefault("decide_group", distributed.group.WORLD)
        return FusedMoE.from_experts(self.experts(problem), db=db, **options)


def measured(name: str, us: float, problem=PROBLEM) -> Measurement:
    times = tuple(us + 0.001 * i for i in range(20))
    candidate = Candidate.of(name, {}, "plain")
    return Measurement(problem, 16, "uniform", candidate, CPU, "ok", times_us=times, timing=COLD)


def decided(name: str, problem=PROBLEM) -> Decision:
    winner = Candidate.of(name, {}, "plain")
    bucket = TokenBucket(1, None, 16)
    return Decision(problem, bucket, "uniform", winner, 10.0, None, None, None, None, False, "fast")


def served(layer: FusedMoE) -> dict:
    """Choices, and whether the layer really runs them."""
    x = torch.randn(3, layer.problem.hidden_size, dtype=torch.bfloat16)
    ids = torch.zeros(3, layer.problem.top_k, dtype=torch.int32)
    ids[:, 1] = 1
    out = layer(x, ids, torch.full(ids.shape, 0.5))
    assert bool(out.isfinite().all())
    return {"choices": [[c.bucket.label, c.candidate.key, c.tuned] for c in layer.choices]}


# scenarios ---------------------------------------------------------------------------------


def asymmetric(stage: Stage) -> dict:
    """The leader has decisions; the others another's, none, a damaged or an unwritable file."""
    for name in ("alpha", "beta"):
        stage.register(name)
    db = stage.folder / "nothing" / "there.db"
    if stage.rank == 0:
        db = stage.store("alpha", "beta")
    elif stage.rank == 1:
        db = stage.store("beta", "alpha")
    elif stage.rank == 2:
        db = stage.folder / "damaged.db"
        db.write_bytes(b"no database at all " * 500)
    else:
        db = stage.folder / "rank3"
        db.mkdir()  # no file can be there
    return served(stage.layer(db))


def leader_has_nothing(stage: Stage) -> dict:
    stage.register("alpha")
    db = ":memory:" if stage.rank == 0 else stage.store("alpha")
    return served(stage.layer(db))


def veto_by_support(stage: Stage) -> dict:
    """The last rank's machine lacks what the winner needs."""
    last = stage.rank == stage.size - 1
    no = Support.no(Reason("memory", "1 GiB", "2 GiB"))
    stage.register("alpha", supports=lambda: no if last else Support.yes())
    stage.register("beta")
    return served(stage.layer(stage.store("alpha", "beta") if stage.rank == 0 else ":memory:"))


def out_of_memory(stage: Stage) -> dict:
    """Packing the winner does not fit on the last rank; the layout of the second does."""

    def fault() -> None:
        if stage.rank == stage.size - 1:
            raise torch.OutOfMemoryError("scripted: no room")

    stage.register("alpha", layout=PlainLayout("greedy", fault=fault))
    stage.register("beta")
    db = stage.folder / f"rank{stage.rank}.db"
    if stage.rank == 0:
        with Store.open(db) as store:
            greedy = Candidate.of("alpha", {}, "greedy")
            store.add_measurement(replace(measured("alpha", 5), candidate=greedy))
            store.add_measurement(measured("beta", 10))
            store.add_decision(replace(decided("alpha"), winner=greedy), CPU, COLD)
    answer = served(stage.layer(db))
    if stage.rank == 0:
        with Store.open(db) as store:  # another rank's memory is no fault of this machine
            answer["leader_rows"] = sorted(m.status for m in store.measurements())
    return answer


def wrong_on_one(stage: Stage) -> dict:
    def spoil(x, out, packed) -> None:
        if stage.rank == 1:
            out.mul_(1.5)

    stage.register("alpha", spoil=spoil)
    stage.register("beta")
    return served(stage.layer(stage.store("alpha", "beta") if stage.rank == 0 else ":memory:"))


def nothing_usable(stage: Stage) -> dict:
    """Every default is refused somewhere: all ranks say the same."""
    import autosel.layer_choice as choice

    choice.DEFAULTS = ("alpha",)
    no = Support.no(Reason("device", "old", "new"))
    stage.register("alpha", supports=lambda: no if stage.rank == stage.size - 1 else Support.yes())
    return served(stage.layer(":memory:"))


def leader_fails(stage: Stage) -> dict:
    import autosel.ranks_choice as ranks_choice

    def broken(self):
        raise OSError("the leader's disk\nis gone")

    ranks_choice.Chooser.table = broken
    return served(stage.layer(":memory:"))


def weights_missing_on_one(stage: Stage) -> dict:
    stage.register("alpha")
    if stage.rank == stage.size - 1:

        class Torn(RandomSource):
            def load(self, device="cpu"):
                raise AutoselError("shard 3: expert 5: found nothing, expected w2")

        source = Torn(PROBLEM, 0)
    else:
        source = RandomSource(PROBLEM, 0)
    layer = FusedMoE.from_source(source, db=":memory:", decide_group=distributed.group.WORLD)
    return served(layer)


def other_layer_on_one(stage: Stage) -> dict:
    stage.register("alpha")
    problem = replace(PROBLEM, hidden_size=64) if stage.rank == 1 else PROBLEM
    return served(stage.layer(":memory:", problem))


def refused_on_one(stage: Stage) -> dict:
    """One rank's arguments are wrong before it ever meets the others."""
    stage.register("alpha")
    device = "no such device" if stage.rank == stage.size - 1 else "cpu"
    return served(stage.layer(":memory:", device=device))


def folder_missing_on_one(stage: Stage) -> dict:
    """A checkpoint that one rank cannot open: it fails before it ever meets the others."""
    return from_folder(stage, lambda path, group: FusedMoE.from_checkpoint(path, 0, **group))


def model_missing_on_one(stage: Stage) -> dict:
    from autosel import load_moe_layers

    return from_folder(stage, lambda path, group: load_moe_layers(path, **group)[0])


def from_folder(stage: Stage, load) -> dict:
    there = Path(__file__).resolve().parents[1] / "fixtures/checkpoints/ct-w4-g128-sym-mixtral"
    path = stage.folder / "nowhere" if stage.rank == stage.size - 1 else there
    return served(load(path, {"db": ":memory:", "reduce_group": distributed.group.WORLD}))


def uneven_experts(stage: Stage) -> dict:
    """Expert parallelism that does not divide: the parts differ, the candidate does not."""
    for name in ("alpha", "beta"):
        stage.register(name)
    whole = replace(PROBLEM, num_experts=6, num_local_experts=6)
    held = {2: (3, 3), 4: (2, 2, 1, 1)}[stage.size][stage.rank]
    part = replace(whole, num_local_experts=held)
    first = sum({2: (3, 3), 4: (2, 2, 1, 1)}[stage.size][: stage.rank])
    expert_map = torch.full((6,), -1, dtype=torch.int32)
    expert_map[first : first + held] = torch.arange(held, dtype=torch.int32)
    db = stage.store("alpha", "beta", problem=part) if stage.rank == 0 else ":memory:"
    return served(stage.layer(db, part, expert_map=expert_map))


def runtime_failure(stage: Stage) -> dict:
    """A candidate that raises in a call on one rank is not replaced there alone."""
    calls = []

    def before(params) -> None:
        calls.append(1)
        if stage.rank == 1 and len(calls) > 1:
            raise RuntimeError("scripted: late fault")

    stage.register("alpha", before=before)
    stage.register("beta")
    layer = stage.layer(stage.store("alpha", "beta") if stage.rank == 0 else ":memory:")
    return served(layer)


def slow_leader(stage: Stage) -> dict:
    """The leader works longer than any silence is allowed to last."""
    ranks = Ranks(patience=Patience(meet=60.0, silence=1.0, beat=0.2))
    return {"answer": ranks.lead(lambda: time.sleep(3.0) or {"a": [1, None, "é"]})}


def leader_killed(stage: Stage) -> dict:
    return Ranks(patience=SHORT).lead(lambda: os.kill(os.getpid(), signal.SIGKILL))


def leader_stopped(stage: Stage) -> dict:
    def work() -> None:
        time.sleep(1.0)  # signs of life have come by then
        os.kill(os.getpid(), signal.SIGSTOP)

    return Ranks(patience=SHORT).lead(work)


def follower_killed(stage: Stage) -> dict:
    ranks = Ranks(patience=SHORT)
    if stage.rank == stage.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(1)
    return {}


def leader_interrupted(stage: Stage) -> dict:
    def work():
        raise KeyboardInterrupt

    try:
        return Ranks(patience=SHORT).lead(work)
    except KeyboardInterrupt:
        return {"interrupted": True}


def messages(stage: Stage) -> dict:
    """Sizes from nothing to more than a packet, from every rank."""
    ranks = Ranks()
    sizes = [0, 1, 100_000 * (stage.rank + 1)]
    got = [[len(text) for text in ranks.gather("x" * size)] for size in sizes]
    return {"got": got, "led": ranks.lead(lambda: {"from": stage.rank})}


def subgroups(stage: Stage) -> dict:
    """Two groups with equal inner ranks and different layers share one database file."""
    halves = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    group = halves[stage.rank // 2]
    for name in ("alpha", "beta"):
        stage.register(name)
    name = ("alpha", "beta")[stage.rank // 2]
    problem = replace(PROBLEM, hidden_size=32 * (1 + stage.rank // 2))
    ranks = Ranks(group)
    path = stage.folder / "shared.db"

    def tune() -> None:
        with Store.open(path, strict=True) as store:
            for us, each in enumerate((name, "alpha", "beta"), 10):
                store.add_measurement(measured(each, us, problem))
            store.add_decision(decided(name, problem), CPU, COLD)

    ranks.lead(tune)
    answer = served(stage.layer(path, problem, decide_group=group))
    distributed.barrier()
    with Store.open(path, strict=True) as store:
        answer["entries"] = sorted(entry.problem.hidden_size for entry in store.entries())
    return answer


def no_group_is_alone(stage: Stage) -> dict:
    """Without a group each process decides for itself, and nobody waits."""
    for name in ("alpha", "beta"):
        stage.register(name)
    if stage.rank == stage.size - 1:
        return {"choices": "not made here"}
    return served(stage.layer(stage.store(("alpha", "beta")[stage.rank % 2]), decide_group=None))


def alone_they_differ(stage: Stage) -> dict:
    """What :func:`asymmetric` would give if each rank followed its own database."""
    for name in ("alpha", "beta"):
        stage.register(name)
    order = ("alpha", "beta") if stage.rank == 0 else ("beta", "alpha")
    return served(stage.layer(stage.store(*order), decide_group=None))


def sweep(stage: Stage, **hooks) -> dict:
    settings = SweepSettings(
        token_counts=(1, 16), backends=("alpha", "beta", "gamma"),
        timing=TimingSettings(rounds=2, samples_per_round=5, limit_s=2.0),
    )  # fmt: skip
    clock = Clock()
    noise = torch.Generator().manual_seed(stage.rank)
    for number, name in enumerate(("alpha", "beta", "gamma")):

        def us(routing, params, number=number) -> float:
            # Close, and another order on every rank.
            base = 100.0 + 3.0 * ((number + stage.rank) % 3)
            return base * (1 + 0.02 * float(torch.rand((), generator=noise)))

        fake = stage.register(name, us=us, **hooks.get(name, {}))
        fake.clock = clock
    stored = stage.folder / f"rank{stage.rank}.db"
    with Store.open(stored) as store:
        result = sweep_together(
            RandomSource(PROBLEM, 0), settings, ranks=Ranks(), device=CPU, store=store, timer=clock
        )
        rows = len(store.measurements(history=True))
    return {
        "winners": [[d.bucket.label, d.winner.key] for d in result.decisions],
        "rejected": [
            [r.candidate.key, r.status, r.reason] for d in result.decisions for r in d.rejected
        ],
        "measurements": len(result.measurements),
        "rows": rows,
    }


def sweep_with_noise(stage: Stage) -> dict:
    return sweep(stage)


def sweep_with_memory_fault(stage: Stage) -> dict:
    def before(params) -> None:
        if stage.rank == stage.size - 1:
            raise torch.OutOfMemoryError("scripted: no room here")

    return sweep(stage, alpha={"before": before})


def sweep_fails(stage: Stage) -> dict:
    if stage.rank == 0:
        import autosel.ranks_sweep as ranks_sweep

        def broken(*args, **options):
            raise AutoselError("weights: found nothing, expected a shard")

        ranks_sweep.sweep = broken
    return sweep(stage)


def main(rank: int, size: int, folder: Path, scenario: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=90),
    )
    device = replace(CPU, versions=(("torch", "0"),)) if scenario == "stale" else CPU
    with pretend(device), ExitStack() as fakes:
        assert detect() == device
        try:
            answer = globals()[scenario](Stage(rank, size, folder, fakes))
        except AutoselError as error:
            answer = {"raised": type(error).__name__, "line": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    alone = ("leader_interrupted", "follower_killed", "runtime_failure")
    if "raised" not in answer and scenario not in alone:
        distributed.barrier()
        distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a broken group would wait at exit


def serve() -> None:
    for line in sys.stdin:
        folder, size, scenario, dead = json.loads(line)
        ranks = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                try:
                    main(rank, size, Path(folder), scenario)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            ranks.append(pid)
        codes = {rank: os.waitpid(ranks[rank], 0)[1] for rank in range(size) if rank not in dead}
        for rank in dead:  # one that was stopped never ends
            os.kill(ranks[rank], signal.SIGKILL)
            os.waitpid(ranks[rank], 0)
        print(json.dumps(sorted(rank for rank, code in codes.items() if code)), flush=True)


if __name__ == "__main__":
    serve()
