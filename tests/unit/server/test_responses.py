"""OpenAI's Responses, where it differs from the other dialects (`test_dialects.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseCustomToolCall
from support.client_scenario import one_episode, saying
from support.episodes import call
from support.responses_wire import HELLO, LOOK
from support.served import RESPONSES, USER, in_session, serve, user
from support.wires import ask, continued, play

from toolroll.endpoint.dialects.openai_responses_items import read_items
from toolroll.endpoint.requests.ignored_fields import IgnoredFields

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
PATH = in_session(RESPONSES)
THOUGHT = "<think>\nHm.\n</think>\n\n"
STREAMED = pytest.mark.parametrize("stream", [False, True])


@STREAMED
@pytest.mark.parametrize("store", [False, True])
async def test_reasoning_that_is_not_stored_is_encrypted(stream: bool, store: bool) -> None:
    """Qwen Code sends reasoning back as a message if it has no `encrypted_content`."""
    async with serve(f"{THOUGHT}Yes.") as bench:
        response = await ask(bench, {**HELLO, "store": store}, stream=stream)
        assert (response["output"][0]["encrypted_content"] is None) == store
        included = {"store": store, "include": ["reasoning.encrypted_content"]}
        response = await ask(bench, {**HELLO, **included}, stream=stream)
        assert response["output"][0]["encrypted_content"]


def test_a_tagged_text_stays_text_if_the_model_does_not_reason() -> None:
    item = {"role": "assistant", "content": "<think>\nHm.\n</think>"}
    [kept] = read_items([item], IgnoredFields(), reasons=False, find=lambda _: None)
    assert kept == {"role": "assistant", "content": item["content"]}
    [thought] = read_items([item], IgnoredFields(), reasons=True, find=lambda _: None)
    assert thought == {"role": "assistant", "content": None, "reasoning_content": "Hm."}


TAGGED = call(at="x") + "<think>\nb\n</think>"
CUT_CALL = call(at="w") + '<tool_call>{"name": "look", "arguments": {"at": "x", "b'
SAID, CALLED = ("message", "completed"), ("function_call", "completed")
REPLIES: dict[str, tuple[str, bool, list[tuple[str, str]]]] = {
    "nothing": ("", False, [SAID]),
    "blanks": ("  \n", False, [SAID]),
    "tagged text after a call": (TAGGED, False, [CALLED, SAID]),
    "a cut text": ("One two", True, [("message", "incomplete")]),
    "a cut call": (CUT_CALL, True, [CALLED, ("function_call", "incomplete")]),
    "a whole call at the end": (call(at="w"), True, [CALLED]),
}
"""A reply, whether it is cut, and the types of its items and their status."""


@STREAMED
@pytest.mark.parametrize("name", REPLIES)
async def test_a_reply_can_be_continued(tokenizer: Any, name: str, stream: bool) -> None:
    text, cut, items = REPLIES[name]
    body = {**HELLO, "tools": [LOOK]}
    if cut:
        body["max_output_tokens"] = len(tokenizer.encode(text, add_special_tokens=False))
    async with serve([text + " and more" if cut else text, "Done."]) as bench:
        response = await ask(bench, body, stream=stream)
        assert response["status"] == ("incomplete" if cut else "completed")
        reason = {"reason": "max_output_tokens"} if cut else None
        assert response.get("incomplete_details") == reason
        assert [(item["type"], item["status"]) for item in response["output"]] == items
        await ask(bench, continued(body, response), stream=stream)
        await bench.one_trajectory(turns=2)


@STREAMED
async def test_a_stored_response_is_returned_as_it_was(stream: bool) -> None:
    async with serve() as bench:
        body = {**HELLO, "tools": [LOOK], "metadata": {"a": "b"}, "instructions": "Be brief."}
        stored = await ask(bench, body, stream=stream)
        assert await bench.get(f"{PATH}/{stored['id']}") == stored
        assert stored["metadata"] == {"a": "b"}
        other = await ask(bench, {**HELLO, "store": False}, stream=stream)
        for path in (f"{PATH}/{other['id']}", f"{RESPONSES}/{stored['id']}"):
            assert (await bench.get(path))["error"]["code"] == "response_not_found"


async def test_other_instructions_replace_the_previous_ones() -> None:
    async with serve() as bench:
        first = await ask(bench, {**HELLO, "instructions": "Be brief."})
        for instructions in (None, "Be long."):
            more = {"instructions": instructions, "previous_response_id": first["id"]}
            await ask(bench, {"input": "More", **more})
            prompt = bench.prompt()
            assert "Be brief." not in prompt and "Hello." in prompt and "More" in prompt
            assert ("Be long." in prompt) == (instructions is not None)
        await bench.trajectories()


@STREAMED
@pytest.mark.parametrize("kinds", [1, 2, 3])
async def test_a_reference_is_the_item_of_this_session(
    any_tokenizer: Any, stream: bool, kinds: int, tmp_path: Path
) -> None:
    """So the Vercel AI SDK's provider sends an item that it was told is stored."""
    stored = ("reasoning", "message", "function_call")[:kinds]

    def refer(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"type": "item_reference", "id": item["id"]} if item.get("type") in stored else item
            for item in items
        ]

    async with serve(saying, tokenizer=any_tokenizer, split="random", out=tmp_path) as bench:
        await play(bench, "responses", stream=stream, change=refer)
        await one_episode(bench)
        assert await bench.forks() == []


