"""An agent that ends each prompt with a message which its next request leaves out, as OpenClaw does
over chat completions: the runtime's state, which is not part of its history.
"""

from __future__ import annotations

from typing import Any

from support.endpoints import endpoint

from toolroll.endpoint.conversation.conversation_tree import EDITED
from toolroll.testing import PolicyRequest, load_embedded_tokenizer

TURNS = 3


def requests() -> list[list[dict[str, Any]]]:
    """The messages of each request: the history, and one message that the next request drops."""
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "do it"}]
    sent = []
    for turn in range(1, TURNS + 1):
        sent.append([*history, {"role": "user", "content": f"state {turn}"}])
        history += [
            {"role": "assistant", "content": f"A{turn}"},
            {"role": "user", "content": f"step {turn}"},
        ]
    return sent


def answer(request: PolicyRequest) -> str:
    return f"A{request.call + 1}"


async def test_each_turn_forks_if_the_last_message_is_dropped() -> None:
    async with endpoint(load_embedded_tokenizer(), answer) as bench:
        for messages in requests():
            await bench.post(
                "/sessions/s/v1/chat/completions", {"model": "m", "messages": messages}
            )
        sequences = await bench.trajectories()
    trained = [[turn for turn in each["turns"] if not turn["excluded"]] for each in sequences]
    assert list(map(len, trained)) == [1] * TURNS
    first, *forks = [each["fork_reason"] for each in sequences]
    assert first is None
    assert forks == [
        f"{EDITED}: message {index} (user) of the served history is missing" for index in (2, 4)
    ]
