"""The commands' event loop: uvloop's if it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
import uvloop
from typer.testing import CliRunner

from toolroll.rollout.cli.app import app
from toolroll.rollout.runtime.event_loop import run


async def loop_kind() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_uvloop_if_it_is_installed() -> None:
    assert run(loop_kind()) is uvloop.Loop


def test_asyncios_own_if_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "uvloop")
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    kind = run(loop_kind())
    assert kind is not uvloop.Loop and issubclass(kind, asyncio.SelectorEventLoop)


def test_serve_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type[asyncio.AbstractEventLoop]] = []

    async def serve(*args: Any) -> None:
        kinds.append(await loop_kind())

    monkeypatch.setattr("toolroll.rollout.server.serve.serve", serve)
    result = CliRunner().invoke(app, ["serve", "--model", "embedded"])
    assert (result.exit_code, kinds) == (0, [uvloop.Loop])
