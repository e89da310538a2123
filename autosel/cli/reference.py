"""Prints ``docs/cli.md``: ``python -m autosel.cli.reference > docs/cli.md``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from autosel.cli.group import cli

_HEAD = """# Command line reference

Made by `python -m autosel.cli.reference`; a test keeps it fresh.

Results go to standard output; progress, notes and warnings to standard error. With `--json`
standard output holds strict JSON and nothing else; a refusal is
`{"error": {"type": ..., "message": ...}}`. Exit status: 0 done, 1 refused (one line says why),
2 wrong usage, 130 interrupted, 141 the reader of the output went away.
"""


def reference() -> str:
    """The page: every command with its arguments and options, from the commands themselves."""
    return "\n".join([_HEAD, *_sections(cli, "autosel")])


def _sections(group: click.Group, path: str) -> Iterator[str]:
    """One section for each command, those of a group after the group's own."""
    within = click.Context(group, info_name=path)
    for name in group.list_commands(within):
        command = group.get_command(within, name)
        assert command is not None
        yield _section(command, click.Context(command, info_name=f"{path} {name}"))
        if isinstance(command, click.Group):
            yield from _sections(command, f"{path} {name}")


def _section(command: click.Command, context: click.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"## {context.command_path}", "", inspect.cleandoc(command.help or ""), ""]
    lines += ["```text", usage, "```", ""]
    if isinstance(command, click.Group):
        names = command.list_commands(context)
        return "\n".join([*lines, "Commands: " + ", ".join(f"`{name}`" for name in names), ""])
    rows = [
        param.get_help_record(context)
        for param in command.params
        if isinstance(param, click.Option)
    ]
    lines += ["| option | meaning |", "|---|---|"]
    lines += [f"| `{_cell(row[0])}` | {_cell(row[1])} |" for row in rows if row]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
