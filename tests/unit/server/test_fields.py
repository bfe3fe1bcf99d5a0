"""Every field of a request that is not refused reaches the engine, in each dialect, or changes no
token and is counted in its session.
"""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.anthropic_wire import LOOK as MESSAGES_LOOK
from support.dialect_bodies import DIALECTS, PATHS, Dialect, body_of
from support.endpoints import streamed
from support.episodes import call
from support.listed_environment import TOOL
from support.responses_wire import LOOK as RESPONSES_LOOK
from support.served import CHAT, MESSAGES, RESPONSES, TEXT, USER, in_session, serve
from support.wires import BODIES

from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.requests.tool_choice import call_closer, call_grammar, strict_tag
from toolroll.rollout.engine.sampling_params import DROPPED_BY_SMG
from toolroll.testing import Fault
from toolroll.testing.scripted_source import top_logprobs

OTHER: Any = {
    "type": "function",
    "function": {"name": "listen", "parameters": {"type": "object", "properties": {}}},
}
STRICT: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "look"}}
Fields = dict[str, Any]
SCHEMA = {"type": "json_schema", "schema": {"type": "array"}}
NAMED_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
AN_ARRAY, AN_OBJECT = {"json_schema": '{"type":"array"}'}, {"json_schema": '{"type":"object"}'}
FIRST_CALL_ONLY = {"stop": ["</tool_call>"], "no_stop_trim": True}
NULL_NAME = [{**USER, "name": None}]
CALLED = {"function": {"name": "look", "arguments": "{}", "extra": None}, "id": "c", "index": 0}
"""A call with what client libraries add on their own."""
RESULT = {"role": "tool", "tool_call_id": "c", "content": "seen"}
CACHED_PART = {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
SAME: dict[str, list[Fields]] = {
    CHAT: [
        {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1},
        {"stop": ["END", "STOP"], "ignore_eos": False},
        {"logit_bias": {"7": -100}},
    ],
    MESSAGES: [{"temperature": 0.5, "top_p": 0.5, "top_k": 7}],
    RESPONSES: [{"temperature": 0.5, "top_p": 0.5}],
}
"""Fields whose names are SGLang's."""
OTHER_NAMES: dict[str, list[tuple[Fields, Fields]]] = {
    CHAT: [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_new_tokens": 6}),
        ({"min_tokens": 2}, {"min_new_tokens": 2}),
        ({"stop": "END"}, {"stop": ["END"]}),
        ({"seed": 3}, {"sampling_seed": 3}),
        ({"response_format": {"type": "json_object"}}, AN_OBJECT),
        ({"response_format": NAMED_SCHEMA}, AN_ARRAY),
        ({"tools": [TOOL], "parallel_tool_calls": False}, FIRST_CALL_ONLY),
    ],
    MESSAGES: [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"stop_sequences": ["END", "STOP"]}, {"stop": ["END", "STOP"]}),
        ({"output_config": {"format": SCHEMA}}, AN_ARRAY),
        (
            {
                "tools": [MESSAGES_LOOK],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            FIRST_CALL_ONLY,
        ),
    ],
    RESPONSES: [
        ({"max_output_tokens": 5}, {"max_new_tokens": 5}),
        ({"text": {"format": {**SCHEMA, "name": "x"}}}, AN_ARRAY),
        ({"text": {"format": {"type": "json_object"}}}, AN_OBJECT),
        ({"tools": [RESPONSES_LOOK], "parallel_tool_calls": False}, FIRST_CALL_ONLY),
    ],
}
"""The fields of a request, and the sampling parameters of the engine that they are."""
NO_EFFECT: dict[str, list[Fields]] = {
    CHAT: [
        {"temperature": None, "tools": None, "n": None, "messages": NULL_NAME},
        {"user": "u", "metadata": {"a": "b"}, "response_format": {"type": "text"}},
        {"service_tier": "default"},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALLED]}, RESULT]},
    ],
    MESSAGES: [
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}},
        {"service_tier": "auto"},
        {"messages": NULL_NAME, "tools": [{**MESSAGES_LOOK, "defer_loading": None}]},
    ],
    RESPONSES: [
        {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "medium"}},
        {"reasoning": {"context": "auto", "mode": "standard"}, "service_tier": "auto"},
        {"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"metadata": {"a": "b"}, "client_metadata": {"thread_id": "t"}, "user": "u"},
        {"truncation": "disabled"},
        {"input": [{"role": "user", "content": [CACHED_PART]}]},
        {"input": NULL_NAME, "tools": [{**RESPONSES_LOOK, "defer_loading": None}]},
    ],
}
"""Fields that change nothing that the engine gets."""


