"""The grammars that force a tool call, as xgrammar reads them."""

import pytest
from support.formats import glm45, hermes, llama3, qwen3_coder

from toolroll.endpoint.requests.tool_choice import call_grammar, strict_tag

WRITERS = {"hermes": hermes, "llama3": llama3, "qwen3_coder": qwen3_coder, "glm45": glm45}


@pytest.mark.parametrize("name", WRITERS)
def test_a_grammar_takes_what_its_parser_reads_and_nothing_else(name: str) -> None:
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    said = WRITERS[name]([("look", {"at": "x"})])
    one = Grammar.from_ebnf(call_grammar(name, ["look", 'od"d'], several=False))
    assert accepts(one, said)
    assert not accepts(one, said.replace("look", "listen"))
    for wrong in ("", "I look. " + said, said[:-1], said + "\nWell.", f"{said}\n{said}"):
        assert not accepts(one, wrong)
    if name != "llama3":
        assert accepts(
            Grammar.from_ebnf(call_grammar(name, ["look"], several=True)), f"{said}\n{said}"
        )


SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
FREE = {"type": "function", "function": {"name": "listen", "parameters": SCHEMA}}


@pytest.mark.parametrize("forced", [False, True])
def test_a_strict_tag_takes_calls_of_the_schema_and_nothing_else(forced: bool) -> None:
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    grammar = Grammar.from_structural_tag(
        strict_tag("hermes", [STRICT, FREE], "", forced=forced, several=True)
    )
    right = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    wrong = right.replace('"x"', "3")
    assert accepts(grammar, right)
    assert accepts(grammar, f"{right}\n{right}")
    assert not accepts(grammar, wrong)
    assert not accepts(grammar, right.replace("look", "sniff"))
    assert accepts(grammar, wrong.replace("look", "listen"))
    for free in ("Well.", "I look. " + right):
        assert accepts(grammar, free) != forced
    one = Grammar.from_structural_tag(
        strict_tag("hermes", [STRICT], "", forced=forced, several=False)
    )
    assert accepts(one, right)
    assert not accepts(one, f"{right}\n{right}")
