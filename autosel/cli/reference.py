"""Prints ``docs/cli.md``: ``python -m autosel.cli.reference > docs/cli.md``."""

from __future__ import annotations

import inspect

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
    parts = [_HEAD]
    group = click.Context(cli, info_name="autosel")
    for name in cli.list_commands(group):
        command = cli.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=f"autosel {name}")
        parts.append(_section(command, context))
    return "\n".join(parts)


def _section(command: click.Command, context: click.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"## {context.command_path}", "", inspect.cleandoc(command.help or ""), ""]
    lines += ["```text", usage, "```", ""]
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
