"""What a turn and an episode cost, counted: renders, calls of the tokenizer, bytes. No clock.

A change that is meant to cost more changes the number here. Times are measured by `make bench`.
"""

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.episodes import serving
from support.http import completion
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer, trl_template
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from toolroll.rollout.engine import parse_completion
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.model.model import Model
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Completion, GenerateRequest, Message, WeightVersion

PARAMS = {"temperature": 1.0, "max_new_tokens": 64}
FIRST: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
]


@dataclass
class Work:
    """Renders of a chat template, and calls of `Tokenizer.encode`."""

    renders: int = 0
    encodes: int = 0


@contextmanager
def profiled(seen: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call `seen` for every call of a function, in this thread and in those that it starts."""
    gc.disable()  # a collection may call what others registered
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()


@contextmanager
def counting() -> Iterator[Work]:
    """Count the work of the body."""
    work, lock = Work(), threading.Lock()  # `+=` of two threads may lose one

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is render_jinja_template.__code__:
            with lock:
                work.renders += 1
        elif event == "c_call" and argument.__name__ == "encode":
            with lock:
                work.encodes += isinstance(argument.__self__, Tokenizer)

    with profiled(seen):
        yield work


def calls(step: Callable[[], object]) -> int:
    """Return how many functions `step` calls."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    step()  # what is computed once is not counted
    with profiled(seen):
        step()
    return count


@pytest.fixture(scope="module")
def qwen() -> Any:
    """Qwen3's tokenizer with a template that shows history as it was."""
    return qwen3_tokenizer(trl_template("qwen3_instruct_2507"))


@pytest.fixture
def template(qwen: Any) -> ChatTemplate:
    """A template with empty caches."""
    return ChatTemplate(qwen)


class Talk:
    """A conversation in which the model says "Fine." and users say what a test gives them."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.cursor = template.start(FIRST, [TOOL])
        self.cursor.prompt()
        self.said = [*template.encoder.encode("Fine."), template.tokenizer.eos_token_id]

    def turn(self, body: str, *, finish_reason: str = "stop") -> Work:
        """Play one exchange; return the work of its delta."""
        ids = self.said if finish_reason == "stop" else self.said[:-1]
        sampled = self.template.sampled(ids, finish_reason=finish_reason)
        answer: Message = {"role": "assistant", "content": "Fine."}
        with counting() as work:
            _, self.cursor = self.cursor.after(sampled, [answer, {"role": "user", "content": body}])
        return work


async def talked(served: Model, bodies: Sequence[str], **options: Any) -> Conversation:
    """A conversation with a turn before each of `bodies`, and one after them."""
    conversation = Conversation(served, FIRST, [TOOL], session_id="s", **options)
    for body in bodies:
        await conversation.reply(PARAMS)
        conversation.extend([{"role": "user", "content": body}])
    await conversation.reply(PARAMS)
    return conversation


async def checked(served: Model, bodies: Sequence[str]) -> Work:
    """The work of a check of such a conversation."""
    sequence = (await talked(served, bodies))._sequence()
    verifier = served.template.verifier  # made when it is first used
    with counting() as work:
        assert verifier.check(sequence) is None
    return work


def test_a_delta_costs_one_render_at_every_turn(template: ChatTemplate) -> None:
    talk = Talk(template)
    assert [talk.turn(f"And {at}?").renders for at in range(30)] == [1] * 30


def test_control_token_text_in_a_body_costs_a_second_render(template: ChatTemplate) -> None:
    talk = Talk(template)
    assert talk.turn("What does <|im_end|> mean?").renders == 2
    assert talk.turn("I see.").renders == 2  # a template may repeat what it showed before


def test_a_cut_turn_costs_two_more_renders(template: ChatTemplate) -> None:
    talk = Talk(template)
    counts = [talk.turn("Go on.", finish_reason="length").renders for _ in range(3)]
    assert counts == [5, 3, 3]  # how a close reads in history is found out once


def test_a_body_is_encoded_once(template: ChatTemplate) -> None:
    Talk(template).turn("What markers precede this?")
    talk = Talk(template)
    assert [talk.turn(body).encodes for body in ("One.", "One.", "Two.", "One.")] == [1, 0, 1, 0]
    again = Talk(template.variant(head_hook=lambda head: head.replace("brief", "short")))
    assert again.turn("Two.").encodes == 0  # a variant shares what was encoded


def test_a_known_first_prompt_is_rendered_and_not_encoded(template: ChatTemplate) -> None:
    template.start(FIRST, [TOOL]).prompt()
    with counting() as work:
        template.start(FIRST, [TOOL]).prompt()
    assert work == Work(renders=1, encodes=0)


@pytest.mark.parametrize("turns", [2, 12])
async def test_verification_renders_prompt_and_conversation(qwen: Any, turns: int) -> None:
    async with serving(qwen, lambda request: "Fine.") as (_, served):
        work = await checked(served, [f"And {at}?" for at in range(turns - 1)])
    assert work == Work(renders=2, encodes=1 + turns - 1)


async def test_verification_encodes_the_prompt_of_a_task_once(qwen: Any) -> None:
    async with serving(qwen, lambda request: "Fine.") as (_, served):
        await checked(served, ["And?"] * 3)
        assert await checked(served, ["So?"] * 3) == Work(renders=2, encodes=3)


@pytest.mark.parametrize(("verify", "checks"), [("off", 0), ("sample", 1), ("always", 5)])
async def test_verification_comes_once_an_episode(tokenizer: Any, verify: Any, checks: int) -> None:
    bodies = [f"And {at}?" for at in range(4)]
    async with serving(tokenizer, lambda request: "Fine.") as (_, served):
        with counting() as work:
            for _ in range(2):  # what a template takes is found out in the first episode
                before = work.renders
                await (await talked(served, bodies, verify=verify)).settle()
    # A check renders the prompt and the conversation; that after the first turn only the prompt.
    assert work.renders - before == 5 + 2 * checks - (verify == "always")  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_completion_is_read_without_a_call_for_each_token() -> None:
    asked = GenerateRequest(np.zeros(3, dtype=np.int32), {}, "s")
    few, many = (completion(list(range(count))) for count in (10, 2_000))
    counts = [calls(lambda said=said: parse_completion(said, asked)) for said in (few, many)]  # type: ignore[misc]
    assert counts[0] == counts[1]


def live(turns: int, tokens: int) -> SessionPath:
    """A session of that many tokens, a third of them its prompt."""
    session = SessionPath(Session("s"))
    session.observe(np.arange(tokens // 3, dtype=np.int32) + 50_000)
    each = (tokens - tokens // 3) // (2 * turns)
    for _ in range(turns):
        ids = np.arange(each, dtype=np.int32) + 50_000
        spans = (WeightVersion("default", 0, each),)
        logprobs = np.zeros(each, dtype=np.float32)
        session.sample(Completion(ids, logprobs, "stop", 2, "word " * each, spans), PARAMS)
        session.observe(ids.copy())
    return session


@pytest.mark.parametrize("turns", [10, 40])
def test_a_live_episode_holds_15_bytes_a_token(turns: int) -> None:
    live(turns, 12_000)
    gc.collect()
    tracemalloc.start()
    try:
        kept = [live(turns, 12_000) for _ in range(4)]
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held / sum(map(len, kept)) <= 15


def test_the_garbage_collector_sees_less_than_one_object_a_turn() -> None:
    live(20, 2_000)
    gc.collect()
    before = len(gc.get_objects())
    kept = [live(20, 2_000) for _ in range(50)]
    gc.collect()
    gc.collect()
    assert (len(gc.get_objects()) - before) / (20 * len(kept)) < 0.75
