"""Every field of a request is honored at the engine, or refused by its name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from support.endpoints import endpoint, streamed
from support.episodes import call
from support.listed_environment import TOOL

from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.requests.tool_choice import strict_tag
from toolroll.rollout.engine import ModelInfo
from toolroll.rollout.engine.sampling_params import DROPPED_BY_SMG
from toolroll.testing import Fault

USER: Any = {"role": "user", "content": "Hi"}
CHAT = "/sessions/s/v1/chat/completions"
OTHER: Any = {
    "type": "function",
    "function": {"name": "listen", "parameters": {"type": "object", "properties": {}}},
}


async def params(tokenizer: Any, said: str = "Hello.", /, **asked: Any) -> dict[str, Any]:
    """What the engine was told for a request with `asked`."""
    async with endpoint(tokenizer, lambda request: said) as bench:
        status, answer = await bench.post(CHAT, {"messages": [USER], **asked})
        assert status == 200, answer
        return {**bench.engine.log[0].sampling_params, "answer": answer}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_new_tokens": 6}),
        (
            {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
            {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
        ),
        (
            {"frequency_penalty": 0.5, "presence_penalty": -0.5},
            {"frequency_penalty": 0.5, "presence_penalty": -0.5},
        ),
        (
            {"repetition_penalty": 1.1, "min_tokens": 2},
            {"repetition_penalty": 1.1, "min_new_tokens": 2},
        ),
        ({"stop": "END"}, {"stop": ["END"]}),
        (
            {"stop": ["END", "STOP"], "ignore_eos": False},
            {"stop": ["END", "STOP"], "ignore_eos": False},
        ),
        ({"logit_bias": {"7": -100}}, {"logit_bias": {"7": -100}}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array"}},
                }
            },
            {"json_schema": '{"type":"array"}'},
        ),
        (
            {
                "temperature": None,
                "tools": None,
                "user": "u",
                "metadata": {"a": "b"},
                "response_format": {"type": "text"},
            },
            {},
        ),
    ],
)
async def test_a_field_reaches_the_engine(
    tokenizer: Any, asked: dict[str, Any], told: dict[str, Any]
) -> None:
    found = await params(tokenizer, **asked)
    assert {name: found[name] for name in told} == told
    assert not {"user", "metadata", "tools"} & set(found)
    assert found["answer"].get("constrained") == (
        "response_format" if "json_schema" in told else None
    )


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("best_of_all", {"best_of_all": 3}),
        ("functions", {"functions": []}),
        ("reasoning_effort", {"reasoning_effort": "none"}),
        ("store", {"store": True}),
        ("n", {"n": 0}),
        ("n", {"n": 1000}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("top_k", {"top_k": 0}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("stop_token_ids", {"stop_token_ids": [10**8]}),
        ("logit_bias", {"logit_bias": {str(10**8): 1}}),
        ("tool_choice", {"tool_choice": "required"}),
        (
            "tool_choice",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "listen"}}},
        ),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        (
            "response_format",
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
        ),
        ("response_format.type", {"response_format": {"type": "grammar"}}),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        (
            "stream_options.include_obfuscation",
            {"stream": True, "stream_options": {"include_obfuscation": True}},
        ),
        ("messages", {"messages": []}),
        ("messages", {"messages": [USER, {"role": "assistant", "content": "prefill"}]}),
        ("messages[0].role", {"messages": [{"role": "function", "content": "x"}]}),
        (
            "messages[0].content",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
        ),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        (
            "messages[1].audio",
            {"messages": [USER, {"role": "assistant", "content": "x", "audio": {"id": "a"}}, USER]},
        ),
    ],
)
async def test_what_cannot_be_honored_is_refused_by_its_name(
    tokenizer: Any, field: str, asked: dict[str, Any]
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, answer = await bench.post(CHAT, {"messages": [USER], **asked})
        assert (status, answer["error"]["param"]) == (400, field), answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert (
            field.partition("[")[0].partition(".")[0].removesuffix("s")
            in answer["error"]["message"]
        )
        assert bench.engine.log == []


async def test_a_forced_call_is_constrained_and_marked(tokenizer: Any) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        found = await params(tokenizer, call(at="x"), tools=[TOOL, OTHER], tool_choice=choice)
        assert '"\\"look\\""' in found["ebnf"]
        assert ('"\\"listen\\""' in found["ebnf"]) == (choice == "required")
        assert found["answer"]["constrained"] == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("required", "Hello."),
        ({"type": "function", "function": {"name": "look"}}, "Hello."),
        ({"type": "function", "function": {"name": "look"}}, call("listen")),
    ],
)
async def test_a_forced_call_that_the_engine_does_not_make_is_its_error(
    tokenizer: Any, choice: Any, said: str
) -> None:
    async with endpoint(tokenizer, lambda request: said) as bench:
        asked = {"messages": [USER], "tools": [TOOL, OTHER], "tool_choice": choice}
        status, answer = await bench.post(CHAT, asked)
        assert (status, answer["error"]["code"]) == (502, "engine_error"), answer
        assert "look" in answer["error"]["message"]
        assert "grammar" in answer["error"]["message"]
        assert await bench.trajectories(refused=1) == []
        # no fault of the engine's
        for cut, reason in (({"max_tokens": 1}, "length"), ({"stop": "l"}, "stop")):
            status, answer = await bench.post(CHAT, {**asked, **cut})
            assert (status, answer["choices"][0]["finish_reason"]) == (200, reason), answer


async def test_no_tool_choice_shows_the_model_no_tools(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: call(at="x")) as bench:
        _, answer = await bench.post(
            CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}
        )
        assert answer["choices"][0]["message"].get("tool_calls") is None
        assert answer["choices"][0]["message"]["content"] == call(at="x")
        assert "look" not in tokenizer.decode(bench.engine.log[0].input_ids)


async def test_one_call_only(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: call(at="x") + call(at="y")) as bench:
        _, answer = await bench.post(
            CHAT, {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": False}
        )
        [only] = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(only["function"]["arguments"]) == {"at": "x"}
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": only["id"], "content": "seen"}
        messages = [USER, answer["choices"][0]["message"], result]
        assert (
            await bench.post(
                CHAT, {"messages": messages, "tools": [TOOL], "parallel_tool_calls": False}
            )
        )[0] == 200
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "n": 2}])
async def test_logprobs_have_the_ids_of_their_tokens(
    tokenizer: Any, fields: dict[str, Any]
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello, é and 日本.", split="random") as bench:
        _, answer = await bench.post(CHAT, {"messages": [USER], **fields})
        for choice, entry in zip(answer["choices"], bench.engine.log, strict=True):
            content = choice["logprobs"]["content"]
            assert (
                [token["token_id"] for token in content] == choice["token_ids"] == entry.output_ids
            )
            assert [token["logprob"] for token in content] == pytest.approx(entry.logprobs)


async def test_top_logprobs_that_the_engine_does_not_give_are_an_error(tokenizer: Any) -> None:
    def remove(answer: dict[str, Any]) -> dict[str, Any]:
        del answer["meta_info"]["output_top_logprobs"]
        return answer

    async with endpoint(
        tokenizer, lambda request: "Hello.", faults=lambda request: Fault(garble=remove)
    ) as bench:
        status, answer = await bench.post(
            CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 2}
        )
        assert (status, answer["error"]["code"]) == (502, "engine_error")


async def test_top_logprobs(tokenizer: Any) -> None:
    def add(answer: dict[str, Any]) -> dict[str, Any]:
        items = answer["meta_info"]["output_token_logprobs"]
        answer["meta_info"]["output_top_logprobs"] = [
            [[value, index, None], [value - 1, 5, None]] for value, index, _ in items
        ]
        return answer

    async with endpoint(
        tokenizer, lambda request: "Hello.", faults=lambda request: Fault(garble=add)
    ) as bench:
        _, answer = await bench.post(
            CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 2}
        )
        for token in answer["choices"][0]["logprobs"]["content"]:
            assert [other["token_id"] for other in token["top_logprobs"]] == [token["token_id"], 5]


async def test_a_session_has_defaults_of_its_own(tokenizer: Any) -> None:
    defaults = {"sampling_params": {"temperature": 0.9, "top_p": 0.8}}
    async with endpoint(tokenizer, lambda request: "Hello.", settings=defaults) as bench:
        made = {"session_id": "s", "sampling_params": {"temperature": 0.2, "max_new_tokens": 9}}
        assert (await bench.post("/sessions", made))[0] == 201
        for body in ({}, {"temperature": 0.0, "max_tokens": 3}):
            await bench.post(CHAT, {"messages": [USER], **body})
        told = [entry.sampling_params for entry in bench.engine.log]
        assert [(it["temperature"], it["top_p"], it["max_new_tokens"]) for it in told] == [
            (0.2, 0.8, 9),
            (0.0, 0.8, 3),
        ]
        status, answer = await bench.post(
            "/sessions", {"session_id": "t", "sampling_params": {"temprature": 1}}
        )
        assert (status, answer["error"]["param"]) == (400, "sampling_params.temprature")


async def test_a_default_that_a_newer_sglang_may_have_is_sent_unless_a_router_drops_it(
    tokenizer: Any,
) -> None:
    settings = {"sampling_params": {"bogus": 1}}
    async with endpoint(tokenizer, lambda request: "Hello.", settings=settings) as bench:
        made = {"session_id": "s", "sampling_params": {"novel": 2, "top_k": 5}}
        assert (await bench.post("/sessions", made))[0] == 201
        status, answer = await bench.post(CHAT, {"messages": [USER]})
        assert status == 400 and "unknown field `bogus`" in answer["error"]["message"]
        bench.endpoint.dropped = DROPPED_BY_SMG
        status, answer = await bench.post(CHAT, {"messages": [USER]})
        assert (status, answer["error"]["param"]) == (400, "bogus")


async def test_the_model_s_name_may_select_an_adapter(tokenizer: Any) -> None:
    """The request's precedes the session's, which precedes the endpoint's."""
    settings = {"sampling_params": {"lora_path": "a"}}
    async with endpoint(
        tokenizer, lambda request: "Hello.", settings=settings, lora_paths=("a", "b", "c:d")
    ) as bench:
        made = {"session_id": "s", "sampling_params": {"lora_path": "b"}}
        assert (await bench.post("/sessions", made))[0] == 201
        own = bench.endpoint.model_name
        asked = [("s", own), ("t", own), ("s", f"{own}:c:d"), ("t", f"{own}:"), ("t", "other:b")]
        for session, model in asked:
            path = f"/sessions/{session}/v1/chat/completions"
            status, answer = await bench.post(path, {"messages": [USER], "model": model})
            assert status == 200 and answer["model"] == own
        assert [entry.lora_path for entry in bench.engine.log] == ["b", "a", "c:d", "a", "a"]
        names = [
            turn["sampling_params"]["lora_path"]
            for trajectory in await bench.trajectories()
            for turn in trajectory["turns"]
        ]
        assert names == ["b", "c:d"]


