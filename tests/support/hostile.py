"""Answers that an honest engine never returns: each is a function that corrupts an honest answer,
with the expected error message.
"""

import math
from collections.abc import Callable
from typing import Any

from support.client import request
from support.http import completion

Spoil = Callable[[dict[str, Any]], Any]

RID = "0123456789abcdef"
ASKED = request(
    [5, 6, 7], sampling_params={"max_new_tokens": 8, "stop": ["END"], "stop_token_ids": [9]}
)
IDS = [7, 8, 9]
ITEM = [-1.0, 7, None]


def drop_logprob(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove the last logprob from an answer. Use it as `Fault(garble=drop_logprob)`."""
    answer["meta_info"]["output_token_logprobs"] = answer["meta_info"]["output_token_logprobs"][:-1]
    return answer


def honest() -> dict[str, Any]:
    return completion(IDS, id=RID, prompt_tokens=3)


def ids(value: Any) -> Spoil:
    """Other ids, with logprobs and counts that fit them."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        items = value if isinstance(value, list) else []
        own = answer["meta_info"]["id"]
        made = completion(items, id=own, finish_reason={"type": "length", "length": len(items)})
        return {**made, "output_ids": value}

    return spoil


def meta(**fields: Any) -> Spoil:
    return lambda answer: {**answer, "meta_info": {**answer["meta_info"], **fields}}


def without(name: str) -> Spoil:
    return lambda answer: {
        **answer,
        "meta_info": {key: value for key, value in answer["meta_info"].items() if key != name},
    }


def item(value: Any) -> Spoil:
    """Another logprob of the second token."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["output_token_logprobs"][1] = value
        return answer

    return spoil


def versions(*spans: tuple[str, Any, Any]) -> Spoil:
    """Weight versions from `start` to `end`, which is left out if it is None."""
    named = [zip(("version", "start", "end"), span, strict=True) for span in spans]
    made = [{name: value for name, value in span if value is not None} for span in named]
    return meta(weight_versions=made)


top: Callable[..., Spoil] = lambda **fields: lambda answer: {**answer, **fields}
logprob: Callable[[Any], Spoil] = lambda value: item([value, IDS[1], None])
logprobs: Callable[[Any], Spoil] = lambda value: meta(output_token_logprobs=value)
stop: Callable[[Any], Spoil] = lambda matched: meta(
    finish_reason={"type": "stop", "matched": matched}
)
tops: Callable[..., Spoil] = lambda *places: meta(output_top_logprobs=list(places))

REQUEST = ["answer is for another request"]
NO_PARTS = ["no output_ids or no meta_info"]
NO_LIST = ["output_ids is not a list of token ids"]
NO_ID = ["an id from 0 to 9095, the model's vocabulary"]
MOST = "at most max_new_tokens = 8"
COUNTED = ["the engine counts", "sampled tokens and sent 3 output_ids"]
READ = ["the engine read a prompt of", "but 3 were sent"]
FINISH = ["the engine's finish_reason is", "expected one of stop, length, abort"]
STOPPED, LAST = "the engine stopped at token", "output_ids end with 9"
MATCHED = ["the engine stopped at", "requested stop strings ['END']"]
NUMBER = ["is not [logprob, id, text] with a number first"]
POSITIVE = ["a logprob is NaN or above zero"]
LOW = ["a logprob is", "expected a finite number of at least -1e+06"]
SPAN = ["a weight version is not a span with version, start and end"]
TOP = ["a top logprob is", "expected [logprob, id, text] with an id below 9096"]

HOSTILE: dict[str, tuple[Spoil, list[str]]] = {
    # the request of the answer
    "another's id": (meta(id="f" * 16), [*REQUEST, f"'{'f' * 16}'", f"expected '{RID}'"]),
    "an empty id": (meta(id=""), [*REQUEST, "meta_info.id is ''"]),
    "an id that begins with ours": (meta(id=RID + "_0"), [*REQUEST, f"'{RID}_0'"]),
    "an id that is a number": (meta(id=7), [*REQUEST, "meta_info.id is 7"]),
    "an id in a list": (meta(id=[RID]), REQUEST),
    # the answer as a whole
    "null": (lambda answer: None, [*NO_PARTS, "None"]),
    "a list of two": (lambda answer: [answer, answer], NO_PARTS),
    "a string": (lambda answer: "x", [f"{NO_PARTS[0]}: x"]),
    "no ids": (lambda answer: {"text": "", "meta_info": answer["meta_info"]}, NO_PARTS),
    "no meta_info": (lambda answer: {"text": "", "output_ids": IDS}, NO_PARTS),
    "meta_info is a list": (top(meta_info=[]), NO_PARTS),
    "text is a number": (top(text=5), ["the engine's text is '5' (int)", "expected a string"]),
    "text is a list": (top(text=["x"]), ["(list)", "expected a string"]),
    # ids
    "the highest int32": (ids([7, 2**31 - 1]), ["output_ids[1] is 2147483647", *NO_ID]),
    "the first id outside": (ids([9096]), ["output_ids[0] is 9096", *NO_ID]),
    "minus one": (ids([7, -1, 9]), ["output_ids[1] is -1", *NO_ID]),
    "the lowest int32": (ids([-(2**31)]), ["output_ids[0] is -2147483648", *NO_ID]),
    "beyond int32": (ids([2**31]), NO_LIST),
    "beyond int64": (ids([2**63]), NO_LIST),
    "a float": (ids([7, 8.0]), NO_LIST),
    "true": (ids([7, True]), [*NO_LIST, "True", "bool"]),
    "false": (ids([False, 7]), [*NO_LIST, "False", "bool"]),
    "null for an id": (ids([7, None]), NO_LIST),
    "a string for an id": (ids(["7"]), NO_LIST),
    "a list for an id": (ids([[7]]), NO_LIST),
    "ids are a string": (ids("789"), NO_LIST),
    "ids are a number": (ids(3), NO_LIST),
    "ids are an object": (ids({"0": 7}), NO_LIST),
    "nine where eight were asked for": (ids(list(range(10, 19))), ["sent 9 output_ids", MOST]),
    "999 where eight were asked for": (ids([7] * 999), ["sent 999 output_ids", MOST]),
    # counts
    "fewer counted": (meta(completion_tokens=2), [*COUNTED, "counts 2"]),
    "more counted": (meta(completion_tokens=4), [*COUNTED, "counts 4"]),
    "counted in words": (meta(completion_tokens="3"), [*COUNTED, "counts '3'"]),
    "counted in a float": (meta(completion_tokens=3.0), [*COUNTED, "counts 3.0"]),
    "a shorter prompt": (meta(prompt_tokens=2), [*READ, "of 2 tokens"]),
    "a longer prompt": (meta(prompt_tokens=4), [*READ, "of 4 tokens"]),
    "a prompt of none": (meta(prompt_tokens=0), [*READ, "of 0 tokens"]),
    "a prompt in words": (meta(prompt_tokens="3"), [*READ, "of '3' tokens"]),
    # logprobs
    "no logprobs": (without("output_token_logprobs"), ["3 sampled ids came with 0 logprobs"]),
    "logprobs are null": (logprobs(None), ["3 sampled ids came with 0 logprobs"]),
    "a logprob too few": (logprobs([ITEM] * 2), ["3 sampled ids came with 2 logprobs"]),
    "a logprob too many": (logprobs([ITEM] * 4), ["3 sampled ids came with 4 logprobs"]),
    "logprobs are a string": (logprobs("abc"), NUMBER),
    "logprobs are numbers": (logprobs([-1.0, -1.0, -1.0]), NUMBER),
    "another token's": (
        item([-0.5, 9, None]),
        ["logprob 1 belongs to token 9", "output_ids has 8 there"],
    ),
    "of no token": (item([-0.5, None, None]), ["logprob 1 belongs to token None"]),
    "nan": (logprob(math.nan), POSITIVE),
    "infinite": (logprob(math.inf), POSITIVE),
    "minus infinity": (logprob(-math.inf), [*LOW, "-inf"]),
    "-1e300": (logprob(-1e300), [*LOW, "-1e+300"]),
    "-1e38, which float32 holds": (logprob(-1e38), LOW),
    "positive": (logprob(0.5), [*POSITIVE, "0.5"]),
    "one": (logprob(1), POSITIVE),
    "true for a logprob": (logprob(True), POSITIVE),
    "false for a logprob": (logprob(False), ["a logprob is False, expected a number"]),
    "null for a logprob": (logprob(None), NUMBER),
    "a string for a logprob": (logprob("-0.5"), NUMBER),
    # the end
    "no finish_reason": (without("finish_reason"), ["no finish_reason: None"]),
    "finish_reason is null": (meta(finish_reason=None), ["no finish_reason: None"]),
    "finish_reason is a string": (meta(finish_reason="stop"), ["no finish_reason: 'stop'"]),
    "finish_reason without a type": (meta(finish_reason={"matched": 9}), ["no finish_reason"]),
    "an unknown type": (meta(finish_reason={"type": "banana"}), [*FINISH, "'banana'"]),
    "another API's type": (meta(finish_reason={"type": "tool_calls"}), [*FINISH, "'tool_calls'"]),
    "a type that is a list": (meta(finish_reason={"type": ["stop"]}), FINISH),
    "a type that is null": (meta(finish_reason={"type": None}), FINISH),
    "stopped at a token before the last": (stop(8), [f"{STOPPED} 8, but {LAST}"]),
    "stopped at a token that is nowhere": (stop(4), [f"{STOPPED} 4, but {LAST}"]),
    "stopped at a string that nobody asked for": (stop("FIN"), [*MATCHED, "'FIN'"]),
    "an id that SGLang replaced": (stop("NaN happened"), [*MATCHED, "'NaN happened'"]),
    "stopped at true": (stop(True), [*MATCHED, "True"]),
    "stopped at a float": (stop(9.0), [*MATCHED, "9.0"]),
    "stopped at a list": (stop([9]), [*MATCHED, "[9]"]),
    "stopped before anything": (
        lambda answer: completion([], finish_reason={"type": "stop", "matched": 9}),
        ["output_ids is empty: it must contain the stop token"],
    ),
    # the rest
    "a weight version without an end": (versions(("a", 0, None)), SPAN),
    "a weight version from a float": (versions(("a", 0.0, 3)), SPAN),
    "a weight version to a string": (versions(("a", 0, "3")), SPAN),
    "a weight version of too many": (versions(("a", 0, 4)), ["cover 4 of 3 sampled"]),
    "weight versions with a gap": (
        versions(("a", 0, 1), ("b", 2, 3)),
        ["gap or overlap at token 1"],
    ),
    "cached tokens in words": (meta(cached_tokens="many"), ["cached_tokens is 'many'"]),
    "fewer than no cached tokens": (meta(cached_tokens=-1), ["cached_tokens is -1"]),
    "more cached tokens than can be": (meta(cached_tokens=2**31), ["cached_tokens is 2147483648"]),
    "parts of cached tokens": (meta(cached_tokens=1e15), ["cached_tokens is 1000000000000000.0"]),
    "too few top logprobs": (tops([ITEM]), ["3 sampled ids came with 1 lists of top logprobs"]),
    "a top logprob outside": (tops([], [[-0.5, 2**31 - 1, None]], []), TOP),
    "a top logprob below": (tops([], [[-0.5, -1, None]], []), TOP),
    "a top logprob that is nan": (tops([], [[math.nan, 5, None]], []), TOP),
    "a top logprob that is positive": (tops([], [[3.0, 5, None]], []), TOP),
    "a top logprob of no id": (tops([], [[-0.5, "5", None]], []), TOP),
}
