"""The log of the HTTP server: a malformed request is logged as one line, not as a traceback."""

from __future__ import annotations

import logging

from aiohttp.http import HttpProcessingError

logger = logging.getLogger(__name__)


def _one_line(record: logging.LogRecord) -> bool:
    """Log a malformed request as one line at INFO. Leave other records unchanged."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        first = str(error.message).strip().partition("\n")[0]
        record.msg, record.args = "%s: %s %s", (record.getMessage(), error.code, first)
        record.exc_info, record.exc_text = None, None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


logger.addFilter(_one_line)
