"""``python -m autosel`` and the ``autosel`` script: run a command and turn every end into a status.

0 done; 1 refused or failed, with one line saying why; 2 wrong usage; 130 interrupted; 141 the
reader of our output went away. A traceback is shown only with ``--debug``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

from autosel.cli.group import cli
from autosel.cli.report import ReaderGoneError, note, say
from autosel.cli.streams import Lenient, to_null
from autosel.cli.text import one_line, to_json
from autosel.errors import AutoselError

DONE, REFUSED, USAGE = 0, 1, 2
INTERRUPTED = 128 + signal.SIGINT
READER_GONE = 128 + 13  # SIGPIPE, which Windows' signal module lacks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    options = args[: args.index("--")] if "--" in args else args
    as_json, debug = "--json" in options, "--debug" in options
    _open_closed_streams()
    with _quiet_streams(), warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _run(args, as_json=as_json, debug=debug)
        except ReaderGoneError:
            to_null(sys.stdout)
            return READER_GONE


def _run(args: list[str], *, as_json: bool, debug: bool) -> int:
    def fail(status: int, error: BaseException, message: str) -> int:
        if as_json:
            kind = type(error).__name__
            try:
                click.echo(to_json({"error": {"type": kind, "message": one_line(message)}}))
            except OSError:  # the full disk that is being reported
                to_null(sys.stdout)
        note(f"error: {message}")
        return status

    stdout = sys.stdout
    try:
        result = cli.main(args, prog_name="autosel", standalone_mode=False, obj=args)
        _flush()  # a full disk must show here, not when Python exits
        return result if isinstance(result, int) else DONE
    except ReaderGoneError:
        raise
    except SystemExit as end:
        # Click's own way out where a pipe broke, with the streams wrapped: whoever read --help or
        # --version went away.
        if sys.stdout is not stdout:
            raise ReaderGoneError from end
        raise
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "autosel"
        return fail(USAGE, error, f"{error.format_message()} (see {where} --help)")
    except (click.Abort, KeyboardInterrupt) as error:
        return fail(INTERRUPTED, error, "interrupted")
    except (AutoselError, click.ClickException) as error:
        if debug:
            traceback.print_exc()
        return fail(REFUSED, error, str(error))
    except OSError as error:  # a full disk, a folder that may not be written
        if debug:
            traceback.print_exc()
        try:
            sys.stdout.flush()
        except OSError:
            to_null(sys.stdout)
        named = f"{error.filename}: " if error.filename else ""
        return fail(REFUSED, error, f"{named}{error.strerror or error}")
    except Exception as error:
        if debug:
            traceback.print_exc()
        return fail(REFUSED, error, _unexpected(error, debug=debug))


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def _unexpected(error: Exception, *, debug: bool) -> str:
    """A fault that no command expects, in one line; a full memory is the machine's, not ours."""
    torch_is_there = "torch" in sys.modules  # else nothing of torch was raised
    if isinstance(error, MemoryError) or (torch_is_there and _no_memory(error)):
        return f"out of memory: {str(error) or 'it does not fit on this machine'}"
    hint = "the traceback is above" if debug else "run again with --debug for the traceback"
    return f"unexpected {type(error).__name__}: {error} ({hint}; please report it)"


def _no_memory(error: Exception) -> bool:
    from autosel.failures import is_out_of_memory

    return is_out_of_memory(error)


def _open_closed_streams() -> None:
    """Put the null device where a caller closed a standard stream, as ``>&-`` does.

    A file opened later would get the free number, and what is printed would land in that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the process


@contextlib.contextmanager
def _quiet_streams() -> Iterator[None]:
    """Keep output from failing on a letter that an encoding lacks, or on a full standard error."""
    kept = sys.stdout, sys.stderr  # click wraps both where a pipe broke
    for stream in kept:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    lenient: Any = Lenient(sys.stderr)
    sys.stderr = lenient
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    note(f"warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