async def test_a_sessions_limit_precedes_the_endpoints(tokenizer: Any) -> None:
    settings = {"sampling_params": {"max_new_tokens": 20}}
    async with endpoint(tokenizer, lambda request: "Hello.", settings=settings) as bench:
        made = {"session_id": "s", "sampling_params": {"max_new_tokens": 9}}
        assert (await bench.post("/sessions", made))[0] == 201
        for session, body in (("s", {}), ("t", {}), ("s", {"max_tokens": 3})):
            await bench.post(f"/sessions/{session}/v1/completions", {"prompt": "Hi", **body})
        limits = [entry.sampling_params["max_new_tokens"] for entry in bench.engine.log]
        assert limits == [9, 20, 3]


@pytest.mark.parametrize(("limit", "room"), [({}, 200), ({"max_new_tokens": 20}, 280)])
async def test_a_long_first_prompt_is_cut_to_make_room_for_the_sessions_limit(
    tokenizer: Any, limit: dict[str, int], room: int
) -> None:
    settings = {"sampling_params": {"max_new_tokens": 100}}
    long = {"messages": [{"role": "user", "content": "word " * 800}]}
    async with endpoint(
        tokenizer, lambda request: "Hello.", settings=settings, context_length=300
    ) as bench:
        bench.endpoint.openrlhf = True
        made = {"session_id": "s", "sampling_params": limit}
        assert (await bench.post("/sessions", made))[0] == 201
        assert (await bench.post(CHAT, long))[0] == 200
        [sent] = bench.engine.log
        assert len(sent.input_ids) == room
        assert sent.sampling_params["max_new_tokens"] == 300 - room


