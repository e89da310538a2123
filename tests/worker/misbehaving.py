"""Backends that misbehave, one a kind. They are right by construction until they do."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import torch

from autosel.core import CanonicalExperts, Device, Params, Problem, Routing
from autosel.interfaces import Backend, Layout, PackedExperts, Space
from autosel.reference import moe
from tests.fakes import PlainLayout

#: The token count that is swept: none of verification's cases has it.
TOKENS = 5


class Good(Backend):
    """What the reference computes, after ``pause_s``; ``misbehave`` comes first."""

    name: ClassVar[str] = "good"
    summary: ClassVar[str] = "for tests"
    pause_s: ClassVar[float] = 0.0
    #: Misbehave only from this call with TOKENS tokens on; the first one is call 1.
    after: ClassVar[int] = 0
    calls = 0
    done = False

    def supports(self, problem: Problem, device: Device) -> Any:
        return self.available(device)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return PlainLayout()

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        return Space()

    def misbehave(self, x: torch.Tensor) -> None:
        """Nothing here."""

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        self.calls += len(x) == TOKENS
        if self.calls >= self.after:
            self.misbehave(x)
        time.sleep(self.pause_s)
        out.copy_(moe(x, PlainLayout().unpack(packed), routing, dtype=torch.float32))
        return out


class Fast(Good):
    name = "fast"


class Slow(Good):
    name = "slow"
    pause_s = 0.01


class Segfault(Good):
    name = "segfault"

    def misbehave(self, x: torch.Tensor) -> None:
        print("about to read address 0")
        ctypes.string_at(0)


class Aborts(Good):
    name = "aborts"

    def misbehave(self, x: torch.Tensor) -> None:
        os.write(2, b"terminate called: tile 3 is not aligned\n")
        os.abort()


class ExitsZero(Good):
    name = "exits_zero"

    def misbehave(self, x: torch.Tensor) -> None:
        os._exit(0)


class CallsExit(Good):
    name = "calls_exit"

    def misbehave(self, x: torch.Tensor) -> None:
        sys.exit(3)


class KilledFromOutside(Good):
    name = "killed"

    def misbehave(self, x: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LoopsInPython(Good):
    name = "loops"

    def misbehave(self, x: torch.Tensor) -> None:
        while True:
            try:
                time.sleep(0)
            except BaseException:
                continue


class HangsInC(Good):
    """Holds the interpreter's lock, and every signal that can be blocked is."""

    name = "hangs_in_c"

    def misbehave(self, x: torch.Tensor) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            ctypes.PyDLL(None).sleep(1_000_000)


class StopsItself(Good):
    name = "stops_itself"

    def misbehave(self, x: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class TakesAllMemory(Good):
    name = "takes_memory"

    def misbehave(self, x: torch.Tensor) -> None:
        hold = []
        while True:
            hold.append(torch.empty(64 << 20))


class TakesSharedMemory(Good):
    """Mappings that no limit of the process itself counts."""

    name = "shared_memory"

    def misbehave(self, x: torch.Tensor) -> None:
        hold = []
        while True:
            hold.append(mmap.mmap(-1, 64 << 20))
            hold[-1][:] = bytes(64 << 20)


class Floods(Good):
    name = "floods"

    def misbehave(self, x: torch.Tensor) -> None:
        line = b"tuning " * 150_000 + b"\n"
        for _ in range(100):
            os.write(1, line)
        print("drowned in output", flush=True)
        raise RuntimeError("after the flood")


class LeavesProcesses(Good):
    """One busy, one in a session of its own, one that is gone from its parent."""

    name = "leaves_processes"

    def misbehave(self, x: torch.Tensor) -> None:
        if not self.done:
            self.done = True
            mark = "autosel-test-leftover"
            loop = "while :; do :; done"
            subprocess.Popen(["/bin/sh", "-c", loop, mark])
            subprocess.Popen(["/bin/sh", "-c", "sleep 1000; :", mark], start_new_session=True)
            subprocess.Popen(["/bin/sh", "-c", f"sh -c 'sleep 1000; :' {mark} &"]).wait()


class LeavesThenHangs(HangsInC):
    name = "leaves_then_hangs"

    def misbehave(self, x: torch.Tensor) -> None:
        subprocess.Popen(["sleep", "1000"])
        super().misbehave(x)


class ManyProcesses(Good):
    name = "many_processes"

    def misbehave(self, x: torch.Tensor) -> None:
        for _ in range(40):
            subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)


class ForksAndReturns(Good):
    """The copy of the worker comes back from ``run`` as well."""

    name = "forks"

    def misbehave(self, x: torch.Tensor) -> None:
        if not self.done:
            self.done = True
            os.fork()


class OwnBaseError(BaseException):
    pass


class RaisesBase(Good):
    name = "raises_base"

    def misbehave(self, x: torch.Tensor) -> None:
        raise OwnBaseError("not an Exception")


class RaisesInterrupt(Good):
    name = "raises_interrupt"

    def misbehave(self, x: torch.Tensor) -> None:
        raise KeyboardInterrupt


class LongMessage(Good):
    name = "long_message"

    def misbehave(self, x: torch.Tensor) -> None:
        raise RuntimeError("x" * 10_000_000)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for you")