@pytest.mark.parametrize("path", OTHER_NAMES)
async def test_a_field_reaches_the_engine(path: str, subtests: pytest.Subtests) -> None:
    async with serve() as bench:
        stop_token_ids = list(bench.served.template.stop_token_ids)
        rows = [
            *OTHER_NAMES[path],
            *((fields, fields) for fields in SAME[path]),
            *((fields, {}) for fields in NO_EFFECT[path]),
        ]
        for fields, params in rows:
            with subtests.test(str(fields)):
                answer = await bench.send(path, {**BODIES[path], **fields})
                sent = bench.engine.log[-1]
                room = bench.engine.context_length - len(sent.input_ids)
                limit = BODIES[path].get("max_tokens", room)
                expected = {"max_new_tokens": limit, "stop_token_ids": stop_token_ids, **params}
                assert sent.sampling_params == expected
                if path == CHAT:
                    constrained = "response_format" if "json_schema" in params else None
                    assert answer.get("constrained") == constrained


ENDPOINTS: Fields = {"temperature": 0.9, "top_p": 0.8}
SESSIONS: Fields = {"temperature": 0.2, "max_new_tokens": 9}
LIMIT, SESSIONS_LIMIT = {"max_new_tokens": 20}, {"max_new_tokens": 9}
AS_SET: Fields = {"stop": "END", "logit_bias": {"7": 1.5}, "max_new_tokens": 9}
DEFAULTS: dict[str, tuple[Fields, Fields, str, Fields, Fields]] = {
    "the session's first": (ENDPOINTS, SESSIONS, CHAT, {}, {**ENDPOINTS, **SESSIONS}),
    "the request's first": (
        ENDPOINTS,
        SESSIONS,
        CHAT,
        {"temperature": 0.0, "max_tokens": 3},
        {"temperature": 0.0, "top_p": 0.8, "max_new_tokens": 3},
    ),
    "as they are set": ({"top_k": 5}, {**AS_SET, "min_p": None}, CHAT, {}, {"top_k": 5, **AS_SET}),
    "the endpoint's limit": (LIMIT, {}, TEXT, {}, LIMIT),
    "the session's limit": (LIMIT, SESSIONS_LIMIT, TEXT, {}, SESSIONS_LIMIT),
    "the request's limit": (LIMIT, SESSIONS_LIMIT, TEXT, {"max_tokens": 3}, {"max_new_tokens": 3}),
}
"""The defaults of the endpoint and of the session, a request, and what the engine gets."""


@pytest.mark.parametrize("name", DEFAULTS)
async def test_defaults_of_the_endpoint_and_of_a_session(name: str) -> None:
    defaults, session, path, fields, params = DEFAULTS[name]
    async with serve(settings={"sampling_params": defaults}) as bench:
        await bench.create(**session)
        await bench.send(in_session(path), {**BODIES[path], **fields})
        stop = bench.served.template.stop_token_ids
        assert bench.engine.log[0].sampling_params == {"stop_token_ids": list(stop), **params}


async def test_a_default_of_a_newer_sglang_is_sent_unless_dropped() -> None:
    async with serve(settings={"sampling_params": {"bogus": 1}}) as bench:
        await bench.create(novel=2, top_k=5)
        status, answer = await bench.post(in_session(CHAT), {"messages": [USER]})
        assert status == 400 and "unknown field `bogus`" in answer["error"]["message"]
        bench.endpoint.dropped = DROPPED_BY_SMG
        status, _, param = await bench.refusal(in_session(CHAT), {"messages": [USER]})
        assert (status, param) == (400, "bogus")


