"""A served endpoint with an engine that says what a test wants, and the requests of its clients."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from support.endpoints import Bench, endpoint
from support.listed_environment import TOOL

from toolroll.endpoint.sessions.session_store import SessionStore
from toolroll.testing import Policy, PolicyRequest, Reply, load_embedded_tokenizer

Message = dict[str, Any]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
JSON = {"Content-Type": "application/json"}
RETRY = {"x-stainless-retry-count": "1"}
"""The header with which OpenAI's SDK says that it repeats a request."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


USER, MORE = user("Hi"), user("More")


def tool_results(reply: Message, content: str = "seen") -> list[Message]:
    """A result for each call of `reply`."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call in reply.get("tool_calls") or ()
    ]


def in_session(path: str, session: str = "s") -> str:
    return f"/sessions/{session}{path}"


def numbered(request: PolicyRequest) -> str:
    """A policy whose replies are all different."""
    return f"Reply {request.index}."


class ServedBench(Bench):
    """A bench with the requests of a client. Those that return an answer must succeed."""

    async def send(self, path: str, body: Any, **headers: str) -> Any:
        status, answer = await self.post(path, body, **headers)
        assert status in (200, 201), answer
        return answer

    async def ask(self, *messages: Message, session: str = "s", **fields: Any) -> Any:
        return await self.send(in_session(CHAT, session), {"messages": messages, **fields})

    async def chat(self, *messages: Message, session: str = "s", **fields: Any) -> Message:
        """Return the first reply to a chat request that offers `TOOL`."""
        answer = await self.ask(*messages, session=session, **{"tools": [TOOL], **fields})
        reply: Message = answer["choices"][0]["message"]
        return reply

    async def refusal(self, path: str, body: Any, **headers: str) -> tuple[int, str, str | None]:
        """Return status, code and parameter of the error that a POST gets."""
        status, answer = await self.post(path, body, **headers)
        assert "error" in answer, answer
        return status, answer["error"]["code"], answer["error"].get("param")

    async def delete(self, session: str = "s") -> int:
        async with self.http.delete(f"{self.url}/sessions/{session}") as response:
            return response.status

    async def create(self, session: str = "s", **sampling_params: Any) -> None:
        """Create a session with sampling parameters of its own."""
        await self.send("/sessions", {"session_id": session, "sampling_params": sampling_params})

    async def forks(self, session: str = "s") -> list[str]:
        """Return the reasons of all forks of a session, in their order."""
        reasons: list[str] = (await self.get(f"/sessions/{session}/trajectories"))["forks"]
        return reasons

    async def one_trajectory(self, *, turns: int, session: str = "s") -> dict[str, Any]:
        """Return the only trajectory of a session. It is judged, and has `turns` turns."""
        [trajectory] = await self.trajectories(session)
        assert len(trajectory["turns"]) == turns
        return trajectory

    @property
    def store(self) -> SessionStore:
        assert self.endpoint.store is not None
        return self.endpoint.store

    def ids(self) -> list[str]:
        return [live.id for live in self.endpoint.sessions.all()]

    def prompt(self, request: int = -1) -> str:
        """The decoded prompt of a request to the engine."""
        encoder = self.served.template.encoder
        return encoder.decode(self.engine.log[request].input_ids)


@asynccontextmanager
async def serve(
    replies: str | Reply | Sequence[str | Reply] | Policy = "Hello.",
    *,
    tokenizer: Any = None,
    **options: Any,
) -> AsyncIterator[ServedBench]:
    """An endpoint whose model always gives one reply, or gives each session a list of replies in
    their order, or follows a policy. `options` are those of `endpoint`.
    """
    policy: Any = replies
    if isinstance(replies, str | Reply):
        policy = lambda request: replies
    elif isinstance(replies, Sequence):
        policy = lambda request: replies[request.call]
    async with endpoint(tokenizer or load_embedded_tokenizer(), policy, **options) as bench:
        yield ServedBench(**vars(bench))
