"""Separate the user and password from a server's address. They are sent as a header, and never
appear in a message.
"""

from __future__ import annotations

import base64
import re
from urllib.parse import unquote

_USER_INFO = re.compile(r"([a-z][a-z0-9+.-]*://)([^/?#]*)@(.*)", re.IGNORECASE | re.DOTALL)


def split_credentials(url: str) -> tuple[str, str | None]:
    """Return `url` without its user and password, and the Authorization header that sends them.

    The header is None if `url` has no user and password.
    """
    found = _USER_INFO.fullmatch(url)
    if found is None:
        return url, None
    scheme, info, rest = found.groups()
    user, _, password = info.partition(":")
    encoded = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return f"{scheme}{rest}", f"Basic {encoded}"
