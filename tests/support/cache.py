"""A folder on this machine for results that are expensive to build, keyed by content and shared by
all processes.

Invariants: an entry is complete or absent (it is built in a temporary folder and renamed); the key
contains everything that the entry depends on, so nothing is updated in place; the folder belongs to
the user who runs the tests.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cached_folder(kind: str, key: tuple[bytes | str, ...], build: Callable[[Path], None]) -> Path:
    """The folder that `build(folder)` filled for this `key` (of two at once, one wins)."""
    digest = hashlib.sha256()
    for part in key:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    place = _root() / f"{kind}-{digest.hexdigest()[:20]}"
    if place.is_dir():
        return place
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=_root()))
    try:
        build(scratch)
        try:
            scratch.rename(place)
        except OSError:
            if not place.is_dir():  # unless another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def _root() -> Path:
    root = Path(tempfile.gettempdir()) / f"toolroll-tests-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise RuntimeError(f"{root} belongs to somebody else: set TMPDIR to a folder of your own")
    return root
