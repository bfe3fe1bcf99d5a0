"""`TemplateCheck` reports no fault in what it cannot compare."""

import asyncio
from typing import Any

import pytest
from support.audited import Played, play
from support.planted import plant, spans
from support.qwen import tokenizer_for, trl_template

from toolroll.evaluation.audit import TemplateCheck, audit
from toolroll.evaluation.audit.faults import NOT_WHOLE
from toolroll.evaluation.audit.report import UNDECIDED
from toolroll.evaluation.audit.template import PROMPT, STOP, TAIL, TURN, UNMATCHED

Row = dict[str, Any]
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAILS = {
    "": False,
    "\n": False,
    "\n<|im_start|>user\nBye.<|im_end|>\n": False,
    "\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n": False,
    "\n<|im_start|>user\nB": False,
    "<|endoftext|>" * 5: False,
    "\n<|endoftext|>": False,
    "Bye.": True,
    "\n<|im_start|>user\nNo.<|im_end|>\n": True,
    "<|im_start|>user\nBye.<|im_end|>\n": True,
}


@pytest.fixture(scope="module")
def played() -> Played:
    return asyncio.run(play("qwen3", 1, history="preserve"))


@pytest.fixture(scope="module")
def check(played: Played) -> TemplateCheck:
    return TemplateCheck(played.tokenizer)


def kinds(rows: list[Row], check: TemplateCheck) -> set[str]:
    return set(audit(rows, template=check).kinds)


@pytest.mark.parametrize(
    "change",
    [
        {"content": [{"type": "image", "url": "x"}]},
        {"tool_calls": [{}]},
        {"tool_calls": 3},
        {"role": "other"},
        {"role": None},
        None,
    ],
)
def test_messages_that_do_not_render(played: Played, check: TemplateCheck, change: Any) -> None:
    """Or are too few."""

    def fault(rows: list[Row]) -> None:
        messages = rows[0]["messages"]
        few = messages[:2] if change is None else [{**each, **change} for each in messages]
        rows[0]["messages"] = few

    assert kinds(plant(fault, played.rows), check) == {UNDECIDED + UNMATCHED}


def test_content_in_parts(played: Played, check: TemplateCheck) -> None:
    def fault(rows: list[Row]) -> None:
        for message in rows[0]["messages"]:
            message["content"] = [{"type": "text", "text": message["content"] or ""}]

    assert TURN not in kinds(plant(fault, played.rows), check)


def trained(tokenizer: Any, prompt: str, reply: str, messages: list[Any]) -> Row:
    """A row of one turn."""
    before, ids = tokenizer.encode(prompt), tokenizer.encode(reply)
    mask = [0] * len(before) + [1] * len(ids)
    return {"input_ids": before + ids, "loss_mask": mask, "messages": messages}


def test_content_in_parts_that_the_template_takes() -> None:
    tokenizer = tokenizer_for(PARTS)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "Hi"), ("assistant", "Hello there"))
    ]
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    row = trained(tokenizer, prompt, "Hello there<|im_end|>", messages)
    assert kinds([row], TemplateCheck(tokenizer)) == set()
    messages[1]["content"] = [{"type": "text", "text": "Goodbye there"}]
    assert kinds([row], TemplateCheck(tokenizer)) == {TURN}


def test_a_prompt_hook_is_undecided(played: Played) -> None:
    hooked = trl_template("qwen3").replace("You may call one or more", "Call one or more")
    check = TemplateCheck(played.tokenizer, chat_template=hooked)
    assert kinds(played.rows, check) == {UNDECIDED + PROMPT}


def test_a_dated_prompt_is_not_compared() -> None:
    """The row was made on another day."""
    dated = "{{ strftime_now('%d %b %Y') }}" + trl_template("qwen2_5")
    tokenizer = tokenizer_for(dated)
    text = "01 Jan 2020<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    row = trained(tokenizer, text, "Hello<|im_end|>", messages)
    assert kinds([row], TemplateCheck(tokenizer)) == set()


@pytest.mark.parametrize("tail", TAILS)
def test_what_follows_the_last_turn(played: Played, check: TemplateCheck, tail: str) -> None:
    ids = played.tokenizer.encode(tail)

    def fault(rows: list[Row]) -> None:
        rows[0]["input_ids"] += ids
        rows[0]["loss_mask"] += [0] * len(ids)
        rows[0]["logprobs"] += [None] * len(ids)

    report = audit(plant(fault, played.rows), template=check)
    assert set(report.kinds) == ({UNDECIDED + TAIL} if TAILS[tail] else set())
    size = len(played.rows[0]["input_ids"])
    if TAILS[tail]:
        assert report.kinds[UNDECIDED + TAIL].fault == (TAIL, size, size + len(ids), False)

    def fault_of_fewer(rows: list[Row]) -> None:
        """The last turn of the row is not that of the messages."""
        fault(rows)
        rows[0]["messages"] = [*rows[0]["messages"], {"role": "assistant", "content": "Bye"}]

    assert kinds(plant(fault_of_fewer, played.rows), check) == set()


def test_rows_without_messages_are_not_compared(played: Played, check: TemplateCheck) -> None:
    row = {name: played.rows[0][name] for name in ("input_ids", "loss_mask")}
    report = audit([row, {**row, "messages": []}], template=check)
    assert (report.rows, report.with_messages, report.kinds) == (2, 0, {})


def test_a_turn_that_is_not_trained_is_not_compared(played: Played, check: TemplateCheck) -> None:
    def untrained(rows: list[Row]) -> None:
        rows[0]["loss_mask"] = [0] * len(rows[0]["input_ids"])

    def other_text(rows: list[Row]) -> None:
        start, stop = spans(rows[0])[1]
        rows[0]["loss_mask"][start:stop] = [0] * (stop - start)
        rows[0]["input_ids"][start + 2] += 1

    for fault in (untrained, other_text):
        assert kinds(plant(fault, played.rows), check) == set()


@pytest.mark.parametrize(
    ("prompt", "reply", "kind"),
    [
        ("assistant\n", "Hello there<|im_end|>", None),
        ("assistant\nHello", " there<|im_end|>", NOT_WHOLE),
        ("assistant", "\nHello there<|im_end|>", PROMPT),
    ],
)
def test_where_the_first_trained_turn_begins(prompt: str, reply: str, kind: str | None) -> None:
    """It is behind an untrained turn. The mask begins with it, within it, or before it."""
    tokenizer = tokenizer_for(PARTS)
    talk = [("user", "Hi"), ("assistant", "Yo"), ("user", "Well"), ("assistant", "Hello there")]
    before = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in talk[:3])
    messages = [{"role": role, "content": text} for role, text in talk]
    row = trained(tokenizer, f"{before}<|im_start|>{prompt}", reply, messages)
    assert kinds([row], TemplateCheck(tokenizer)) - {TURN} == ({kind} if kind else set())


def test_where_a_fault_is(played: Played, check: TemplateCheck) -> None:
    def fault(rows: list[Row]) -> None:
        stop = spans(rows[0])[0][1]
        rows[0]["loss_mask"][stop - 1] = 0
        rows[0]["logprobs"] = None

    [stop, *_] = [stop for _, stop in spans(played.rows[0])]
    found = audit(plant(fault, played.rows), template=check).kinds[UNDECIDED + STOP].fault
    assert found == (STOP, stop - 1, stop, False)
    other = audit([played.rows[0] | {"messages": [{}]}], template=check).kinds
    assert other[UNDECIDED + UNMATCHED].fault[1:3] == (0, len(played.rows[0]["input_ids"]))