async def test_a_sessions_stop_string_is_cut_from_the_text_as_a_requests_is(
    tokenizer: Any,
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello END more") as bench:
        made = {"session_id": "s", "sampling_params": {"stop": "END"}}
        assert (await bench.post("/sessions", made))[0] == 201
        for session, more in (("s", {}), ("t", {"stop": "END"})):
            path = f"/sessions/{session}/v1"
            _, chat = await bench.post(f"{path}/chat/completions", {"messages": [USER], **more})
            assert chat["choices"][0]["message"]["content"].rstrip() == "Hello"
            assert chat["choices"][0]["stop_reason"] == "END"
            _, text = await bench.post(f"{path}/completions", {"prompt": "Hi", **more})
            assert text["choices"][0]["text"] == "Hello "
            asked = {"model": "m", "messages": [USER], **more}
            streamed_one = await streamed(bench.client(session), **asked)
            message = chat["choices"][0]["message"]
            assert streamed_one.choices[0].message.content == message["content"]
            await bench.trajectories(session)


async def test_a_switch_of_another_type_is_another_switch(tokenizer: Any) -> None:
    """A template may render 1 and true differently."""
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        templates = TemplateCache(bench.served.template.with_kwargs({"enable_thinking": True}))
        same, other = ({"enable_thinking": value} for value in (True, 1))
        assert templates.get(same) is templates.get({})
        assert type(templates.get(other).renderer.kwargs["enable_thinking"]) is int
        assert templates.switches_of(templates.get(other)) == {"enable_thinking": 1}


async def test_the_keys_inside_a_switch_keep_their_order(tokenizer: Any) -> None:
    """Templates write documents as JSON, or loop over their keys."""
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        templates = TemplateCache(bench.served.template)
        documents = [{"title": "Pond", "text": "Wet."}, {"text": "Wet.", "title": "Pond"}]
        kept = [templates.get({"documents": [one]}).renderer.kwargs for one in documents]
        assert [list(kwargs["documents"][0]) for kwargs in kept] == [*map(list, documents)]


# --- seeds, tiers, strict tools, effort -----------------------------------------------------------


async def test_a_seed_is_sent(tokenizer: Any) -> None:
    assert (await params(tokenizer, seed=3))["sampling_seed"] == 3


async def test_the_only_tier_there_is_is_taken(tokenizer: Any) -> None:
    for tier in ("auto", "default"):
        assert "service_tier" not in await params(tokenizer, service_tier=tier)
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, answer = await bench.post(CHAT, {"messages": [USER], "service_tier": "priority"})
        assert (status, answer["error"]["param"]) == (400, "service_tier")


STRICT: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}


