"""`BaselineAgent`: plays and scores a model behind any OpenAI-compatible endpoint, in the same way
as the trained model.

Invariants: such an endpoint returns text, so its episodes have no tokens and are marked as not
trainable. Invalid calls are handled by the agent's `CallPolicy`, as for all agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from time import perf_counter
from typing import Any

from toolroll.agents.chat_client import ChatClient, ChatClientConfig, history_message
from toolroll.agents.loop.call_policy import policy_of, pop_settings
from toolroll.agents.text_agent import TextAgent
from toolroll.parsers.base import PlainParser
from toolroll.parsers.reading.schema import Offered, check_call
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.model.turn import AssistantTurn, with_call_ids
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.types import Message, Tool

_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
"""Maps SGLang's names of sampling parameters to OpenAI's if they differ."""
_PASSED = frozenset(
    {"temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "max_tokens", "seed"}
)
"""The parameters of OpenAI's API. Other parameters are sent only if `extra_params` is set. SGLang
and vLLM, for example, have top_k and min_p.
"""


@dataclass(eq=False)
class BaselineAgent(TextAgent):
    """Plays the model of `client`.

    `extra_params`: send sampling parameters that OpenAI's API does not have (top_k, min_p ...).

        config = ChatClientConfig(base_url="https://api.openai.com/v1", model="gpt-5",
                                  api_key_env="OPENAI_API_KEY")
        agent = BaselineAgent(Threads(8), ChatClient(config), extra_params=False)
        result = await agent.asolve(env, task=task)
        await agent.aclose()
    """

    client: ChatClient
    _: KW_ONLY
    extra_params: bool = True
    _parser: PlainParser = field(default_factory=PlainParser, init=False, repr=False)

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: Mapping[str, Any],
        session_id: str,
    ) -> AssistantTurn:
        """Return the next turn. Raise `EngineError` or `ContextOverflowError` (see
        `ChatClient.complete`).
        """
        params = {
            _NAMES.get(name, name): value
            for name, value in sampling_params.items()
            if value is not None
        }
        if not self.extra_params:
            params = {name: value for name, value in params.items() if name in _PASSED}
        request = {"messages": [_sent(message) for message in messages], **params}
        if tools:
            request["tools"] = list(tools)
        start = perf_counter()
        completion = await self.client.complete(request, allow_length=True)
        seconds = perf_counter() - start
        reply = completion.reply
        # A refusal is the model's answer, as text in another field.
        parsed = self._parsed(replace(reply, content=reply.content or completion.refusal), tools)
        parsed = with_call_ids(parsed, f"{session_id}/{len(messages)}")
        counts = {**completion.usage, "engine_retries": completion.attempts - 1}
        message = history_message(parsed)
        return AssistantTurn(parsed, message, completion.finish_reason, counts, seconds)

    def _parsed(self, reply: ParsedReply, tools: Sequence[Tool]) -> ParsedReply:
        """Return `reply` with its reasoning separated from the text and with its calls checked."""
        # A server without a reasoning parser leaves the reasoning in the text.
        text, offered = self._parser.parse(reply.content, tools=tools), Offered(tools)
        calls = (check_call(call, offered) for call in reply.tool_calls)
        return replace(text, reasoning=reply.reasoning or text.reasoning, tool_calls=tuple(calls))

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.aclose()


def _sent(message: Message) -> Message:
    """Return `message` without its reasoning, which is not sent to the server."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def make_baseline(threads: BlockingRunner, settings: Mapping[str, Any]) -> BaselineAgent:
    """Return the agent of the entry point `baseline` in the group `toolroll.agents`.

    `settings`: endpoint, model, api_key, api_key_env, engine_timeout, step_timeout,
    max_observation_bytes, extra_params, and the fields of `CallPolicy`.
    """
    policy = dict(settings)
    server = {"base_url": policy.pop("endpoint")} | pop_settings(
        policy, "model", "api_key", "api_key_env", "engine_timeout"
    )
    client = ChatClient(ChatClientConfig.checked("the endpoint", server))
    options = pop_settings(policy, "step_timeout", "max_observation_bytes", "extra_params")
    return BaselineAgent(threads, client, policy=policy_of(policy), **options)