async def test_a_reference_to_nothing_stored_says_so() -> None:
    async with serve() as bench:
        stored = await ask(bench, HELLO)
        other = await ask(bench, {**HELLO, "store": False})
        for path, response, expected in (
            (PATH, stored, 200),
            (PATH, other, 404),
            (in_session(RESPONSES, "t"), stored, 404),
            (RESPONSES, stored, 404),
        ):
            item_id = response["output"][0]["id"]
            for reference in ({"type": "item_reference", "id": item_id}, {"id": item_id}):
                status, answer = await bench.post(path, {"input": [USER, reference, USER]})
                assert status == expected, answer
                if status == 404:
                    error = answer["error"]
                    assert (error["code"], error["param"]) == ("item_not_found", "input[1].id")
                    assert item_id in error["message"] and "store: false" in error["message"]


PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
PATCHES = ['*** Begin\n+ "x" <b>\n', "", '{"input": "y"}']
MALFORMED: list[dict[str, Any]] = [{"patch": "x"}, {"input": ["x"]}]


@STREAMED
@pytest.mark.parametrize("namespace", ["", "files"])
async def test_custom_tools_are_functions(any_tokenizer: Any, stream: bool, namespace: str) -> None:
    """A malformed call stays a function call."""
    name = f"{namespace}__apply_patch" if namespace else "apply_patch"
    replies = [call(name, input=patch) for patch in PATCHES]
    replies += [*(call(name, **arguments) for arguments in MALFORMED), "Done."]
    tool: dict[str, Any] = {**PATCH, "format": {"type": "text"}}
    if namespace:
        tool = {"type": "namespace", "name": namespace, "description": "A disk.", "tools": [PATCH]}
    async with serve(replies, tokenizer=any_tokenizer, split="random") as bench:
        body: dict[str, Any] = {"input": [user("Fix it.")], "tools": [tool]}
        for patch in [*PATCHES, *MALFORMED]:
            response = await ask(bench, body, stream=stream)
            [item] = response["output"]
            if isinstance(patch, str):
                assert item["type"] == "custom_tool_call"
                assert ResponseCustomToolCall.model_validate(item).input == patch
            else:
                assert (item["type"], json.loads(item["arguments"])) == ("function_call", patch)
            assert (item["name"], item.get("namespace", "")) == ("apply_patch", namespace)
            body = continued(body, response)
        assert (await ask(bench, body, stream=stream))["output"]
        assert '"input"' in bench.prompt(0) and f'"{name}"' in bench.prompt(0)
        assert ("A disk." in bench.prompt(0)) == bool(namespace)
        await bench.one_trajectory(turns=len(replies))


async def test_a_custom_tool_can_be_forced_or_dropped() -> None:
    """It is dropped if it has a grammar."""
    tools = [{**PATCH, "name": "other", "format": GRAMMAR}, PATCH]
    body = {**HELLO, "tools": tools, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    reply = call("apply_patch", input="x")
    async with serve(reply, settings={"server_tools": "drop"}) as bench:
        response = await ask(bench, body)
        assert response["output"][0]["input"] == "x"
        assert response["tool_choice"] == body["tool_choice"]
        assert '"\\"apply_patch\\""' in bench.engine.log[-1].sampling_params["ebnf"]
        assert "other" not in bench.prompt()
