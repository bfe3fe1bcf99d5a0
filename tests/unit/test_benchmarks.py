"""The benchmarks: what is compared is of the right size, and figures are what was measured."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from benchmarks.clock import HELPERS, _is_below
from benchmarks.conversations import Workload, invented, other_digits, synthetic_tools, tokenizer
from benchmarks.deltas import Tight
from benchmarks.endpoint import measure
from benchmarks.stub import stub
from benchmarks.tables import Required, named_figures, verdicts, with_figures
from benchmarks.world import material, replies

TOOLS = synthetic_tools()
TOKENS_OF_TAU_BENCH = 2584
"""Tokens of tau-bench's 14 airline tools in a prompt."""


@pytest.fixture(scope="module")
def tok() -> Any:
    return tokenizer()


def test_the_synthetic_tools_have_the_size_of_tau_benchs(tok: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    lengths = [
        len(tok.encode(tok.apply_chat_template(messages, tools=tools, tokenize=False)))
        for tools in (TOOLS, None)
    ]
    assert len(TOOLS) == 14
    assert lengths[0] - lengths[1] == pytest.approx(TOKENS_OF_TAU_BENCH, rel=0.03)


def test_an_invented_call_has_all_arguments_of_its_tool() -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    turns = invented(0, TOOLS, None).turns
    calls = [call["function"] for turn in turns for call in turn.assistant.get("tool_calls", ())]
    assert calls
    for call in calls:
        assert list(json.loads(call["arguments"])) == schemas[call["name"]]["required"]


def test_other_digits_keep_the_shape_and_differ() -> None:
    texts = {other_digits(seed)("user_0123456789") for seed in range(50)}
    assert len(texts) == 50
    assert {len(text) for text in texts} == {15}


def test_the_tight_loop_sends_the_prompts_of_the_template(tok: Any) -> None:
    first: Any = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    said = {"role": "assistant", "content": "Fine."}
    new: Any = [{"role": "tool", "tool_call_id": "c", "name": "f", "content": '{"a": 1}'}]
    way = Tight(tok)
    way.begin(first, TOOLS)
    ids = [*tok.encode("Fine."), tok.convert_tokens_to_ids("<|im_end|>")]
    prompt = way.turn(said, ids, new)
    kwargs: Any = {"tools": TOOLS, "tokenize": False, "add_generation_prompt": True}
    assert tok.decode(list(prompt)) == tok.apply_chat_template([*first, said, *new], **kwargs)


def test_cpu_time_is_that_of_the_processes_below_without_helpers() -> None:
    parents = {2: 1, 3: 2, 4: 3, 5: 1, 6: 5, 7: 0}
    HELPERS.add(5)
    try:
        assert [pid for pid in parents if _is_below(pid, 2, parents)] == [2, 3, 4]
        assert [pid for pid in parents if _is_below(pid, 1, parents)] == [2, 3, 4]
    finally:
        HELPERS.discard(5)


def test_a_figure_is_the_range_of_what_was_measured() -> None:
    page = "<!--a.b-->?<!--/--> ms, <!--c-->7<!--/-->"
    assert named_figures(page) == {"a.b", "c"}
    filled = with_figures(page, {"a.b": [1.234, 2.0]})
    assert filled == "<!--a.b-->1.23 to 2.00<!--/--> ms, <!--c-->7<!--/-->"
    assert with_figures(filled, {"a.b": [3.0]}).startswith("<!--a.b-->3.00<!--/-->")


def test_a_required_ratio_counts_the_runs_in_which_it_held() -> None:
    runs = [[Required("r", ratio, 1.0), Required("s", ratio, 1.0, least=True)] for ratio in (1, 2)]
    assert [row[2] for row in verdicts(runs).rows] == ["**1 of 2**", "2 of 2"]


def test_the_endpoints_benchmark_misplaces_no_reply(tok: Any) -> None:
    talks = Workload([invented(seed, TOOLS, "Be brief.") for seed in range(3)], TOOLS, "")
    with stub(itertools.islice(replies(talks, tok), 60)) as url:
        stretches, misplaced = asyncio.run(measure(url, tok, material(talks), 6, (1, 4)))
    assert [stretch.requests for stretch in stretches] == [6, 18]
    assert all(stretch.renders >= stretch.requests for stretch in stretches[:1])
    assert misplaced == 0
