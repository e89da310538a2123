"""A page from the rows of ``bench.verify_backends``: what was verified, what was refused and why.

    python -m bench.verify_table results/nvidia-h200/verify_backends.csv \\
        > results/nvidia-h200/backends.md

Several files may be given; their rows are taken together.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

Row = dict[str, str]
HEAD = """# Backends verified on {device}

Every backend on made-up weights that went through the tensors of each checkpoint format: groups of
32, 64, 128 and per channel, 4 and 8 bit, bfloat16 and float16 activations, and layers with a path
of their own (padding, one group, no gate, bias, expert parallelism, router weight on the input, 60
experts). Each candidate ran every verification case from an output full of NaN and was judged
against the emulation ([correctness.md](../../docs/correctness.md)).

    {command}

{counts}.
"""
COMMAND = "python -m bench.verify_backends --jobs 15 --csv verify_backends.csv"


def read(paths: Iterable[str]) -> list[Row]:
    rows: list[Row] = []
    for path in paths:
        with open(path, newline="") as stream:
            rows += csv.DictReader(stream)
    return rows


def ordered(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))


def cell(rows: Sequence[Row]) -> str:
    """``16 ok``, ``12 ok, 4 refused``; anything else stands in bold."""
    count = Counter(row["status"] for row in rows)
    words = {"ok": "ok", "unsupported": "refused"}
    parts = [f"{count[status]} {word}" for status, word in words.items() if count[status]]
    parts += [f"**{n} {status}**" for status, n in count.items() if status not in words]
    return ", ".join(parts) or "-"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for line in body:
        yield "| " + " | ".join(line) + " |"
    yield ""


def crossed(rows: Sequence[Row], field: str) -> Iterator[str]:
    """Backends down, the values of ``field`` across."""
    across, backends = ordered(rows, field), ordered(rows, "backend")
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["backend"], row[field]].append(row)
    body = ([f"`{b}`", *(cell(found[b, value]) for value in across)] for b in backends)
    yield from table(["backend", *across], body)


def errors(rows: Sequence[Row]) -> Iterator[str]:
    """The largest error of each backend and activation type, and how near to its limit."""
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        if row["rel_rms"]:
            key = row["backend"], row["act_dtype"]
            old = worst.get(key, (0.0, 0.0))
            worst[key] = max(old[0], float(row["rel_rms"])), max(old[1], float(row["score"] or 0))
    body = ([f"`{b}`", d, f"{rms:.2e}", f"{score:.2f}"] for (b, d), (rms, score) in worst.items())
    head = ["backend", "activations", "largest relative RMS error", "share of its limit"]
    yield from table(head, body)


def reasons(rows: Sequence[Row], bad: bool) -> Iterator[str]:
    count: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row["status"] != "ok" and (row["status"] != "unsupported") is bad:
            count[row["backend"], row["status"], row["reason"].replace("|", "\\|")] += 1
    body = ([f"`{b}`", str(n), status, why] for (b, status, why), n in count.most_common())
    yield from table(["backend", "rows", "status", "reason"], body)


def page(rows: Sequence[Row]) -> str:
    plain = [row for row in rows if row["layer"] == "plain"]
    special = [row for row in rows if row["layer"] != "plain"]
    statuses = ", ".join(f"{n} {s}" for s, n in Counter(r["status"] for r in rows).most_common())
    head = HEAD.format(
        device=" and ".join(ordered(rows, "device")),
        command=COMMAND,
        counts=f"{len(rows)} rows: {statuses}",
    )
    parts = [head, "## The plain layer by format\n", *crossed(plain, "format")]
    if special:
        parts += ["## Other layers\n", *crossed(special, "layer")]
    parts += ["## Errors\n", *errors(rows)]
    if any(row["status"] not in ("ok", "unsupported") for row in rows):
        parts += ["## Neither ok nor refused\n", *reasons(rows, bad=True)]
    parts += ["## Refusals\n", *reasons(rows, bad=False)]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", nargs="+")
    sys.stdout.write(page(read(parser.parse_args().csv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
