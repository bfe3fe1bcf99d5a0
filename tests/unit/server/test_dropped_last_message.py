"""The requests of an agent that ends each prompt with a message which its next request leaves out:
OpenClaw 2026.9 over chat completions, whose last message is the state of its runtime. The texts are
our own.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.endpoints import endpoint

from toolroll.endpoint.conversation.conversation_tree import EDITED
from toolroll.testing import PolicyRequest, load_embedded_tokenizer

TURNS = 3


def requests(state: str) -> list[list[dict[str, Any]]]:
    """The messages of each request: the history, and one message that is not part of it."""
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "do it"}]
    sent = []
    for turn in range(TURNS):
        sent.append([*history, {"role": "user", "content": state.format(turn)}])
        history += [
            {"role": "assistant", "content": f"A{turn}"},
            {"role": "user", "content": f"step {turn}"},
        ]
    return sent


def answer(request: PolicyRequest) -> str:
    return f"A{request.call}"


# OpenClaw's state is the same in each request, if nothing else happens on the machine.
@pytest.mark.parametrize("state", ["state {}", "state"])
async def test_each_turn_forks_if_the_last_message_is_dropped(state: str) -> None:
    async with endpoint(load_embedded_tokenizer(), answer) as bench:
        for messages in requests(state):
            await bench.post(
                "/sessions/s/v1/chat/completions", {"model": "m", "messages": messages}
            )
        sequences = await bench.trajectories()
    trained = [[turn for turn in each["turns"] if not turn["excluded"]] for each in sequences]
    assert list(map(len, trained)) == [1] * TURNS
    assert [each["fork_reason"] for each in sequences] == [
        None,
        *(
            f"{EDITED}: message {index} (user) of the served history is missing, the last message "
            "of its prompt"
            for index in (2, 4)
        ),
    ]
