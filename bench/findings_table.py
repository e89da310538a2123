"""Markdown tables of ratios for ``docs/findings.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    out = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    out += ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return "\n".join(out) + "\n"


def ratio_row(device: str, what: str, ratios: Sequence[float]) -> tuple[object, ...]:
    """Count, geometric mean, least, most, and how many are 2 % and more to either side of 1."""
    return (
        device, what, len(ratios), ratio_text(geometric_mean(ratios)), ratio_text(min(ratios)),
        ratio_text(max(ratios)), sum(r > 1.02 for r in ratios), sum(r < 0.98 for r in ratios),
    )  # fmt: skip


def ratio_text(value: float) -> str:
    return f"{value:.2f}"