async def test_the_models_name_may_select_an_adapter() -> None:
    """The request's precedes the session's, which precedes the endpoint's."""
    settings = {"sampling_params": {"lora_path": "a"}}
    async with serve(settings=settings, lora_paths=("a", "b", "c:d")) as bench:
        await bench.create(lora_path="b")
        name = bench.endpoint.model_name
        requests = [("s", name), ("t", name), ("s", f"{name}:c:d"), ("t", f"{name}:"), ("t", "x:b")]
        for session, model in requests:
            answer = await bench.ask(USER, session=session, model=model)
            assert answer["model"] == name
        assert [entry.lora_path for entry in bench.engine.log] == ["b", "a", "c:d", "a", "a"]
        turns = [turn for each in await bench.trajectories() for turn in each["turns"]]
        assert [turn["sampling_params"]["lora_path"] for turn in turns] == ["b", "c:d"]


@pytest.mark.parametrize("of", ["session", "request"])
async def test_a_stop_string_is_cut_from_the_text(tokenizer: Any, of: str) -> None:
    async with serve("Hello END more") as bench:
        stop = {"stop": "END"}
        await bench.create(**(stop if of == "session" else {}))
        fields = stop if of == "request" else {}
        [choice] = (await bench.ask(USER, **fields))["choices"]
        content = choice["message"]["content"]
        assert (content.rstrip(), choice["stop_reason"]) == ("Hello", "END")
        assert "END" in tokenizer.decode(choice["token_ids"])  # it is kept, and not shown
        await bench.ask(USER, choice["message"], USER, **fields)
        await bench.one_trajectory(turns=2)
        text = await bench.send(in_session(TEXT), {"prompt": "Hi", **fields})
        assert text["choices"][0]["text"] == "Hello "
        stream = await streamed(bench.client(), model="m", messages=[USER], **fields)
        assert stream.choices[0].message.content == content
        await bench.trajectories()


def _without_top_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["meta_info"]["output_top_logprobs"]
    return answer


@pytest.mark.parametrize("n", [1, 2])
async def test_logprobs_are_the_engines_or_an_error(n: int) -> None:
    fields = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "n": n}
    missing = Fault(garble=_without_top_logprobs)
    faults = lambda request: missing if request.index >= n else None
    async with serve("Hello, é and 日本.", split="random", faults=faults) as bench:
        answer = await bench.send(CHAT, fields)
        for choice, entry in zip(answer["choices"], bench.engine.log, strict=True):
            places = choice["logprobs"]["content"]
            ids = [place["token_id"] for place in places]
            assert ids == choice["token_ids"] == entry.output_ids
            assert [place["logprob"] for place in places] == pytest.approx(entry.logprobs)
            expected = top_logprobs(entry.input_ids, entry.output_ids, 2)
            tops = [[top["token_id"] for top in place["top_logprobs"]] for place in places]
            assert tops == [[index for _, index in pairs] for pairs in expected]
        assert (await bench.refusal(CHAT, fields))[:2] == (502, "engine_error")


async def test_a_forced_call_is_constrained_and_marked() -> None:
    """With the choice "none", the model is shown no tools."""
    async with serve(call(at="x")) as bench:
        for choice in ("required", NAMED):
            answer = await bench.ask(USER, tools=[TOOL, OTHER], tool_choice=choice)
            grammar = bench.engine.log[-1].sampling_params["ebnf"]
            assert '"\\"look\\""' in grammar
            assert ('"\\"listen\\""' in grammar) == (choice == "required")
            assert answer["constrained"] == "tool_choice"
        for tool in (TOOL, STRICT):
            await bench.chat(USER, tools=[tool], tool_choice="none")
            assert "look" not in bench.prompt()
            assert "structural_tag" not in bench.engine.log[-1].sampling_params


MISSING: dict[str, tuple[str, Any, Any, str]] = {
    "required": ("Hello.", TOOL, "required", "grammar"),
    "named": ("Hello.", TOOL, NAMED, "grammar"),
    "another call": (call("listen"), TOOL, NAMED, "grammar"),
    "another call, strict": (call("listen"), STRICT, NAMED, "forces a call of look, but"),
    "against its schema": (call(at=3), STRICT, "auto", "look is strict"),
}
"""A reply to a request with a tool and a choice, and words of the error."""


