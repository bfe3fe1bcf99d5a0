"""Check that an engine serves the model that a tokenizer belongs to: the engine and the tokenizer
must encode a probe text to the same ids.

The engine gets the probe as text, because ids outside its model's vocabulary would crash it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from toolroll.rollout.engine import EngineClient
from toolroll.rollout.engine.response import check_ids
from toolroll.rollout.errors import EngineError, UsageError
from toolroll.rollout.model.tokenizers import DESK_MODEL, desk_model_path
from toolroll.rollout.runtime.jsonable import common_prefix
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import GenerateRequest

_PROBE = (
    "The quick brown fox can't jump over 13 lazy dogs, 3.14159 or 1,234,567 times; naïve façade "
    "Straße.\n"
    "Unfortunately the assistant's international information could not be retrieved successfully. "
    '{"name": "get_current_weather", "arguments": {"location": "San Francisco", "unit": '
    '"celsius"}}\n'
    "def f(x):\n\treturn {'a': [x ** 2,  0x7F]}  # 100%\n\n\n"
    "Съешь же ещё этих булок. 我能吞下玻璃而不伤身体。 いろはにほへと 다람쥐 헌 쳇바퀴 "
    "नमस्ते दुनिया السلام عليكم שלום ไทย Ελληνικά 👩‍🚀🙂 ½ ∑ → €"
)
_CONTROLS = 16
_SECONDS = 60.0
_GENERATED = {
    "max_new_tokens": 8,
    "temperature": 0.0,
    "skip_special_tokens": False,
    "no_stop_trim": True,
}


@dataclass(frozen=True, slots=True)
class _Answered:
    """What the server at `url` reported: the names of its model, and the ids of the probe text. The
    ids are None if the server does not report them.
    """

    url: str
    names: tuple[str, ...]
    ids: Sequence[int] | None


def probe_text(tokenizer: Any, chat_template: str) -> str:
    """Return a text that different tokenizers encode differently. It contains several scripts,
    digits, spaces, and control tokens of `tokenizer`.
    """
    added = sorted(
        tokenizer.get_added_vocab(), key=lambda token: (token != tokenizer.eos_token, token)
    )
    controls = [token for token in added if token == tokenizer.eos_token or token in chat_template]
    return f"{_PROBE} {' x '.join(controls[:_CONTROLS])}\n"


async def check_identity(
    engine: EngineClient, template: ChatTemplate, *, name: str, allow_mismatch: bool = False
) -> list[str]:
    """Check that `engine` serves a model that uses the tokenizer of `template`. Return warnings,
    each of one line.

    Every worker is asked for the ids of a probe text (`/tokenize`). If no worker returns ids, the
    engine generates a few tokens after this text, and the ids or text in its answer are compared.
    Raise `UsageError` if the tokenizers differ, and `EngineError` if the engine does not answer.

    Args:
        engine: The engine to check.
        template: The chat template with the tokenizer.
        name: The name or folder that the tokenizer was loaded from.
        allow_mismatch: If the tokenizers differ, return a warning instead of raising an error.
    """
    tokenizer = template.tokenizer
    name = name or tokenizer.name_or_path  # the caller may have loaded it
    text = probe_text(tokenizer, template.renderer.source)
    ours = list(tokenizer.encode(text, add_special_tokens=False))
    answers = await asyncio.gather(
        *(_ask(engine, worker, text) for worker in await engine.workers())
    )
    names = tuple(model_name for answer in answers for model_name in answer.names)
    wrong = [
        difference
        for answer in answers
        if (difference := _difference(ours, answer, name)) is not None
    ]
    if all(answer.ids is None for answer in answers):
        generated = await _generate(engine, text) if answers else None
        answered = _Answered(engine.url, names, None)
        compared = _compare_generated(tokenizer, text, generated or {}, answered, name)
        if compared is None:
            health = await engine.health()
            if health.down:
                raise EngineError(f"{engine.url}: {health.why}")
            return [
                f"{engine.url} does not report how it encodes text, so it was not checked that it "
                f"serves {name!r}"
            ]
        wrong = compared
    if wrong:
        if not allow_mismatch:
            raise UsageError(
                f"{wrong[0]}: name the engine's model (--model). To run anyway, set "
                "allow_model_mismatch (--allow-model-mismatch)"
            )
        return wrong[:1]
    served = sorted(
        {
            model_name
            for answer in answers
            for model_name in answer.names[:1]
            if not any(map(_same(name), answer.names))
        }
    )
    if served and name:
        return [
            f"the engine serves {', '.join(map(repr, served))}, the tokenizer is from {name!r}: "
            f"both encode text in the same way"
        ]
    return []


async def _ask(engine: EngineClient, worker: str, text: str) -> _Answered:
    """Ask one worker for the names of its model and for the ids of `text`."""
    info = await engine.get(f"{worker}/model_info")
    info = info if isinstance(info, Mapping) else {}
    values = [info.get(key) for key in ("model_path", "served_model_name", "tokenizer_path")]
    names = tuple(value for value in values if isinstance(value, str) and value)
    if worker not in await engine.workers():  # it did not answer
        return _Answered(worker, names, None)
    answer = await _posted(
        engine, f"{worker}/tokenize", {"prompt": text, "add_special_tokens": False}
    )
    tokens = None if answer is None else answer.get("tokens")
    return _Answered(worker, names, tokens if _are_ids(tokens) else None)


async def _generate(engine: EngineClient, text: str) -> Mapping[str, Any] | None:
    """Return the answer to a short generation after `text`. Its logprobs contain the ids of the
    prompt.
    """
    payload = {
        "text": text,
        "sampling_params": _GENERATED,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await _posted(engine, f"{engine.url}/generate", payload)


async def _posted(
    engine: EngineClient, url: str, payload: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    try:
        async with asyncio.timeout(_SECONDS):
            return await engine.post(url, payload)
    except (EngineError, TimeoutError):
        # The path does not exist, or the engine does not answer. The caller reports it.
        return None


def _compare_generated(
    tokenizer: Any, text: str, answer: Mapping[str, Any], engine: _Answered, name: str
) -> list[str] | None:
    """Return a list with a message about the first difference, an empty list if there is none, or
    None if the answer contains no ids that can be compared.

    The ids of the prompt are compared. If the answer does not have them, the engine's text of the
    sampled ids is compared with the tokenizer's.
    """
    meta = answer.get("meta_info")
    items = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    prompt = items if isinstance(items, list) else []
    theirs = [item[1] for item in prompt if isinstance(item, list) and len(item) > 1]
    if _are_ids(theirs):
        plain = list(tokenizer.encode(text, add_special_tokens=False))
        if theirs == list(tokenizer.encode(text)):
            return []
        problem = _difference(plain, _Answered(engine.url, engine.names, theirs), name)
        return [] if problem is None else [problem]
    if not (answer.get("output_ids") and answer.get("text")):
        return None
    request = GenerateRequest(np.zeros(1, dtype=np.int32), _GENERATED, "probe")
    ids = check_ids(answer["output_ids"], request, vocab_size=None).tolist()
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    engine_text = str(answer["text"])
    if _settled(decoded) == _settled(engine_text):
        return []
    return [
        f"{_served(engine, name)}: it decodes the sampled ids {ids} as {engine_text!r}, the "
        f"tokenizer as {decoded!r}"
    ]


def _settled(text: str) -> str:
    """Return `text` without incomplete characters and without spaces at its ends, because these
    depend on the decoder.
    """
    return text.replace("\ufffd", "").strip()


def _difference(ours: Sequence[int], answer: _Answered, name: str) -> str | None:
    """Return a message about the first id that differs, or None if all ids are the same or if
    `answer` has no ids.
    """
    theirs = answer.ids
    if theirs is None or list(theirs) == list(ours):
        return None
    pos = common_prefix(ours, theirs)
    there, here = (str(ids[pos]) if pos < len(ids) else "the end" for ids in (theirs, ours))
    return (
        f"{_served(answer, name)}: token {pos} of a probe text is {there} in the engine and {here} "
        f"in the tokenizer ({len(theirs)} and {len(ours)} tokens)"
    )


def _served(answer: _Answered, name: str) -> str:
    model = repr(answer.names[0]) if answer.names else "an unnamed model"
    return f"{answer.url} serves {model}, whose tokenizer is not that of {name!r} (--model)"


def _same(name: str) -> Any:
    """Return a function that compares a model's folder or name on a hub with `name`, and returns
    True if the two may mean the same model.
    """
    last = desk_model_path().name if name == DESK_MODEL else PurePosixPath(name).name.lower()
    return lambda other: other == name or PurePosixPath(other).name.lower() == last


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
