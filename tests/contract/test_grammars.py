"""The grammars that force a tool call, as xgrammar reads them."""

from __future__ import annotations

import pytest
from support.tool_calls import SAID

from toolroll.rollout.server.grammar import call_grammar


@pytest.mark.parametrize("name", SAID)
def test_a_grammar_takes_what_its_parser_reads_and_nothing_else(name: str) -> None:
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    said = SAID[name]
    one = Grammar.from_ebnf(call_grammar(name, ["look", 'od"d'], several=False))
    assert accepts(one, said)
    assert not accepts(one, said.replace("look", "listen"))
    for wrong in ("", "I look. " + said, said[:-1], said + "\nWell.", f"{said}\n{said}"):
        assert not accepts(one, wrong)
    if name != "llama3":
        assert accepts(Grammar.from_ebnf(call_grammar(name, ["look"], several=True)), f"{said}\n{said}")
