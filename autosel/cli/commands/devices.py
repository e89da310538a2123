"""``autosel devices``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.report import Report, Table
from autosel.cli.text import bytes_text
from autosel.core import Device


@click.command(cls=Command)
def command() -> Report:
    """Show the devices of this machine as timings are keyed by them."""
    from autosel.device import detect_all, fingerprint  # torch is slow to import

    devices = detect_all()
    data = [{"fingerprint": fingerprint(d), "default": i == 0, **d.to_dict()}
            for i, d in enumerate(devices)]  # fmt: skip
    tables = [_table(device, fingerprint(device)) for device in devices]
    default = f"A sweep runs on the first unless --device says otherwise: {devices[0].name}."
    return Report({"devices": data}, [*tables, *([default] if len(devices) > 1 else [])])


def _table(device: Device, fingerprint: str) -> Table:
    rows = [
        ("compute capability", ".".join(map(str, device.capability)) if device.capability else ""),
        ("multiprocessors", device.multiprocessors),
        ("memory", bytes_text(device.memory_bytes)),
        ("last-level cache", bytes_text(device.cache_bytes)),
        ("shared memory a block", bytes_text(device.shared_memory_bytes)),
        ("threads", device.threads),
        ("driver", device.driver),
        ("instruction sets", " ".join(device.flags)),
        *((f"package {name}", version) for name, version in device.versions),
        ("fingerprint", fingerprint),
    ]
    shown = [row for row in rows if row[1] not in (None, "", "-")]
    return Table(("what", "found"), shown, title=f"{device.kind}: {device.name or '(no name)'}")
