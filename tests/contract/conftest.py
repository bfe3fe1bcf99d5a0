"""Fixtures of the tests of the trainers' losses."""

import asyncio

import pytest
from support.gradients import World, play_group


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return asyncio.run(play_group(tmp_path_factory.mktemp("gradients")))
