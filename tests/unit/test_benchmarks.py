"""The benchmarks: what is compared is of the right size, and figures are what was measured."""

import asyncio
import itertools
from typing import Any

import pytest
from benchmarks.conversations import Workload, invented, synthetic_tools, tokenizer
from benchmarks.deltas import Tight
from benchmarks.endpoint import measure
from benchmarks.stub import stub
from benchmarks.tables import named_figures, with_figures
from benchmarks.world import material, replies

TOOLS = synthetic_tools()


@pytest.fixture(scope="module")
def tok() -> Any:
    return tokenizer()


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


def test_a_figure_is_the_range_of_what_was_measured() -> None:
    page = "<!--a.b-->?<!--/--> ms, <!--c-->7<!--/-->"
    assert named_figures(page) == {"a.b", "c"}
    filled = with_figures(page, {"a.b": [1.234, 2.0]})
    assert filled == "<!--a.b-->1.23 to 2.00<!--/--> ms, <!--c-->7<!--/-->"
    assert with_figures(filled, {"a.b": [3.0]}).startswith("<!--a.b-->3.00<!--/-->")


def test_the_endpoints_benchmark_misplaces_no_reply(tok: Any) -> None:
    talks = Workload([invented(seed, TOOLS, "Be brief.") for seed in range(3)], TOOLS, "")
    with stub(itertools.islice(replies(talks, tok), 60)) as url:
        stretches, misplaced = asyncio.run(measure(url, tok, material(talks), 6, (1, 4)))
    assert [stretch.requests for stretch in stretches] == [6, 18]
    assert all(stretch.renders >= stretch.requests for stretch in stretches[:1])
    assert misplaced == 0