@pytest.mark.parametrize("name", MISSING)
async def test_a_reply_without_the_forced_call_is_an_error(name: str) -> None:
    reply, tool, choice, words = MISSING[name]
    async with serve(reply) as bench:
        body = {"messages": [USER], "tools": [OTHER, tool], "tool_choice": choice}
        status, answer = await bench.post(in_session(CHAT), body)
        assert (status, answer["error"]["code"]) == (502, "engine_error"), answer
        assert "look" in answer["error"]["message"] and words in answer["error"]["message"]
        assert await bench.trajectories(refused=1) == []
        # no fault of the engine's
        for cut, reason in (({"max_tokens": 1}, "length"), ({"stop": "l"}, "stop")):
            answer = await bench.send(in_session(CHAT), {**body, **cut})
            assert answer["choices"][0]["finish_reason"] == reason


async def test_a_strict_tool_is_forced_to_its_schema_and_marked() -> None:
    schema = TOOL["function"]["parameters"]
    async with serve(call(at="x")) as bench:

        async def form(**fields: Any) -> Any:
            answer = await bench.ask(USER, **fields)
            assert answer["constrained"] == "strict"
            params = bench.engine.log[-1].sampling_params
            assert "ebnf" not in params
            return json.loads(params["structural_tag"])["format"]

        both = await form(tools=[OTHER, STRICT])
        schemas = [tag["content"]["json_schema"] for tag in both["tags"]]
        assert schemas == [{"type": "object"}, schema]
        assert (both["type"], both["stop_after_first"]) == ("triggered_tags", False)
        single = await form(tools=[STRICT], parallel_tool_calls=False)
        assert single["stop_after_first"]
        named = await form(tools=[OTHER, STRICT], tool_choice=NAMED)
        assert [tag["content"]["json_schema"] for tag in named["tags"]] == [schema]
        assert (named["type"], named["at_least_one"]) == ("tags_with_separator", True)
        lax = {**STRICT, "function": {**STRICT["function"], "strict": False}}
        await bench.ask(USER, tools=[lax])
        assert "structural_tag" not in bench.engine.log[-1].sampling_params


async def test_what_no_grammar_can_force_is_refused() -> None:
    place = "tools[1].function.strict"
    body = {"messages": [USER], "tools": [OTHER, STRICT]}
    async with serve() as bench:
        bench.endpoint.dropped = DROPPED_BY_SMG
        status, _, param = await bench.refusal(CHAT, body)
        assert (status, param, bench.engine.log) == (400, place, [])
    with pytest.raises(ApiError, match=r"tools\[1\].function.strict cannot be honored"):
        strict_tag("pythonic", [OTHER, STRICT], place, forced=False, several=True)
    grammar = lambda: call_grammar("pythonic", ["look"], several=False)
    for refused in (grammar, lambda: call_closer("llama3")):
        with pytest.raises(ApiError) as error:
            refused()
        assert error.value.status == 400


async def test_no_schema_of_a_tool_fails_a_request() -> None:
    """A broken reference, an address, a slow pattern."""
    slow = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    async with serve(call("f", a="a" * 40 + "!")) as bench:
        for schema in ({"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:9/x"}, slow):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            answer = await bench.ask(USER, tools=[tool])
            assert answer["choices"][0]["finish_reason"] == "tool_calls"


SHOWN = "{%% if %s is defined %%}[%s={{ %s }}]{%% endif %%}"
EFFORTS = (
    ("reasoning_effort", "low", "[reasoning_effort=low]"),
    ("enable_thinking", "high", "[enable_thinking=True]"),
    ("enable_thinking", "none", "[enable_thinking=False]"),
    ("thinking", "none", "[thinking=False]"),
    ("thinking", None, "<|turn|>user"),
)
"""A switch that the template shows, an effort, and the beginning of the prompt."""


async def test_reasoning_effort_is_the_templates_switch(tokenizer: Any) -> None:
    for switch, effort, shown in EFFORTS:
        switched = copy.deepcopy(tokenizer)
        switched.chat_template = SHOWN % (switch, switch, switch) + tokenizer.chat_template
        async with serve(tokenizer=switched) as bench:
            await bench.ask(USER, reasoning_effort=effort)
            assert bench.prompt().startswith(shown)
            both = {"reasoning_effort": "low", "chat_template_kwargs": {switch: "other"}}
            status, _, param = await bench.refusal(CHAT, {"messages": [USER], **both})
            assert (status, param) == (400, f"chat_template_kwargs.{switch}")