async def test_a_strict_tool_is_forced_to_its_schema_and_marked(tokenizer: Any) -> None:
    found = await params(tokenizer, call(at="x"), tools=[OTHER, STRICT])
    form = json.loads(found["structural_tag"])["format"]
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [
        {"type": "object"},
        TOOL["function"]["parameters"],
    ]
    assert (form["type"], form["stop_after_first"]) == ("triggered_tags", False)
    assert found["answer"]["constrained"] == "strict"
    one = await params(tokenizer, call(at="x"), tools=[STRICT], parallel_tool_calls=False)
    assert json.loads(one["structural_tag"])["format"]["stop_after_first"]
    named = await params(
        tokenizer,
        call(at="x"),
        tools=[OTHER, STRICT],
        tool_choice={"type": "function", "function": {"name": "look"}},
    )
    form = json.loads(named["structural_tag"])["format"]
    assert (form["type"], len(form["tags"]), form["at_least_one"], "ebnf" in named) == (
        "tags_with_separator",
        1,
        True,
        False,
    )
    lax = await params(
        tokenizer,
        call(at="x"),
        tools=[{**STRICT, "function": {**STRICT["function"], "strict": False}}],
    )
    assert "structural_tag" not in lax
    assert "structural_tag" not in await params(tokenizer, tools=[STRICT], tool_choice="none")


async def test_a_strict_call_against_its_schema_is_no_answer(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: call(at=3)) as bench:
        status, answer = await bench.post(CHAT, {"messages": [USER], "tools": [OTHER, STRICT]})
        assert (status, answer["error"]["code"]) == (502, "engine_error")
        assert "look is strict" in answer["error"]["message"]
        assert (await bench.post(CHAT, {"messages": [USER], "tools": [TOOL]}))[0] == 200
        assert len(await bench.trajectories(refused=1)) == 1


async def test_a_call_of_another_tool_than_the_named_strict_one_is_no_answer(
    tokenizer: Any,
) -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    body = {"messages": [USER], "tools": [OTHER, STRICT], "tool_choice": choice}
    other = '<tool_call>\n{"name": "listen", "arguments": {}}\n</tool_call>'
    async with endpoint(tokenizer, lambda request: other) as bench:
        status, answer = await bench.post(CHAT, body)
        assert (status, answer["error"]["code"]) == (502, "engine_error")
        assert "forces a call of look, but the reply has none" in answer["error"]["message"]


