"""The errors a user can meet. Each carries one sentence that names what was found and expected."""

from __future__ import annotations


class AutoselError(Exception):
    """Base of every error autosel raises on purpose; the command line prints it as one line."""


class ConfigError(AutoselError):
    """The model's configuration is missing, unreadable or contradicts itself."""


class CheckpointError(AutoselError):
    """A checkpoint file or tensor is missing, damaged, unsafe or not what the config says."""


class UnsupportedError(AutoselError):
    """A backend or layout cannot express this layer; the message is the reason in the report."""


class RoutingError(AutoselError):
    """The routing handed to a layer has the wrong shape or type."""


class StoreError(AutoselError):
    """The database cannot be opened, read or written."""


class PackError(AutoselError):
    """A decision pack is damaged, hostile, of another version or not what was asked for."""


class RankError(AutoselError):
    """The ranks of a group disagree, or one of them failed, ended or never came."""


class NothingUsableError(AutoselError):
    """No candidate can run this layer here, or none was correct."""


class MissingPackageError(AutoselError):
    """An optional package is needed for this command; the message says what to install."""


def field_error(where: str, what: str, found: object, expected: object) -> str:
    """One line in the house form: ``WHERE: WHAT: found FOUND, expected EXPECTED``."""
    return f"{where}: {what}: found {found}, expected {expected}"
