"""Make the embedded tokenizer: `python scripts/make_tokenizer.py OUT.json`. The package has the
result in `src/toolroll/rollout/model/tokenizer/tokenizer.json`.

The corpus is generated from the words below, so the script writes the same bytes each time (tested
with tokenizers 0.22). The chat template and `tokenizer_config.json` in the same folder are written
by hand.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
CONTROL_TOKENS = (
    "<|pad|>",
    "<|turn|>",
    "<|end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""The added tokens of the embedded tokenizer. `<|end|>` ends a turn. The first three are special
tokens, which decoding can skip. The others always appear in decoded text, as in Qwen's tokenizer.
"""
_SPECIAL = 3

_WORDS = (
    "the a an and or not is are was be been have has had do does did can could may might must will "
    "would should to "
    "of in on at by for with from into about after before between under over again then once here "
    "there when where "
    "why how all any both each few more most other some such only own same so than too very user "
    "assistant system "
    "tool call name arguments function parameters type object string number integer boolean array "
    "required "
    "properties description result error value list true false null file directory path content "
    "message ticket "
    "order item product price amount date time day week month year account balance payment card "
    "flight airport city "
    "book library loan member return fee reserve cancel update create delete read write find "
    "search open close move "
    "copy sort get set add remove show display status state start stop engine brake fuel door lock "
    "climate "
    "temperature speed distance tweet post comment follow mention stock symbol watchlist sector "
    "trading market "
    "travel budget currency exchange insurance invoice contact support please thanks sorry help "
    "need want know "
    "think say tell ask answer question problem detail information number code id key note report "
    "summary total "
    "mean average root power log round maximum minimum token turn reward sample model policy task "
    "step episode "
    "environment "
).split()

_JSON_KEYS = (
    "id name type status value items user_id order_id file_name dir_name source destination amount "
    "content message "
).split()


def corpus(seed: int = 7, lines: int = 20000) -> Iterator[str]:
    """Yield `lines` sentences, JSON objects and tool calls. They depend only on `seed`."""
    rng = random.Random(seed)
    for _ in range(lines):
        kind = rng.random()
        words = rng.choices(_WORDS, k=rng.randint(4, 14))
        if kind < 0.5:
            yield (" ".join(words).capitalize() + rng.choice(".?!") + rng.choice(["", "\n", " "]))
        elif kind < 0.8:
            keys = rng.sample(_JSON_KEYS, 3)
            yield json.dumps(
                {
                    key: rng.choice([rng.choice(_WORDS), rng.randint(0, 9999), True, None, 0.5])
                    for key in keys
                }
            )
        else:
            name = "_".join(rng.sample(_WORDS, 2))
            yield json.dumps(
                {"name": name, "arguments": {rng.choice(_JSON_KEYS): " ".join(words[:3])}}
            )


def build() -> Tokenizer:
    """Return the trained tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    added = [
        AddedToken(text, special=at < _SPECIAL, normalized=False)
        for at, text in enumerate(CONTROL_TOKENS)
    ]
    tokenizer.add_special_tokens(added[:_SPECIAL])
    tokenizer.add_tokens(added[_SPECIAL:])
    return tokenizer


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(build().to_str(pretty=False) + "\n", encoding="utf-8")
