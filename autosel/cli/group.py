"""The command group: finds commands by file name; every one has ``--json`` and ``--debug``."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
import platform
from types import ModuleType
from typing import Any

import click

import autosel
from autosel.cli import commands
from autosel.cli.report import Report, emit, stdout_reserved


class Command(click.Command):
    """A command whose function returns a :class:`Report`; printing it is done here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(
                ["--json", "as_json"], is_flag=True, help="Print strict JSON instead of text."
            ),
            debug_option(),
        ]

    def invoke(self, ctx: click.Context) -> int:
        as_json = ctx.params.pop("as_json")
        ctx.params.pop("debug")
        with stdout_reserved():
            report = super().invoke(ctx)
        if not isinstance(report, Report):
            raise TypeError(f"command {self.name}: found {report!r}, expected a Report")
        emit(report, as_json=as_json)
        return report.exit_code


class Group(click.Group):
    """The commands in a package, one file each, loaded only when they are asked for.

    ``default`` is the command meant where the first word is no command's name.
    """

    def __init__(
        self, *args: Any, package: ModuleType, default: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package, self._default = package, default

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(self._package.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{self._package.__name__}.{cmd_name}")
        command: click.Command = module.command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = (*self.list_commands(ctx), *self.get_help_option_names(ctx))
        if self._default and args and args[0] not in known:
            args.insert(0, self._default)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "the commands: " + ", ".join(names)
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


def debug_option() -> click.Option:
    """``--debug``, read by :func:`autosel.__main__.main` before anything is parsed."""
    return click.Option(
        ["--debug"], is_flag=True, help="Show the traceback when something unexpected fails."
    )


def version_text() -> str:
    """What bug reports need: autosel, torch and Python, without importing torch."""
    torch = importlib.metadata.version("torch")
    return f"autosel {autosel.__version__} (torch {torch}, Python {platform.python_version()})"


def _print_version(ctx: click.Context) -> None:
    click.echo(version_text())
    ctx.exit()


@click.group(
    cls=Group,
    package=commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0 done, 1 refused (one line says why), 2 wrong usage, 130 interrupted, "
    "141 the reader of the output went away.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, param, value: _print_version(ctx) if value else None,
    help="Show the version and exit.",
)
def cli(debug: bool) -> None:
    """Pick the fastest correct way to run a quantised mixture-of-experts layer on this machine."""


cli.params.append(debug_option())
