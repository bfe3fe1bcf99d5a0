"""The fields that a client of the endpoint sends, each as a request with a hole for its value."""

from typing import Any

from support.anthropic_wire import HELLO, LOOK
from support.listed_environment import TOOL
from support.recorded import USER
from support.responses_wire import LOOK as RESPONSES_LOOK

HOLE = "@hole@"
CHAT, MESSAGES, RESPONSES, TEXT = (
    f"/sessions/{{}}/v1/{path}"
    for path in ("chat/completions", "messages", "responses", "completions")
)

_OF_CHAT = (
    "messages model user metadata session_id tools tool_choice parallel_tool_calls stop n seed "
    "stop_token_ids logit_bias temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty ignore_eos min_tokens max_tokens max_completion_tokens logprobs "
    "top_logprobs response_format chat_template_kwargs reasoning_effort stream_options"
).split()
_OF_MESSAGES = (
    "messages system metadata temperature top_p top_k stop_sequences max_tokens tools tool_choice "
    "thinking"
).split()
_OF_RESPONSES = (
    "input instructions metadata client_metadata temperature top_p max_output_tokens tools "
    "tool_choice text reasoning store truncation include user previous_response_id top_logprobs"
).split()
_OF_TEXT = "prompt max_tokens temperature stop seed logprobs logit_bias user".split()
_OF_SESSION = (
    "temperature top_p top_k min_p repetition_penalty stop stop_regex stop_token_ids logit_bias "
    "sampling_seed max_new_tokens min_new_tokens json_schema regex ebnf custom_params lora_path"
).split()


def _turns(*, at: str) -> list[dict[str, Any]]:
    """Messages with a call and its result, of which the field `at` is the hole."""
    fields = {"id": "c", "name": "look", "arguments": "{}", "content": None, "result": "seen"}
    fields |= {at: HOLE}
    function = {"name": fields["name"], "arguments": fields["arguments"]}
    called = {"id": fields["id"], "type": "function", "function": function}
    said = {"role": "assistant", "content": fields["content"], "tool_calls": [called]}
    if at == "reasoning_content":
        said[at] = HOLE
    return [USER, said, {"role": "tool", "tool_call_id": fields["id"], "content": fields["result"]}]


def _tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], **fields}}


FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (CHAT, {"messages": [USER], name: HOLE}) for name in _OF_CHAT},
    **{
        f"a call's {name}": (CHAT, {"messages": _turns(at=name), "tools": [TOOL]})
        for name in ("id", "name", "arguments", "content", "reasoning_content", "result")
    },
    "a message": (CHAT, {"messages": [HOLE]}),
    "content": (CHAT, {"messages": [{"role": "user", "content": HOLE}]}),
    "a message's name": (CHAT, {"messages": [{**USER, "name": HOLE}]}),
    "a part": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": HOLE}]}]}),
    **{
        f"a tool's {name}": (CHAT, {"messages": [USER], "tools": [_tool(**{name: HOLE})]})
        for name in ("name", "description", "parameters", "strict", "x")
    },
    "a switch": (CHAT, {"messages": [USER], "chat_template_kwargs": {"x": HOLE}}),
    "a bias": (CHAT, {"messages": [USER], "logit_bias": {"5": HOLE}}),
    **{f"messages: {name}": (MESSAGES, {**HELLO, name: HOLE}) for name in _OF_MESSAGES},
    "messages: user_id": (MESSAGES, {**HELLO, "metadata": {"user_id": HOLE}}),
    "messages: parent_id": (MESSAGES, {**HELLO, "metadata": {"parent_id": HOLE}}),
    "messages: a schema": (MESSAGES, {**HELLO, "tools": [{**LOOK, "input_schema": HOLE}]}),
    **{f"responses: {name}": (RESPONSES, {"input": "Hi", name: HOLE}) for name in _OF_RESPONSES},
    "responses: thread_id": (RESPONSES, {"input": "Hi", "client_metadata": {"thread_id": HOLE}}),
    "responses: a schema": (
        RESPONSES,
        {"input": "Hi", "tools": [{**RESPONSES_LOOK, "parameters": HOLE}]},
    ),
    **{f"text: {name}": (TEXT, {"prompt": "Hi", name: HOLE}) for name in _OF_TEXT},
    "text: an id": (TEXT, {"prompt": [5, HOLE]}),
    **{
        f"session: {name}": ("/sessions", {"sampling_params": {name: HOLE}}) for name in _OF_SESSION
    },
    "session: its id": ("/sessions", {"session_id": HOLE}),
    "reward": ("/sessions/s0/reward", {"reward": HOLE}),
    "info": ("/sessions/s0/reward", {"reward": 1, "info": HOLE}),
    **{
        f"info: {name}": ("/sessions/s0/reward", {"reward": 1, "info": {name: HOLE}})
        for name in ("x", "error", "forks", "judge", "regrade", "session", "trainable")
    },
}
