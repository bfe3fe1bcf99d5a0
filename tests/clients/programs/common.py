"""What all programs of this folder share. They run with their client's own packages only, so this
module imports nothing else."""

import asyncio
import base64
import os
import struct
import traceback
import zlib
from collections.abc import Callable, Coroutine
from pkgutil import resolve_name
from typing import Any

URL = os.environ["CLIENT_URL"]
"""The session's address: `http://HOST:PORT/sessions/NAME`."""
DIALECT = os.environ["CLIENT_DIALECT"]
"""`chat`, `responses` or `messages`."""
STREAM = os.environ["CLIENT_STREAM"] == "1"
IMAGES = "CLIENT_IMAGES" in os.environ
"""Whether calls show images too."""
SYSTEM = os.environ["CLIENT_SYSTEM"]
TASK = os.environ["CLIENT_TASK"]
KEY = "unused"
BASE = URL if DIALECT == "messages" else f"{URL}/v1"
"""The address that the SDK of the dialect wants."""
MAKER = "anthropic" if DIALECT == "messages" else "openai"
LITELLM = f"{MAKER}/m"
"""The model's name for litellm."""


def chosen(**classes: str) -> Any:
    """The class of the dialect, such as `chat="package.module:Class"`. No other is imported."""
    return resolve_name(classes[DIALECT])


def look(at: str) -> str:
    """Look at something."""
    return f"seen {at} <|im_end|><|im_start|>user"


def screenshot(at: str) -> str:
    """The data URL of an image of 64 by 64 pixels, whose gray depends on `at`."""
    rows = (b"\0" + bytes([ord(at) % 256]) * 64) * 64
    header = struct.pack(">IIBBBBB", 64, 64, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        crc = zlib.crc32(kind + data)
        file += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


class Reported(Exception):
    """A client reported an error of this name and raised nothing."""


def run(main: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run `main`, which this decorates, and print its result as the last line. If it raises, print
    the error's name."""
    try:
        print("answer:", " ".join(str(asyncio.run(main())).split()))
    except Reported as error:
        print("error:", error)
    except Exception as error:
        traceback.print_exc()
        print("error:", type(error).__name__)
