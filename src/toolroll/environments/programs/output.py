"""`Output`: what a program in a sandbox writes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

OUTPUT = 65_536
"""The number of bytes that are kept from the end of a program's output."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a program. `status` is None if the program was stopped at its time limit.
    `output` is the end of what it wrote.
    """

    status: int | None
    output: str


class Output:
    """The end of what is written to `file`, a pipe. It is read until the last writer has ended,
    because a program that is left behind would fail if nobody read.
    """

    def __init__(self) -> None:
        self._most = OUTPUT
        self._reading, self.file = os.pipe()
        os.set_blocking(self._reading, False)
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)

    @property
    def open(self) -> bool:
        """True until the last writer has ended."""
        return self._reading >= 0

    def _read(self) -> None:
        try:
            data = os.read(self._reading, OUTPUT)
        except BlockingIOError:
            return
        self._kept += data
        del self._kept[: -self._most]
        if not data:
            self.close()

    def close(self) -> None:
        """Read no more."""
        reading, self._reading = self._reading, -1
        if reading >= 0:
            self._loop.remove_reader(reading)
            os.close(reading)

    def text(self) -> bytes:
        """Return what was written before this call. Keep nothing of what follows."""
        if self.open:
            self._read()  # a pipe holds no more than one call reads
        written, self._kept, self._most = bytes(self._kept), bytearray(), 1
        return written
