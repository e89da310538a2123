"""From sweeps to what ships in ``results/DEVICE/``, in two commands.

``python -m bench.device_results sweep results/DEVICE/sweeps.txt --db FILE``
    runs the sweeps of a text file one after the other (:mod:`bench.device_results_sweep`);
    the same command goes on where it was stopped.
``python -m bench.device_results export --db FILE -o results/DEVICE``
    writes packs, samples, decisions and the environment (:mod:`bench.device_results_export`);
    ``scripts/results-index`` then makes figures, report and index.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from autosel.cli.options import duration, names
from autosel.cpuinfo import usable_cpus
from autosel.errors import AutoselError
from bench import device_results_export, device_results_sweep
from bench.device_results_lines import read_lines
from bench.interrupts import INTERRUPTED, end_cleanly

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 something failed or was refused, 2 usage, 130 interrupted."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except AutoselError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _sweep(options: argparse.Namespace) -> int:
    lines = read_lines(options.lines)
    runner = device_results_sweep.Runner(
        lines, options.db, options.devices or (), deadline_s=options.deadline,
        ahead=options.ahead,
    )  # fmt: skip
    return runner.run()


def _export(options: argparse.Namespace) -> int:
    device_results_export.export(options.db, options.output, device=options.stored_device)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.device_results", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="sweep|export")
    sweep = commands.add_parser("sweep", help="run the sweeps of a text file")
    sweep.add_argument("lines", type=Path, help="text file with the words of one sweep a line")
    sweep.add_argument("--db", type=Path, required=True, help="database; made where there is none")
    sweep.add_argument(
        "--devices", type=_of_click(names), metavar="0,1",
        help="one sweep at a time on each of these GPUs, each with a database of its own",
    )  # fmt: skip
    sweep.add_argument(
        "--deadline", type=_of_click(duration), metavar="TIME",
        help="start nothing after this long (20m, 1h), and end what runs then",
    )  # fmt: skip
    sweep.add_argument(
        "--ahead", type=int, default=len(usable_cpus()) // 2, metavar="N",
        help="compile what later lines need with N processes of the lowest priority beside sweeps"
        " on GPUs (half of the cores; 0: none)",
    )  # fmt: skip
    sweep.set_defaults(run=_sweep)
    export = commands.add_parser("export", help="write what ships from a database")
    export.add_argument("--db", type=Path, required=True, help="database; it stays as it is")
    export.add_argument("-o", "--output", type=Path, required=True, help="results/DEVICE")
    export.add_argument(
        "--stored-device", metavar="NAME", help="of several devices the one with this in its name"
    )
    export.set_defaults(run=_export)
    return parser


def _of_click(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser of the command line's own options, with its refusals, for argparse."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except click.BadParameter as error:
            raise argparse.ArgumentTypeError(error.message) from None

    return parsed


if __name__ == "__main__":
    end_cleanly()
    sys.exit(main())