async def test_strict_is_refused_by_name_if_it_cannot_be_honored(tokenizer: Any) -> None:
    place = "tools[1].function.strict"
    body = {"messages": [USER], "tools": [OTHER, STRICT]}
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, answer = await bench.post(
            CHAT, {**body, "response_format": {"type": "json_object"}}
        )
        assert (status, answer["error"]["param"]) == (400, place)
        bench.endpoint.dropped = DROPPED_BY_SMG
        status, answer = await bench.post(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, place)
        assert bench.engine.log == []
    with pytest.raises(ApiError, match=r"tools\[1\].function.strict cannot be honored"):
        strict_tag("pythonic", [OTHER, STRICT], place, forced=False, several=True)


SWITCHED = "{%% if %s is defined %%}[%s={{ %s }}]{%% endif %%}"


@pytest.mark.parametrize(
    ("switch", "effort", "shown"),
    [
        ("reasoning_effort", "low", "[reasoning_effort=low]"),
        ("enable_thinking", "high", "[enable_thinking=True]"),
        ("enable_thinking", "none", "[enable_thinking=False]"),
        ("thinking", "none", "[thinking=False]"),
        ("thinking", None, "<|turn|>user"),
    ],
)
async def test_reasoning_effort_is_the_templates_switch(
    tokenizer: Any, switch: str, effort: str | None, shown: str
) -> None:
    switched = copy.deepcopy(tokenizer)
    switched.chat_template = SWITCHED % (switch, switch, switch) + tokenizer.chat_template
    async with endpoint(switched, lambda request: "Hello.") as bench:
        status, answer = await bench.post(CHAT, {"messages": [USER], "reasoning_effort": effort})
        assert status == 200, answer
        assert tokenizer.decode(answer["prompt_token_ids"]).startswith(shown)
        both = {"reasoning_effort": "low", "chat_template_kwargs": {switch: "other"}}
        status, answer = await bench.post(CHAT, {"messages": [USER], **both})
        assert (status, answer["error"]["param"]) == (400, f"chat_template_kwargs.{switch}")


# --- routes that are not served -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/assistants", "/v1/chat/completions"),
        ("/v1/embeddings", "must end with /v1,"),
        ("/generate", "/v1/completions"),
        ("/chat/completions", "must end with /v1,"),
        ("/sessions/s/responses", "must end with /sessions/s/v1,"),
        ("/session/s/v1/responses", "must end with /sessions/s/v1,"),
        ("/v1/sessions/s/chat/completions", "must end with /sessions/s/v1,"),
        ("/sessions/s/v1/v1/chat/completions", "must end with /sessions/s/v1,"),
        ("/openai/v1/chat/completions", "must end with /v1,"),
        ("/v1/chat/completions/", "must end with /v1,"),
        ("/sessions/s/v1/v1/messages", "SDK with /sessions/s."),
        ("/v1/v1/messages", "SDK with the port."),
        ("/nowhere", "GET /v1/models"),
    ],
)
async def test_an_unknown_route_says_what_to_use(tokenizer: Any, path: str, hint: str) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, answer = await bench.post(path, {})
        kind = "not_found_error" if "messages" in path else "invalid_request_error"
        assert (status, answer["error"]["code"]) == (404, "not_found")
        assert answer["error"]["type"] == kind
        assert hint in answer["error"]["message"]
        assert path in answer["error"]["message"]


async def test_every_route_that_is_named_is_served(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        _, answer = await bench.post("/nowhere", {})
        words = answer["error"]["message"]
        for found in words.partition("POST ")[2].partition(";")[0].split(", "):
            async with bench.http.post(bench.url + found, json={}) as response:
                assert response.status in (201, 400), found
        for found in words.partition("GET ")[2].partition(";")[0].split(", "):
            async with bench.http.get(
                bench.url + found.replace("MODEL", bench.endpoint.model_name)
            ) as response:
                assert response.status == 200, found
        async with bench.http.get(f"{bench.url}/v1/completions") as response:
            assert "use POST" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("index", [-1, 2**31, 2**40])
async def test_an_id_that_is_none_is_refused_for_a_model_of_any_vocabulary(
    tokenizer: Any, index: int
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        bench.endpoint.model_info = ModelInfo(context_length=1000)
        status, answer = await bench.post("/v1/completions", {"prompt": [1, index]})
        assert (status, answer["error"]["param"]) == (400, "prompt")
