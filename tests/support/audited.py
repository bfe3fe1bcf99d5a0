"""Clean training rows, with the engine's record of them: scripted episodes over templates."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.episodes import serving
from support.oracle_scenarios import result, said, user
from unit.template.test_verify_mutations import TOOLS, Model, calling

from toolroll.evaluation.audit import EngineRecord
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.rollout.types import Message

Row = dict[str, Any]
REAL_LOG = Path(__file__).with_name("sglang_requests.log")
"""Lines that SGLang 0.5.23 wrote."""


@dataclass
class Played:
    """The rows of some episodes, what the engine was sent and sampled, and the tokenizer."""

    tokenizer: Any
    rows: list[Row] = field(default_factory=list)
    answers: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)

    def record(self) -> EngineRecord:
        record = EngineRecord()
        for prompt, ids, logprobs in self.answers:
            record.add(np.array(prompt), np.array(ids), np.array(logprobs, np.float32))
        return record

    def write_log(self, folder: Path) -> None:
        """Write the answers as SGLang does."""
        folder.mkdir()
        lines = [request_line(*answer) for answer in self.answers]
        (folder / "host_0.log").write_text("".join(lines), encoding="utf-8")


def request_line(
    prompt: Sequence[int], ids: Sequence[int], logprobs: Any = None, *, text: str | None = None
) -> str:
    """A line of SGLang's log: a recorded one, with other ids. `text`: the prompt was sent as it."""
    lines = REAL_LOG.read_text(encoding="utf-8").splitlines()
    finished = next(line for line in lines if '"request.finished", "rid": "one"' in line)
    head, brace, data = finished.partition("{")
    line = json.loads(brace + data)
    line["obj"] |= {"input_ids": list(prompt) if text is None else None, "text": text}
    meta, line["out"]["output_ids"] = line["out"]["meta_info"], list(ids)
    meta |= {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    del meta["output_token_logprobs"]
    if logprobs is not None:
        meta["output_token_logprobs"] = [
            [float(value), index, None] for value, index in zip(logprobs, ids, strict=True)
        ]
    return f"{head}{json.dumps(line, ensure_ascii=False)}\n"


def steps(rng: random.Random, turns: int) -> Iterator[tuple[Message, list[Message]]]:
    """Turns with calls, texts and thoughts, and what follows them."""
    words = "noon late rain Zürich 東京 sunny \n\n 3.14 it's <|im_end|> ok".split(" ")
    for number in range(1, turns):
        text = " ".join(rng.choices(words[:8], k=rng.randint(2, 12)))
        if rng.random() < 0.6:
            turn = calling(number) | {"content": f"I look at {text}."}
            new = [result(number, " ".join(rng.choices(words, k=rng.randint(1, 9))))]
        else:
            turn, new = said(f"It is {text} now."), [user(f"And {text}?")]
        if rng.random() < 0.4:
            turn = turn | {"reasoning_content": f"Let me think about {text}."}
        yield turn, new
    yield said("That is all for now."), [user("Bye.")]


async def play(
    name: str, episodes: int = 2, *, history: str = "fork", seed: int = 0, turns: int = 5
) -> Played:
    """Play `episodes` with TRL's template `name`. An episode ends where the template refuses it."""
    model = Model(name)
    played = Played(model.template.tokenizer)
    async with serving(model.template.tokenizer, model, history=history) as (engine, served):
        for number in range(episodes):
            rng = random.Random(f"{name}/{seed}/{number}")
            opening = [user(f"What time is it in city {rng.random():.4f}?")]
            dialogue = Conversation(
                served, opening, TOOLS, session_id=f"{name}/{number}", parse=model.parse
            )
            try:
                for turn, new in steps(rng, turns):
                    plan(model, dialogue.messages, turn, new, "odd" if number % 3 else "whole")
                    reply = await dialogue.reply({"max_new_tokens": 512})
                    ids = [call["id"] for call in reply.message.get("tool_calls") or ()]
                    dialogue.extend([{**m, "tool_call_id": ids[0]} if ids else m for m in new])
            except TemplateError:
                pass
            await dialogue.settle()
            played.rows += rows_of(dialogue)
        for entry in engine.log:
            played.answers.append(
                (entry.input_ids.tolist(), list(entry.output_ids), list(entry.logprobs))
            )
    return played


def plan(
    model: Model, before: Sequence[Message], turn: Message, new: Sequence[Message], how: str
) -> None:
    """Plan `turn` without what the template does not show: the model would not have said it."""
    for left_out in ("", "reasoning_content", "content"):
        if left_out in turn:
            turn = {**turn, left_out: ""}
        model.plan(before, turn, new, how)
        texts = (turn.get(name) or "" for name in ("reasoning_content", "content"))
        if all(text.strip() in model.text for text in texts):
            return


def rows_of(dialogue: Conversation) -> list[Row]:
    """The rows of an episode, as `toolroll export` writes them."""
    return [
        {
            **{name: data[name] for name in ("input_ids", "loss_mask", "logprobs", "fork_reason")},
            "sequence": number,
            "messages": dialogue.messages,
            "tools": list(TOOLS),
        }
        for number, part in enumerate(dialogue.session.trajectories())
        for data in [to_json(part)]
        if part.trained_tokens
    ]
