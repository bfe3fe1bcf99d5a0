"""Sessions of an endpoint with `--out`: what is asked and replied, and how they end."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.endpoints import Bench
from support.episodes import call
from support.listed_environment import TOOL

from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import PolicyRequest

USER: Any = {"role": "user", "content": "Hi"}
CHAT = "/sessions/{}/v1/chat/completions"


def policy(request: PolicyRequest) -> str:
    said = ["Hello.", f"I look. {call(at=request.index)}", "<think>\nHm\n</think>\n\nYes."]
    return said[request.index % 3]


async def ask(bench: Bench, messages: list[Any], session: str = "s", **more: Any) -> list[Any]:
    """Send a chat request; return its messages with the first answer and a result for its calls."""
    status, answer = await bench.post(
        CHAT.format(session), {"messages": messages, "tools": [TOOL], **more}
    )
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": made["id"], "content": "seen"}
        for made in message.get("tool_calls") or ()
    ]
    return [*messages, message, *(results or [USER])]


def finished(folder: Path) -> list[str]:
    """Return the names of the sessions in the episode file, in their order."""
    return [episode.task_id for episode in read_episodes(folder)]


def break_the_end(bench: Bench, *names: str) -> Callable[[], None]:
    """Let the end of the sessions `names` fail. Return a function that repairs it."""
    store = bench.endpoint.store
    assert store is not None
    settle = store._settle

    async def broken(live: LiveSession) -> None:
        if live.id in names:
            raise RuntimeError("broken")
        await settle(live)

    def repair() -> None:
        store._settle = settle

    store._settle = broken
    return repair


def hold_calls(owner: Any, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold each call of a coroutine of `owner`. Return events: one is held; let them go on."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    method = getattr(owner, name)

    async def held(*args: Any) -> None:
        reached.set()
        await go_on.wait()
        await method(*args)

    setattr(owner, name, held)
    return reached, go_on


def state_of(bench: Bench, session_id: str = "s") -> dict[str, Any]:
    """Everything of a session that later requests and the trainer see, bit by bit."""
    live = bench.endpoint.sessions.find(session_id)
    session, tree = live.session, live.session._tree

    def node_state(index: int) -> tuple[Any, ...]:
        node = session.node(index)
        logprobs = None if node.completion is None else node.completion.logprobs
        return (
            None if node.parent is None else node.parent.index,
            node.ids.tobytes(),
            None if logprobs is None else logprobs.tobytes(),
            tree.fork_reasons.get(index),
            node.excluded,
            node.completion and tree.turn(index, excluded=None).sampling_params,
            repr(node.completion),
        )

    return {
        "nodes": [node_state(index) for index in range(session.nodes)],
        "lineages": dict(tree.lineages),
        "experts": {
            index: (rows.dtype, rows.shape, rows.tobytes())
            for index, rows in tree.routed_experts.items()
        },
        "responses": {
            name: (stored.turn and stored.turn.node.index, stored.instructions, stored.body)
            for name, stored in live.responses._responses.items()
        },
        "trace": [(node.index, kind) for node, kind in live.trace],
        "turns": sorted(
            (
                turn.node.index,
                None if turn.parent is None else turn.parent.node.index,
                turn.digest,
                json.dumps(turn.messages()),
                turn.sampled,
                turn.tools.text,
                turn.prefill,
                turn.prefill_size,
                turn.continues,
                turn.preserved,
            )
            for same in live.tree._turns.values()
            for turn in same
        ),
        "forks": live.tree.forks,
        "reward": (live.reward, live.info, dict(live.sampling_params), live.created),
        "answers": dict(live.answers),
    }
