"""What runs in a sandbox for `Sandbox`: `python -c CODE pack|read|listen ...`. It needs only the
standard library, because the sandbox may not see this file.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import tarfile
from collections.abc import Callable


def pack(most: str, *paths: str) -> None:
    """Write an archive of at most `most` bytes of files to standard output. It has the `paths`
    before `--`. Links may also lead to those after it.

    Sockets, pipes, devices and links that lead elsewhere are left out, and what cannot be read.
    """
    remaining, end = int(most), paths.index("--")

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal remaining
        path = f"/{member.name}"
        if member.issym():
            target = f"{os.path.realpath(path)}/"
            inside = any(target.startswith(f"{parent}/") for parent in paths)
            return member if inside else None
        remaining -= member.size + tarfile.BLOCKSIZE * 3  # with its headers
        if remaining < 0:
            sys.exit(1)
        readable = os.access(path, os.R_OK | (os.X_OK if member.isdir() else 0))
        packable = member.isfile() or member.isdir() or member.islnk()
        return member if packable and readable else None

    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for source in paths[:end]:
            if os.path.realpath(source) == source and os.access(source, os.F_OK):
                archive.add(source, filter=kept)


def read(path: str, most: str) -> None:
    """Write at most `most` bytes of the file `path`, which may not be a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        sys.exit(1)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        sys.exit(1)
    sys.stdout.buffer.write(os.read(descriptor, int(most)))


def listen(port: str) -> None:
    """Send a socket that listens on `port` of the loopback address to the socket that is standard
    input.
    """
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    socket.send_fds(socket.socket(fileno=sys.stdin.fileno()), [b"x"], [listener.fileno()])


if __name__ == "__main__":
    functions: dict[str, Callable[..., None]] = {"pack": pack, "read": read, "listen": listen}
    functions[sys.argv[1]](*sys.argv[2:])