class Unprintable(Good):
    name = "unprintable"

    def misbehave(self, x: torch.Tensor) -> None:
        raise UnprintableError


class Unpicklable(Good):
    name = "unpicklable"

    def misbehave(self, x: torch.Tensor) -> None:
        raise RuntimeError("held a lock", threading.Lock())


class WritesInput(Good):
    name = "writes_input"

    def misbehave(self, x: torch.Tensor) -> None:
        x.mul_(2)


class ReturnsEarly(Good):
    name = "returns_early"

    def run(self, packed: Any, x: Any, routing: Any, params: Any, out: torch.Tensor) -> Any:
        return out


class ChangesSettings(Good):
    """Right, but everything that a process shares is different after it."""

    name = "changes_settings"

    def misbehave(self, x: torch.Tensor) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(not torch.is_grad_enabled())
        torch.manual_seed(1)
        random.seed(1)
        os.chdir("/")
        os.environ["AUTOSEL_TEST_LEAK"] = "leaked"
        sys.path.clear()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(1000)


class ReportsSettings(Good):
    """Says what it finds, as an error; comes after the one that changes it."""

    name = "reports_settings"

    def misbehave(self, x: torch.Tensor) -> None:
        found = {
            "threads": torch.get_num_threads(),
            "dtype": torch.get_default_dtype(),
            "cwd": os.getcwd(),
            "leak": os.environ.get("AUTOSEL_TEST_LEAK"),
            "path": bool(sys.path),
            "term": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
            "alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        }
        raise RuntimeError(f"found {found}")


class ClosesStreams(Good):
    name = "closes_streams"

    def misbehave(self, x: torch.Tensor) -> None:
        for number in range(3):
            with contextlib.suppress(OSError):  # it did so in the call before
                os.close(number)


class ClosesEverything(Good):
    name = "closes_everything"

    def misbehave(self, x: torch.Tensor) -> None:
        os.closerange(3, 1024)


class HangsAtExit(Good):
    name = "hangs_at_exit"

    def misbehave(self, x: torch.Tensor) -> None:
        if not self.done:
            self.done = True
            atexit.register(time.sleep, 1000)
            threading.Thread(target=time.sleep, args=(1000,)).start()


class PoisonsDevice(Good):
    name = "poisons"

    def misbehave(self, x: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")


class CrashesInTiming(Segfault):
    name = "crashes_in_timing"
    after = 4


class HangsInTiming(LoopsInPython):
    name = "hangs_in_timing"
    after = 4


class PoisonsInTiming(PoisonsDevice):
    name = "poisons_in_timing"
    after = 4


class CrashingLayout(PlainLayout):
    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        os.abort()


class CrashesPacking(Good):
    name = "crashes_packing"

    def layout(self, problem: Problem, params: Params) -> Layout:
        return CrashingLayout(label="crashing")


class DiskFull(Good):
    name = "disk_full"

    def misbehave(self, x: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")


class RaisesFromHandler(Good):
    """In a worker a signal handler is a candidate's own, and so is what it raises."""

    name = "raises_from_handler"

    def misbehave(self, x: torch.Tensor) -> None:
        def handler(*_: object) -> None:
            raise RuntimeError("raised by a handler")

        signal.signal(signal.SIGUSR2, handler)
        signal.raise_signal(signal.SIGUSR2)


#: What becomes of each kind: status, and words of the reason.
BAD: dict[type[Good], tuple[str, str]] = {
    Segfault: ("crashed", "SIGSEGV"),
    Aborts: ("crashed", "tile 3 is not aligned"),
    ExitsZero: ("crashed", "exit status 0"),
    CallsExit: ("failed", "SystemExit: 3"),
    KilledFromOutside: ("crashed", "SIGKILL"),
    LoopsInPython: ("timeout", "no end after"),
    HangsInC: ("timeout", "no end after"),
    StopsItself: ("timeout", "no end after"),
    TakesAllMemory: ("oom", ""),
    Floods: ("failed", "after the flood"),
    ManyProcesses: ("crashed", "processes at once"),
    RaisesBase: ("failed", "OwnBaseError: not an Exception"),
    RaisesInterrupt: ("failed", "KeyboardInterrupt"),
    LongMessage: ("failed", "xxx"),
    Unprintable: ("failed", "UnprintableError: its message cannot be printed"),
    Unpicklable: ("failed", "held a lock"),
    WritesInput: ("wrong", "changed its input"),
    ReturnsEarly: ("nonfinite", "NaN"),
    ClosesEverything: ("crashed", "first call"),
    PoisonsDevice: ("crashed", "illegal memory access"),
    CrashesInTiming: ("crashed", "time: took its process down: SIGSEGV"),
    HangsInTiming: ("timeout", "time: no end after"),
    PoisonsInTiming: ("crashed", "time: RuntimeError: CUDA error: an illegal memory access"),
    CrashesPacking: ("crashed", "pack: took its process down: SIGABRT"),
    ReportsSettings: ("failed", "found"),
    RaisesFromHandler: ("failed", "raised by a handler"),
}

#: These are right, whatever else they do.
HARMLESS: tuple[type[Good], ...] = (
    ChangesSettings,
    ClosesStreams,
    LeavesProcesses,
    ForksAndReturns,
    HangsAtExit,
)
