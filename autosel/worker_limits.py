"""How long a candidate's steps may take, and how much of the machine, before it is ended."""

from __future__ import annotations

from dataclasses import dataclass, fields

from autosel.errors import AutoselError, field_error


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits on each step of one candidate in a worker process; seconds of wall time.

    start_s       the process: importing torch, opening the device
    load_s        reading the layer's weights and working out the right results, which is no
                  candidate's doing and large for a large layer
    pack_s        packing the weights
    first_call_s  the first call, compilation included
    verify_s      every judged case, and for a winner everything that its certificate says. Much of
                  it is our own work, which grows with the layer
    call_s        one call while timing, its flush included
    memory_bytes  resident memory of the worker and the processes it started; None: what was free
                  when the step began, less a reserve
    processes     processes that a candidate may have at once; compilers are some
    """

    start_s: float = 180.0
    load_s: float = 7200.0
    pack_s: float = 600.0
    first_call_s: float = 600.0
    verify_s: float = 1800.0
    call_s: float = 300.0
    memory_bytes: int | None = None
    processes: int = 256

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not value > 0:
                raise AutoselError(
                    field_error(f"StepLimits.{item.name}", "value", value, "more than 0")
                )

    def seconds(self, step: str) -> float:
        """The limit of a step by the name that :class:`~autosel.tune_types.Observer` hears."""
        return {
            "start": self.start_s,
            "load": self.load_s,
            "pack": self.pack_s,
            "first call": self.first_call_s,
            "verify": self.verify_s,
            "prove": self.verify_s,
            "time": self.call_s,
        }[step]
