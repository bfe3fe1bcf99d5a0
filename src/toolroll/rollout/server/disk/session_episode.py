"""`session_episode`: converts a finished session to an episode."""

from __future__ import annotations

from typing import Any

import orjson

from toolroll.rollout.server.sessions.sessions import LiveSession
from toolroll.rollout.types import Episode, InteractionResult, StopReason


def session_episode(live: LiveSession, env: str, sample: int, model: str) -> Episode | None:
    """Return the session `live` as an episode: all its sequences, and the conversation of its last
    chat completion. Return None if the session has no answer.

    The reward is None unless the client gave one. The stop reason is `done`.
    """
    if not live.trace:
        return None
    last = live.tree.last_turn()
    own = {"id": live.id, "created": live.created, "forks": list(live.tree.forks)}
    result = InteractionResult.of(
        live.session.trajectories(),
        messages=last.messages() if last is not None else [],
        stop_reason=StopReason.DONE,
        prompt="",
        reward=live.reward,
        info={"session": own, **live.info},
        metrics=_metrics(live),
        tools=orjson.loads(last.tools_key) or [] if last is not None else [],
    )
    return Episode(env, live.id, 0, sample, 0, result, model)


def _metrics(live: LiveSession) -> dict[str, float]:
    answers = [node.completion for node, _ in live.trace]
    counted: dict[str, Any] = {
        "turns": len(answers),
        "prompt_tokens": sum(one.prompt_tokens for one in answers if one is not None),
        "completion_tokens": sum(len(one.output_ids) for one in answers if one is not None),
        "cached_tokens": sum(one.cached_tokens for one in answers if one is not None),
        "trained_tokens": sum(part.trained_tokens for part in live.session.trajectories()),
        "forks": len(live.tree.forks),
        "seconds": sum(one.latency for one in answers if one is not None),
        **{f"token_mismatches/{kind}": count for kind, count in live.mismatches.items()},
    }
    return {name: float(value) for name, value in counted.items()}
