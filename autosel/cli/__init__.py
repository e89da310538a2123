"""The ``autosel`` command: parse, call the library, print.

Each file in ``commands/`` is one command and is found by its name; nothing else lists them.
"""
