"""The tokenizers that the tests are built on have the real vocabulary."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.qwen import (
    FEW_RANKS,
    QWEN3_ADDED,
    extra_templates,
    qwen3_tokenizer,
    tokenizer_for,
    trl_template,
)

pytestmark = pytest.mark.tokens


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """The real tokenizer, with all ranks."""
    return qwen3_tokenizer()


def test_known_ids(qwen3: Any) -> None:
    """As Qwen3 publishes them; the first two were seen on the wire of a server. Skipped are those
    that Qwen skips."""
    assert (qwen3.encode("Hello"), qwen3.encode("lo")) == ([9707], [385])
    turn = [151644, 872, 198, 13048, 151645, 198]
    assert qwen3.encode("<|im_start|>user\nHi<|im_end|>\n") == turn
    added = [qwen3.convert_tokens_to_ids(text) for text, _ in QWEN3_ADDED]
    assert added == list(range(151643, 151669))
    assert len(qwen3) == 151669
    assert (qwen3.eos_token_id, qwen3.pad_token_id) == (151645, 151643)
    ids = qwen3.encode("<|im_start|><tool_call>a</tool_call><think><|im_end|>")
    assert qwen3.decode(ids, skip_special_tokens=True) == "<tool_call>a</tool_call><think>"


@pytest.mark.parametrize("edge", ["}\n", "\n\n", ">\n", ".\n\n", '":', '",'])
def test_the_few_ranks_merge_as_all_do(qwen3: Any, edge: str) -> None:
    """What meets at the edges of bodies is one token in both."""
    few = tokenizer_for(trl_template("qwen3"))
    assert len(few) == FEW_RANKS + len(QWEN3_ADDED)
    assert few.encode(edge) == qwen3.encode(edge)
    assert len(few.encode(edge)) == 1


def test_the_vocabulary_is_the_reference_one(qwen3: Any) -> None:
    folder = os.environ.get("TOOLROLL_TEST_DATA")
    if not folder:
        pytest.skip("TOOLROLL_TEST_DATA is not set")
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(Path(folder) / "tokenizers" / "qwen3" / "tokenizer.json"))
    for text in [
        *extra_templates().values(),
        (Path(folder) / "tau_bench" / "gpt-4o-airline-40.json").read_text()[:200_000],
    ]:
        assert qwen3.encode(text) == reference.encode(text).ids
