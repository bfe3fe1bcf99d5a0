"""What several tests of the engine's client need."""

import pytest
from support.http import http_server


@pytest.fixture
async def gone() -> str:
    """An address at which nothing listens any more."""
    async with http_server({}) as url:
        pass
    return url