async def test_switches_are_compared_by_type_and_keep_their_order() -> None:
    """A template may render 1 and true differently, write documents as JSON, or loop over keys."""
    async with serve() as bench:
        templates = TemplateCache(bench.served.template.with_kwargs({"enable_thinking": True}))
        same, other = ({"enable_thinking": value} for value in (True, 1))
        assert templates.get(same) is templates.get({})
        assert type(templates.get(other).renderer.kwargs["enable_thinking"]) is int
        assert templates.switches_of(templates.get(other)) == {"enable_thinking": 1}
        for document in ({"title": "Pond", "text": "Wet."}, {"text": "Wet.", "title": "Pond"}):
            [kept] = templates.get({"documents": [document]}).renderer.kwargs["documents"]
            assert list(kept) == list(document)


FUNCTION = {"name": "look", "arguments": '{"at": "x"}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
REPLY = {"role": "assistant", "content": "One moment.", "tool_calls": [CALL]}
HISTORY: list[Fields] = [{"role": "system", "content": "S"}, USER, REPLY, RESULT]
IGNORED: dict[Dialect, tuple[Fields, set[str]]] = {
    "chat": ({"reasoning_effort": "medium"}, {"reasoning_effort"}),
    "messages": ({"output_config": {"effort": "low"}}, {"output_config.effort"}),
    "responses": (
        {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}},
        {"reasoning.effort", "text.verbosity"},
    ),
}
"""Fields, and the names under which they are counted."""
NEVER_SHOWN = "extra"


def marked(value: Any) -> Any:
    """`value` with an unknown field in each of its objects, but not in arguments."""
    if isinstance(value, list):
        return [marked(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {name: item if name == "input" else marked(item) for name, item in value.items()}
    if "text" in value:  # @openai/agents 0.20 adds these to a part of the message
        inner |= {"role": "assistant", "tool_calls": [{"id": "c"}]}
    return {**inner, NEVER_SHOWN: {"function_id": "c"}}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_changes_no_token_is_counted_and_said_once(
    dialect: Dialect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = [dict(message) for message in HISTORY]
    if dialect == "chat":
        for message in history:
            message["content"] = [{"type": "text", "text": message["content"]}]
    plain = body_of(dialect, history, stream=False)
    name = "input" if dialect == "responses" else "messages"
    fields, names = IGNORED[dialect]
    body = {**plain, **fields, name: marked(plain[name])}
    caplog.set_level(logging.WARNING)
    async with serve(out=tmp_path) as bench:
        for request in (plain, body, body):
            await bench.send(in_session(PATHS[dialect]), request)
        assert len({tuple(entry.input_ids) for entry in bench.engine.log}) == 1
        counted = (await bench.get("/sessions/s/trajectories"))["ignored_fields"]
        [listed] = (await bench.get("/sessions"))["data"]
    assert listed["ignored_fields"] == counted
    assert set(counted.values()) == {2}
    assert names < set(counted)
    assert any(path.endswith(f"[].{NEVER_SHOWN}") for path in counted)
    messages = [record.getMessage() for record in caplog.records]
    [warning] = [message for message in messages if "no token" in message]
    assert all(path in warning for path in counted)
    async with serve(out=tmp_path) as bench:
        assert (await bench.get("/sessions/s/trajectories"))["ignored_fields"] == counted
        assert await bench.delete() == 200
    [line] = (tmp_path / "episodes.jsonl").read_bytes().splitlines()
    assert json.loads(line)["info"]["session"]["ignored_fields"] == counted


def test_what_is_counted_is_bounded() -> None:
    ignored = IgnoredFields()
    ignored.add_others({"x" * 1000: 1, "known": 1, "null": None}, ["known"], "messages[7]")
    assert ignored.paths == {f"messages[].{'x' * 1000}"[:100]}
    for number in range(100):
        ignored.add(f"field{number}")
    assert len(ignored.paths) == 32
