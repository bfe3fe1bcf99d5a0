"""Verify the token sequences of a session with `transformers` and the tokenizer alone, and record
mismatches. This runs in threads, or in the calling thread (`check_all_now`).
"""

from __future__ import annotations

import asyncio
from functools import partial

from toolroll.rollout.server.conversation.turn import TurnNode, sequence_of
from toolroll.rollout.server.sessions.sessions import LiveSession


def start_checks(live: LiveSession) -> None:
    """Start to verify the sequences of `live` that are not verified yet."""
    for turn in live.tree.unchecked():
        if turn not in live.checks:
            task = asyncio.get_running_loop().create_task(_check(live, turn))
            live.checks[turn] = task
            # Not in `_check`: a task that is cancelled before it starts runs none of its code.
            task.add_done_callback(partial(_forget, live, turn))


def _forget(live: LiveSession, turn: TurnNode, _task: asyncio.Task[None]) -> None:
    del live.checks[turn]


async def check_all(live: LiveSession) -> None:
    """Verify the sequences of `live`, including sequences that are committed while this runs."""
    nodes = -1
    while nodes != live.session.nodes:
        while live.tree.unchecked():
            start_checks(live)
            await live.checked()
        nodes = live.session.nodes
        live.record_checked(await asyncio.to_thread(live.record_check()))


def check_all_now(live: LiveSession) -> None:
    """Verify the sequences of `live` that are not verified yet, in this thread, which blocks the
    event loop.
    """
    for turn in live.tree.unchecked():
        sequence = sequence_of(turn, live.session, live.record)
        live.check_done(turn, turn.template.verifier.check(sequence))
    live.record_checked(live.record_check()())


async def _check(live: LiveSession, turn: TurnNode) -> None:
    sequence = sequence_of(turn, live.session, live.record)
    live.check_done(turn, await asyncio.to_thread(turn.template.verifier.check, sequence))
