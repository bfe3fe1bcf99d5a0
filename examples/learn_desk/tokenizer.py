"""The model's tokenizer (a byte-pair encoding with 2,048 tokens), and its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from examples.learn_desk import teacher
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from toolroll import Task
from toolroll.environments.desk import BRIEF_POLICY, TOOLS, words

VOCABULARY = 2048
CONTROL_TOKENS = ("<|im_end|>", "<|im_start|>", "<|pad|>")
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Texts that are one token each. They are not special tokens, so a decoder keeps them, as in Qwen's
tokenizers.
"""


PIECES = (
    r"2031-\d\d-\d\d|20\d\d-|[BHN]\d\d|L-\d\d| ok| [AFHR]\d|\d\d|\d"
    r"| ?[A-Z][a-z]*|[^A-Z\d]+?(?= ok| [A-Z]|[A-Z\d]|$)"
)
"""The pieces into which a text is split before it is encoded. A piece is a full date in 2031, the
year of another date, the id of a book, hold or loan, half of a card's id, a verdict (`ok` or the
code of a rule), two digits, a capitalized word, or the text between these. A number of four digits
has two tokens. Few other numbers contain the same tokens, so the model can find and copy the number
easily.
"""

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files that `save_tokenizer` writes."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer trained on `texts`.

    Merges do not cross the pieces of `PIECES`, so that a title or an id has the same tokens
    at every position. JSON keys, and the fixed text between the pieces, become long tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL_TOKENS) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files and the chat template, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": CONTROL_TOKENS[0],
        "pad_token": CONTROL_TOKENS[2],
        "additional_special_tokens": [CONTROL_TOKENS[1]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def corpus(tasks: Iterable[Task]) -> Iterator[str]:
    """Yield texts to train the tokenizer on: ids, names and dates, repeated, and then the texts of
    the teacher's episodes.
    """
    # Each id, each name and each date of a loan becomes one token, so that one step copies it.
    days = (date(2031, 1, 1) + timedelta(days=day) for day in range(100))
    titles = (*words.ADJECTIVES, *words.NOUNS)
    named = [
        *map(str, days),
        *(f"{kind}{at:02d}" for kind in ("B", "H", "N", "L-", "") for at in range(100)),
        *(f" {word}" for word in (*titles, *words.LAST_NAMES)),
        *words.FIRST_NAMES,
        *words.LAST_NAMES,
    ]
    yield from named * 500
    tools = [tool["function"] for _, tool in TOOLS.values()]
    shown = [f"{tool['name']}({', '.join(tool['parameters']['properties'])})" for tool in tools]
    for task in tasks:
        data = task.data
        yield f"system\n{BRIEF_POLICY} Tools: {' '.join(shown)}"
        yield from ("user\n", data["opening"], "user\n", *data["more"])
        yield f"user\nMy card is {data['card']}, the postcode {data['postcode']}."
        yield f"tool\n{json.dumps(teacher.account(data))}"
        for request in data["requests"]:
            if request["kind"] in ("renew", "hold"):
                yield f"tool\n{json.dumps([teacher.found_book(data, request['title'])])}"
        for reply in teacher.replies(task):
            yield "assistant\n"
            yield from re.split("|".join(MARKS), reply)
