"""``autosel db``: one command a file, as in :mod:`autosel.cli.commands`."""
