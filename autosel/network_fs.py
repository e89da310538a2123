"""Whether a path lies on a file system that several machines share.

SQLite's locks are not safe there (https://www.sqlite.org/faq.html#q5), and its write-ahead log
needs memory that the processes share, which two machines do not have
(https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Types as Linux lists them in /proc/self/mountinfo; a type ``fuse.NAME`` is looked up as NAME.
NETWORK_TYPES = frozenset(
    {
        "9p", "acfs", "afs", "auristorfs", "beegfs", "ceph", "ceph-fuse", "cifs", "coda", "davfs",
        "davfs2", "fhgfs", "gcsfuse", "gfs2", "glusterfs", "goofys", "gpfs", "grpcfuse", "hdfs",
        "juicefs", "lustre", "mfs", "moosefs", "mount-s3", "ncpfs", "nfs", "nfs4", "ocfs2",
        "orangefs", "panfs", "prl_fs", "pvfs2", "quobyte", "rclone", "s3fs", "seaweedfs", "smb2",
        "smb3", "smbfs", "sshfs", "vboxsf", "virtiofs", "vmhgfs", "vmhgfs-fuse", "wekafs",
    }
)  # fmt: skip

_MOUNTS = Path("/proc/self/mountinfo")


def network_type(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the shared file system that ``path`` is or would be on; None for a local one.

    ``path`` need not exist. None also where the system does not tell (other than Linux).
    """
    kind = file_system_type(path, mounts)
    if kind is None:
        return None
    name = kind.removeprefix("fuse.").removeprefix("fuseblk.").lower()
    return kind if name in NETWORK_TYPES else None


def file_system_type(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the file system that ``path`` is or would be on, as Linux names it."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    wanted = os.path.realpath(path)
    best: tuple[int, str] | None = None
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescaped(fields[4])
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        # Of several mounts at one place the last one is seen.
        if inside and (best is None or len(point) >= best[0]):
            best = len(point), kinds[0]
    return best[1] if best else None


def _unescaped(text: str) -> str:
    """Spaces, tabs, line ends and backslashes stand as three octal digits there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
