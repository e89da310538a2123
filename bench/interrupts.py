"""How the programs here end when somebody ends them."""

from __future__ import annotations

import signal

#: The exit status of a program that was interrupted.
INTERRUPTED = 130


def end_cleanly() -> None:
    """Have SIGTERM, and an interrupt of a background job, raise KeyboardInterrupt: a shell starts
    such jobs with interrupts ignored."""
    for wish in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wish, signal.default_int_handler)
