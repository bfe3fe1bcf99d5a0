"""The clients that `make test-clients` runs, and what each must show.

A client is a program of `programs/` with the packages of one project. Its task: one call of the
tool `look`, then two calls in one turn, then an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Dialect = Literal["chat", "responses", "messages"]
ALL: tuple[Dialect, ...] = ("chat", "responses", "messages")


@dataclass(frozen=True)
class Client:
    """`turns`: the number of turns of each sequence, by dialect. `packages`: what pip installs.
    `quick`: `make test-all` runs this client too, without streaming and with it.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    turns: Mapping[Dialect, tuple[int, ...]] = field(
        default_factory=lambda: dict.fromkeys(ALL, (3,))
    )
    overflow: str = ""
    """The error that the client raises if the prompt does not fit the context."""
    quick: bool = False


def only(*dialects: Dialect) -> dict[Dialect, tuple[int, ...]]:
    """Return the turns of a client without forks that has only these dialects."""
    return dict.fromkeys(dialects, (3,))


CLIENTS = (
    Client(
        "langgraph 1.2.24",
        "langgraph_agent",
        (
            "langgraph==1.2.24",
            "langchain==1.4.3",
            "langchain-openai==1.7.4",
            "langchain-anthropic==1.7.10",
        ),
    ),
    Client("haystack 3.4.1", "haystack_agent", ("haystack-ai==3.4.1",), only("chat", "responses")),
    Client("agno 3.1.10", "agno_agent", ("agno==3.1.10", "openai", "anthropic")),
    Client(
        "pydantic-ai 2.68.0", "pydantic_ai_agent", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)
    ),
)
