"""No change of a single token, mask, logprob or edge of a turn passes the verification.

Verified episodes of several template families (calls, truncated, resumed and excluded turns, forks)
are changed in one place at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.adversarial.dialogues import Message, tool
from support.episodes import serving
from support.oracle_scenarios import call, calls, result, said, user
from support.qwen import tokenizer_for, trl_template
from support.tiers import by_tier

from toolroll.parsers.openai import from_openai
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.engine.resume import join
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.types import Completion, GenerateRequest, Trajectory
from toolroll.testing import PolicyRequest, Reply

pytestmark = pytest.mark.tokens

MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}{% else %} {{ m.content }}{% endif %}</s>{% endif %}"
    "{% endfor %}"
)
FAMILIES = ("qwen2_5", "qwen3", "llama3_1", "gptoss", "glm4moe", "deepseekv3", "gemma4", "mistral")
TOOLS = (tool("now", "Prints <|im_end|> and </s> at times."),)
NOTHING = np.float32(np.nan)


def calling(number: int) -> Message:
    return calls(call(number, {"city": f"Rome {number}"}, "now"), content="I look.")


STEPS: Sequence[tuple[Message, Sequence[Message], str]] = (
    (calling(1), [result(1, "Noon.<|im_end|>\n<|im_start|>assistant\n</s>", "now")], "whole"),
    (said("It is noon in the city of Rome now"), [user("Where?")], "cut"),
    (calling(2), [result(2, "Late", "now")], "whole"),
    (said("It is late.", reasoning_content="Let me think."), [user("And <|eot_id|>?")], "whole"),
    (said("It is still the same."), [user("Bye.")], "odd"),
    (said("Bye."), [user("Bye.")], "whole"),
)


class Model:
    """Says each planned turn as the template shows it, and reads it back as that turn."""

    def __init__(self, name: str) -> None:
        source = MISTRAL if name == "mistral" else trl_template(name)
        self.template = ChatTemplate(tokenizer_for(source))
        self.text, self.turn, self.how = "", said(""), "whole"

    def plan(self, before: Any, turn: Message, new: Any, how: str) -> None:
        """Prepare the reply to `before`. `how`: whole, cut before its end, or in odd tokens."""
        text = self._shown([*before, turn, *new], len(before))
        self.how = how
        if how == "cut":
            text = turn["content"][:-6]
            turn = {**turn, "content": text}
        self.text, self.turn = text, turn

    def _shown(self, messages: list[Message], at: int) -> str:
        render, stops = self.template.renderer.render, self.template.stop_texts
        prompt = render(messages[:at], TOOLS, generate=True)
        text = render(messages, TOOLS, generate=True)[len(prompt) :]
        # With its thoughts, which history may drop; gpt-oss closes a turn otherwise in history.
        if "reasoning_content" in messages[at] or not any(stop in text for stop in stops):
            text = render(messages[: at + 1], TOOLS, generate=False)[len(prompt) :]
        if not text.strip():  # history is rewritten before the turn too
            text = messages[at]["content"] + stops[-1]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        return text[: min(ends, default=len(text))]

    def __call__(self, request: PolicyRequest) -> Reply:
        encode, half = self.template.encoder.encode, len(self.text) // 2
        parts = [self.text[:half], self.text[half:]] if self.how == "odd" else [self.text]
        ids = [int(request.input_ids[-1])]
        for part in parts:
            ids += encode(part, previous=ids[-1])
        return Reply(output_ids=ids[1:], stop=self.how != "cut")

    def parse(self, *_: object) -> ParsedReply:
        return from_openai(self.turn)


async def played(name: str) -> Conversation:
    """A verified episode: turns are resumed halfway, and the third one is excluded."""
    model = Model(name)
    async with serving(model.template.tokenizer, model) as (_, served):

        async def generate(request: GenerateRequest) -> Completion:
            return resumed(await served.generate(request))

        options = {"session_id": name, "parse": model.parse, "generate": generate}
        dialogue = Conversation(served, [user("What time?")], TOOLS, **options)  # type: ignore[arg-type]
        for number, (planned, new, how) in enumerate(STEPS):
            model.plan(dialogue.messages, planned, new, how)
            turn = await dialogue.reply({"max_new_tokens": 512})
            if number == 2:
                dialogue.exclude(turn, "invalid call")
            ids = [call["id"] for call in turn.message.get("tool_calls") or ()]
            dialogue.extend([{**m, "tool_call_id": ids[0]} if ids else m for m in new])
        await dialogue.settle()
    assert not dialogue.mismatches
    return dialogue


def resumed(whole: Any) -> Completion:
    """`whole` as two attempts give it: the engine aborted the first one halfway."""
    at = len(whole.output_ids) // 2
    first = replace(whole, output_ids=whole.output_ids[:at], logprobs=whole.logprobs[:at],
                    finish_reason="abort", matched=None, weight_versions=())  # fmt: skip
    rest = replace(whole, output_ids=whole.output_ids[at:], logprobs=whole.logprobs[at:],
                   weight_versions=())  # fmt: skip
    return join(first, rest)


def shifted(values: Any, filler: Any) -> Iterator[tuple[str, Any]]:
    """`values` with two neighbors swapped, with one value dropped, doubled or replaced."""
    for at in range(len(values)):
        swapped, other = values.copy(), values.copy()
        swapped[at : at + 2] = values[at : at + 2][::-1]
        if values.dtype == np.float32:
            other[at] = -1.5 if np.isnan(other[at]) else NOTHING
        else:
            other[at] ^= 1
        dropped = np.append(np.delete(values, at), values.dtype.type(filler))
        doubled = np.insert(values, at, values[at])[:-1]
        changes = {"swapped": swapped, "dropped": dropped, "doubled": doubled, "replaced": other}
        for what, changed in changes.items():
            if not np.array_equal(changed, values, equal_nan=True):
                yield what, changed


def moved(span: Any, length: int) -> Iterator[tuple[str, Any]]:
    """A turn whose start or stop, or both, are moved by one."""
    for start, stop in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1)):
        changed = replace(span, start=span.start + start, stop=span.stop + stop)
        what = "start" if not stop else "stop" if not start else "both"
        if 0 <= changed.start <= changed.stop <= length:
            yield f"{what} moved", changed


def with_mask(trajectory: Trajectory) -> Trajectory:
    """The trajectory with the loss mask that its turns would have."""
    mask = np.zeros_like(trajectory.loss_mask)
    for turn in trajectory.turns:
        if turn.excluded is None:
            mask[turn.start : turn.stop] = 1
    return replace(trajectory, loss_mask=mask)


def changed_trajectories(trajectory: Trajectory) -> Iterator[tuple[str, Trajectory]]:
    for column, filler in (("input_ids", 0), ("loss_mask", 0), ("logprobs", NOTHING)):
        for what, values in shifted(getattr(trajectory, column), filler):
            yield f"{column} {what}", replace(trajectory, **{column: values})
    turns = trajectory.turns
    with_turns = lambda *changed: replace(trajectory, turns=changed)
    for at, turn in enumerate(turns):
        before, after = turns[:at], turns[at + 1 :]
        for what, other in moved(turn, len(trajectory)):
            yield f"turn {what}", with_turns(*before, other, *after)
            yield f"turn {what} with its mask", with_mask(with_turns(*before, other, *after))
        yield "turn removed", with_mask(with_turns(*before, *after))
        yield "turn doubled", with_turns(*before, turn, turn, *after)
        context = None if turn.excluded == "context" else "context"
        as_context = with_turns(*before, replace(turn, excluded=context), *after)
        yield "turn as context", with_mask(as_context)
        if after:
            yield "turns swapped", with_turns(*before, after[0], turn, *after[1:])


def spliced(served: ServedSequence, start: int, stop: int, ids: Sequence[int]) -> ServedSequence:
    """Replace the tokens [start, stop), which no turn holds, by `ids`."""
    shift, before = len(ids) - (stop - start), served.input_ids
    moves = [shift if span.start >= stop else 0 for span in served.turns]
    turns = [
        replace(span, start=span.start + move, stop=span.stop + move)
        for span, move in zip(served.turns, moves, strict=True)
    ]
    whole = np.concatenate([before[:start], np.array(ids, np.int32), before[stop:]])
    return replace(served, input_ids=whole, turns=tuple(turns))


def changed_deltas(served: ServedSequence) -> Iterator[tuple[str, ServedSequence]]:
    """The prompt and each delta without some tokens, and with one doubled."""
    begin = 0
    for span in served.turns:
        stop = span.start
        places = range(begin, stop, max(1, (stop - begin) // 12))
        cuts = [(place, place + 1) for place in places]
        cuts += [(begin, stop), (max(begin, stop - 3), stop)]
        cuts += [((begin + stop) // 2, stop), (begin, min(begin + 2, stop))]
        for first, last in cuts:
            yield f"{first} to {last} removed", spliced(served, first, last, [])
        doubled = served.input_ids[begin : begin + 1].tolist() * 2
        yield f"{begin} doubled", spliced(served, begin, begin + 1, doubled)
        begin = span.stop


def changed_sequences(served: ServedSequence) -> Iterator[tuple[str, ServedSequence]]:
    yield from changed_deltas(served)
    end = served.turns[-1].stop
    for what, values in shifted(served.input_ids[:end], 0):
        yield f"ids {what}", replace(served, input_ids=values)
    for at, span in enumerate(served.turns):
        stopped = ("stop token", replace(span, stopped=not span.stopped))
        message = ("other message", replace(span, message=span.message - 1))
        for what, other in (*moved(span, end), stopped, message):
            turns = (*served.turns[:at], other, *served.turns[at + 1 :])
            yield f"turn {what}", replace(served, turns=turns)


def missed_by(template: ChatTemplate, served: Any, change: Any = changed_sequences) -> list[str]:
    """The changes of `served` that the verifier does not find."""
    check = template.verifier.check
    assert check(served) is None
    return [kind for kind, other in change(served) if check(other) is None]


@pytest.mark.parametrize("name", by_tier(FAMILIES))
async def test_every_change_of_an_episode_is_found(name: str) -> None:
    dialogue = await played(name)
    trajectories, record = dialogue.session.trajectories(), dialogue._record
    missed: list[str] = []
    for number, trajectory in enumerate(trajectories):
        for kind, changed in changed_trajectories(trajectory):
            parts = [*trajectories[:number], changed, *trajectories[number + 1 :]]
            missed += [kind] if record.check(parts) is None else []
    for served in [*dialogue._finished, dialogue._sequence()]:
        missed += missed_by(dialogue.template, served)
    assert missed == []
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert "stop" in {turn.finish_reason for turn in turns}
    assert "invalid call" in {turn.excluded for turn in turns}
