"""`Renderer`: the text that `tokenizer.apply_chat_template` gives, on every supported version."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.oracle_scenarios import part, scenarios
from support.qwen import all_templates, markers, trl_template
from support.tiers import by_tier
from tokenizers import AddedToken
from transformers.utils import chat_template_utils

from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.evaluation.certify import certify
from toolroll.parsers.infer import infer_parser
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import ChatTemplate, applier
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import Message
from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

NOW = datetime(2026, 3, 4, 5, 6, 7)
MISSING = object()
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look – 見る.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "Look."}
TALK = [
    {"role": "system", "content": "Be brief."},
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "look", "arguments": {"at": "é"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "a frog"},
    {"role": "assistant", "content": "A frog."},
    {"role": "user", "content": "Thanks."},
]


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own render reads the time that ours was given."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": content}


class Both:
    """One template, rendered by `transformers` and by the renderer."""

    def __init__(self, tokenizer: Any, source: str, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.kwargs = kwargs
        self.renderer = Renderer(tokenizer, chat_template=source, kwargs=kwargs, now=NOW)

    def native(self, talk: Sequence[Any], tools: Any = None, *, generate: bool = True) -> str:
        """The text that `apply_chat_template` gives for exactly these messages."""
        return str(
            self.tokenizer.apply_chat_template(
                list(talk),
                tools=list(tools) if tools else None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generate,
                **self.kwargs,
            )
        )

    def ours(self, talk: Sequence[Any], tools: Any = None, *, generate: bool = True) -> str:
        return self.renderer.render(talk, tools, generate=generate)

    def agree(self, talk: Sequence[Any], tools: Any = None, *, generate: bool = True) -> bool:
        """Compare the texts, or the refusals; return whether there was a text."""
        form = as_text if self.renderer.argument_form == "text" else as_dict
        given = [self.fields(form(message)) for message in talk]
        try:
            expected = self.native_parts(given, tools, generate=generate)
        except Exception as error:
            with pytest.raises(TemplateError) as refused:
                self.ours(talk, tools, generate=generate)
            assert str(error) in str(refused.value)
            return False
        assert self.ours(talk, tools, generate=generate) == expected
        return True

    def fields(self, message: Any) -> Any:
        """`message` with its reasoning also as `thinking` if the template reads only this field,
        and with an empty content instead of null beside calls if the template does not take null.
        """
        only_thinking = "thinking" in self.source and "reasoning_content" not in self.source
        if message.get("reasoning_content") and only_thinking:
            message = {**message, "thinking": message["reasoning_content"]}
        if message["content"] is None and message.get("tool_calls") and not self.takes_null:
            message = {**message, "content": ""}
        return message

    @cached_property
    def takes_null(self) -> bool:
        """Whether a call beside null is neither refused nor rendered with the word for null."""
        form = as_text if self.renderer.argument_form == "text" else as_dict
        for end in ([result("ok")], []):
            texts = []
            for content in ("", None):
                try:
                    call = form({**calling({"at": "x"}), "content": content})
                    texts.append(self.native([USER, call, *end], [TOOL]))
                except Exception:
                    texts.append("")
            empty, null = texts
            if empty:
                words = ("None", "null")
                return bool(null) and all(null.count(it) == empty.count(it) for it in words)
        return True

    def native_parts(self, talk: list[Any], tools: Any, *, generate: bool) -> str:
        """The native text; if the template cannot take lists of parts, with the parts joined."""
        texts = [it["text"] for m in talk if isinstance(m["content"], list) for it in m["content"]]
        if texts:
            try:
                text = self.native(talk, tools, generate=generate)
            except Exception:
                text = ""
            if "{'type'" not in text and all(it.strip() in text for it in texts):
                return text
        return self.native([joined(message) for message in talk], tools, generate=generate)


def as_dict(message: Any) -> Any:
    return with_arguments(message, lambda it: json.loads(it) if isinstance(it, str) else it)


def as_text(message: Any) -> Any:
    write = lambda it: json.dumps(it, ensure_ascii=False, separators=(",", ":"))
    return with_arguments(message, lambda it: it if isinstance(it, str) else write(it))


def with_arguments(message: Any, change: Any) -> Any:
    if not message.get("tool_calls"):
        return message
    made = [
        {**it, "function": {**it["function"], "arguments": change(it["function"]["arguments"])}}
        for it in message["tool_calls"]
    ]
    return {**message, "tool_calls": made}


def joined(message: Any) -> Any:
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "".join(it["text"] for it in message["content"])}


# --- every template -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_tier(all_templates()))
def test_every_scenario_renders_as_transformers_renders_it(tokenizer: Any, name: str) -> None:
    source = all_templates()[name]
    both = Both(tokenizer, source, bos_token="<b>")  # Llama 3's template asks for one
    shown = 0
    for it in scenarios([*markers(source), "<|im_end|>"]):
        shown += both.agree(it.history, it.tools)
        shown += both.agree([*it.history, it.turn], it.tools, generate=False)
        shown += both.agree([*it.history, it.turn, *it.new], it.tools)
    few = {"gemma": 8, "llava": 3}  # no system message; only contents with parts
    assert shown >= few.get(name.split("_")[0], 60)


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "muse_glimmer"])
def test_a_hundred_prompts_with_calls_in_their_history(tokenizer: Any, name: str) -> None:
    """Refused by our render, or rendered with arguments as text, with transformers 5.23."""
    both = Both(tokenizer, trl_template(name), bos_token="<b>")
    dice = random.Random(16)
    for _ in range(100):
        talk = [{"role": "system", "content": "Be brief."}] if dice.random() < 0.7 else []
        talk.append(USER)
        for turn in range(dice.randint(1, 4)):
            arguments = dice.choice([{"at": "é"}, {"at": None}, {"at": [1, 2.5]}, {}])
            more = {"reasoning_content": f"I look {turn}."} if dice.random() < 0.5 else {}
            talk.append(calling(arguments, **more))
            talk.append(result(dice.choice(["ok", '{"a": 1}', ""])))
            if dice.random() < 0.3:
                talk += [{"role": "assistant", "content": "Done."}, USER]
        assert both.agree(talk, [TOOL])


# --- what transformers does before it renders -----------------------------------------------------


def test_the_clock_is_the_renderers(tokenizer: Any) -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    for year in (1999, 2031):
        renderer = Renderer(tokenizer, chat_template=source, now=datetime(year, 7, 26))
        assert renderer.render([USER], None, generate=False) == f"26 Jul {year}"
    both = Both(tokenizer, source)
    assert both.ours([USER]) == both.native([USER]) == "04 Mar 2026"


def test_the_clock_is_no_variable_of_the_template(tokenizer: Any) -> None:
    """Transformers 5.23 replaces a variable that is not JSON with the text of its type."""
    both = Both(tokenizer, "{{ strftime_now is string }}{{ day is string }}", day=NOW.date())
    assert both.ours([USER]) == both.native([USER])
    assert both.ours([USER]).startswith("False")


def test_nothing_but_json_is_given_to_transformers() -> None:
    """Transformers 5.23 makes text of the rest: a clock among the variables cannot be called."""
    given = load_embedded_tokenizer()
    theirs, seen = given.apply_chat_template, []

    def apply(messages: Any, **more: Any) -> Any:
        seen.append(json.dumps([messages, more]))
        return theirs(messages, **more)

    given.apply_chat_template = apply
    Renderer(given, kwargs={"enable_thinking": False}).render(TALK, [TOOL], generate=True)  # type: ignore[arg-type]
    assert '"enable_thinking": false' in seen[-1]


@pytest.mark.parametrize("field", ["name", "content", "reasoning_content", "thinking"])
@pytest.mark.parametrize("value", [None, "x", MISSING])
def test_a_field_is_normalized_as_transformers_does(tokenizer: Any, field: str, value: Any) -> None:
    """Transformers 5.23 drops what is None, and copies thoughts from field to field."""
    names = ("name", "content", "reasoning_content", "thinking", "reasoning")
    source = "{% for m in messages %}" + "".join(
        f"{{{{ m.{name} }}}}|{{{{ m.get('{name}', 'no') }}}}|{{{{ m.{name} is defined }}}};"
        for name in names
    )
    both = Both(tokenizer, source + "{{ m | tojson }}{% endfor %}")
    turn = {"role": "assistant", "content": ""}
    talk = [USER, turn if value is MISSING else {**turn, field: value}]
    assert both.ours(talk) == both.native(talk)


def test_the_template_gets_the_prepared_messages_and_tools_themselves(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a version of transformers copies them in each render, it must be done once: `PASSES`."""
    seen: dict[str, Any] = {}
    talk: Any = TALK
    template = SimpleNamespace(render=lambda **variables: seen.update(variables) or "")
    monkeypatch.setattr(applier, "compile_template", lambda source, now: template)
    renderer = Renderer(tokenizer)
    prepared = renderer.prepare(talk)
    head = renderer.head(prepared, [TOOL])
    renderer.render_prepared(prepared, head, generate=True)
    assert len(seen["messages"]) == len(TALK)
    for name, given in (("messages", prepared), ("tools", head.tools)):
        assert all(map(operator.is_, seen[name], given or ()))


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("value", [np.float64(0.5), Text("text"), (1, "x"), {1: None}, [None, 2]])
def test_what_is_not_plain_is_rendered_as_transformers_does(tokenizer: Any, value: Any) -> None:
    source = "{% for m in messages %}{{ m.at }}{% for t in tools %}{{ t.at }}{% endfor %}"
    both = Both(tokenizer, source + "{{ documents[0].at }}{% endfor %}", documents=[{"at": value}])
    talk, tools = [{**USER, "at": value, "none": None}], [{**TOOL, "at": value, "none": None}]
    assert both.ours(talk, tools) == both.native(talk, tools)


def test_gpt_oss_shows_its_thought(tokenizer: Any) -> None:
    both = Both(tokenizer, trl_template("gptoss"))
    talk = [USER, calling({"at": "x"}, reasoning_content="I look there."), result("a frog")]
    assert both.agree(talk, [TOOL])
    assert "I look there." in both.ours(talk, [TOOL])


def test_variables_that_are_arguments_of_transformers_are_left_to_it(tokenizer: Any) -> None:
    source = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    both = Both(tokenizer, source, documents=[{"title": "t", "text": "doc "}])
    assert both.ours(TALK) == both.native(TALK) == "doc Be brief."


def test_a_tokenizer_with_a_method_of_its_own_is_asked() -> None:
    mine = load_embedded_tokenizer()

    class Own(type(mine)):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return "mine: " + super().apply_chat_template(*args, **kwargs)

    mine.__class__ = Own
    assert Renderer(mine).render(TALK, [TOOL], generate=True).startswith("mine: ")  # type: ignore[arg-type]
    given = load_embedded_tokenizer()
    theirs = given.apply_chat_template
    given.apply_chat_template = lambda *args, **kwargs: "given: " + theirs(*args, **kwargs)
    assert Renderer(given).render(TALK, [TOOL], generate=True).startswith("given: ")  # type: ignore[arg-type]


def test_a_tokenizer_with_a_method_of_its_own_cannot_change_the_tools_of_others() -> None:
    mine = load_embedded_tokenizer()
    theirs = mine.apply_chat_template

    def changing(messages: Any, tools: Any, **kwargs: Any) -> Any:
        messages[0]["content"] = "changed"
        tools[0]["function"].setdefault("strict", False)
        return theirs(messages, tools=tools, **kwargs)

    mine.apply_chat_template = changing
    cursor = ChatTemplate(mine).start(TALK, [TOOL])  # type: ignore[arg-type]
    assert '"strict"' in cursor.text and "changed" in cursor.text
    other = ChatTemplate(load_embedded_tokenizer()).start(TALK, [TOOL])  # type: ignore[arg-type]
    assert '"strict"' not in other.text and "changed" not in other.text
    assert '"strict"' not in str(cursor._head.tools) and "changed" not in str(cursor._messages)


def code(messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> str:
    """Renders as the embedded template does, changes its arguments, and refuses an empty list."""
    assert messages, "no messages"
    text = str(
        load_embedded_tokenizer().apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    )
    messages.clear()
    return text


@pytest.mark.parametrize("made", [None, [1, 2], b"text", "\ud800"])
def test_code_must_return_text(made: Any) -> None:
    with pytest.raises(TemplateError, match=r"TypeError: it must return the text|surrogates"):
        ChatTemplate(load_embedded_tokenizer(), chat_template=lambda *_, **__: made).prompt(
            [{"role": "user", "content": "Hi."}]
        )


@pytest.mark.parametrize("way", ["function", "method"])
def test_code_renders_without_a_template(way: str) -> None:
    """Models such as Kimi-K3 have no Jinja template."""
    tokenizer, given = load_embedded_tokenizer(), code if way == "function" else None
    own = {"apply_chat_template": lambda _, talk, tokenize, **options: code(talk, **options)}
    tokenizer.chat_template, expected = None, ChatTemplate(load_embedded_tokenizer())
    with pytest.raises(
        TemplateError, match=r"Python function.*\(FILE.py:NAME\).*trust_remote_code"
    ):
        ChatTemplate(tokenizer)
    if way == "method":
        tokenizer.__class__ = type("Own", (type(tokenizer),), own)
    tokenizer.add_tokens([AddedToken("customer_id")])
    subject = ChatTemplate(tokenizer, chat_template=given)
    assert subject.prompt(TALK, [TOOL]) == expected.prompt(TALK, [TOOL])  # type: ignore[arg-type]
    assert infer_parser(tokenizer, subject.renderer.template) == "hermes"
    assert certify(subject).exact and certify(subject).probes == certify(expected).probes
    assert "customer_id" in subject.encoder.control
    assert "customer_id" in subject.verifier._control.values()
    assert "tokenize" not in TemplateCache(subject).variables or way == "method"
    with pytest.raises(TemplateError, match="no messages"):
        subject.prompt([])
    first: list[Message] = [{"role": "user", "content": "a customer_id <|end|>"}]
    prompt = subject.prompt(first)
    ids = np.array([*prompt, *subject.encoder.encode("So.<|end|>", previous=prompt[-1])], np.int32)
    turns = (TurnSpan(len(prompt), len(ids), 1),)
    served = ServedSequence(ids, turns, [*first, {"role": "assistant", "content": "So."}], ())
    assert subject.verifier.check(served) is None
    ids[1] += 1
    assert subject.verifier.check(served) == "prompt"


# --- arguments ------------------------------------------------------------------------------------

SHOWS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{{ m.content }}{% "
    "endfor %}"
)


@pytest.mark.parametrize(
    ("shown", "form"),
    [
        ("{{ c.function.arguments | tojson }}", "dict"),
        ("{{ c.function.arguments.items() | list }}", "dict"),
        ("{{ '```json\n' + c.function.arguments }}", "text"),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}", "text"),
        ("{{ c.function.name }}", None),
    ],
)
def test_the_form_of_arguments_is_learned_at_once(
    tokenizer: Any, shown: str, form: str | None
) -> None:
    assert Renderer(tokenizer, chat_template=SHOWS.replace("%s", shown)).argument_form == form


def test_an_error_of_an_episode_does_not_change_the_form_of_arguments(tokenizer: Any) -> None:
    """Its arguments as text would render: without them."""
    shown = "{{ c.function.arguments.x + '!' }}"
    renderer = Renderer(tokenizer, chat_template=SHOWS.replace("%s", shown))
    assert renderer.argument_form == "dict"
    talk = [USER, calling({"x": 5})]
    with pytest.raises(TemplateError, match="unsupported operand") as refused:
        renderer.render(talk, None, generate=True)
    assert isinstance(refused.value.__cause__, TypeError)
    assert renderer.argument_form == "dict"
    assert "there!" in renderer.render([USER, calling({"x": "there"})], None, generate=True)


@pytest.mark.parametrize("arguments", ['{"n": 123456789012345678901234567890}', '{"x": 1e22}'])
def test_numbers_are_rendered_as_they_were_said(tokenizer: Any, arguments: str) -> None:
    for shown in ("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"):
        renderer = Renderer(tokenizer, chat_template=SHOWS.replace("%s", shown))
        text = renderer.render([USER, calling(arguments)], None, generate=True)
        assert json.loads(text.removeprefix("Look.")) == json.loads(arguments)


@pytest.mark.parametrize("arguments", ['{"at"', "[1]", "", None, '"x"', "[" * 100_000])
def test_arguments_that_cannot_be_read_are_an_empty_object(tokenizer: Any, arguments: Any) -> None:
    shown = "{{ c.function.arguments.items() | list }}"
    renderer = Renderer(tokenizer, chat_template=SHOWS.replace("%s", shown))
    assert renderer.render([USER, calling(arguments)], None, generate=True) == "Look.[]"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("{{ raise_exception('only one') }}", "only one"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 2 + 'x' }}", "unsupported operand"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ [1].append(2) }}", "not safely callable|is unsafe"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ 'x' * 10 ** 15 }}", "MemoryError"),
    ],
)
def test_a_refusal_is_told_in_the_templates_words(tokenizer: Any, fails: str, words: str) -> None:
    source = "{% if messages | length > 5 %}" + fails + "{% endif %}{{ messages[0].content }}"
    renderer = Renderer(tokenizer, chat_template=source)
    assert renderer.render(TALK[:1], None, generate=True) == "Be brief."  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match=words):
        renderer.render(TALK, None, generate=True)  # type: ignore[arg-type]


def test_a_template_that_is_no_jinja_is_refused(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="Encountered unknown tag"):
        Renderer(tokenizer, chat_template="{% nothing %}").render(TALK, None, generate=True)  # type: ignore[arg-type]


# --- contents with parts --------------------------------------------------------------------------

PARTS = [part("  two \n"), part("parts ")]


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "gemma4", "gemma4_v2", "lfm2"])
def test_a_template_that_takes_parts_is_given_them(tokenizer: Any, name: str) -> None:
    both = Both(tokenizer, trl_template(name), bos_token="<b>")
    talk = [USER, calling({"at": "x"}), result(PARTS)]
    assert both.ours(talk, [TOOL]) == both.native(talk, [TOOL])


@pytest.mark.parametrize("name", ["gemma4", "qwen3_5_think", "smolvlm"])
def test_so_is_it_for_a_user(tokenizer: Any, name: str) -> None:
    both = Both(tokenizer, trl_template(name), bos_token="<b>")
    talk = [{"role": "user", "content": PARTS}]
    assert both.ours(talk) == both.native(talk)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen2_5", {"role": "user", "content": PARTS}),  # raises
        ("qwen2_5", {"role": "system", "content": PARTS}),  # prints a list
        ("llama3_2", {"role": "user", "content": PARTS}),  # prints a list
        ("qwen3", {"role": "user", "content": PARTS}),  # shows nothing
        ("gemma3", {"role": "system", "content": PARTS}),  # shows the first part
    ],
)
def test_a_template_that_takes_no_parts_is_given_their_text(
    tokenizer: Any, name: str, message: Any
) -> None:
    both = Both(tokenizer, trl_template(name), bos_token="<b>")
    more = [USER] if message["role"] == "system" else []
    assert both.ours([message, *more]) == both.native([joined(message), *more])


def test_parts_of_the_responses_api_are_text_parts(tokenizer: Any) -> None:
    both = Both(tokenizer, trl_template("gemma4"), bos_token="<b>")
    contents = ([{**PARTS[0], "type": kind}] for kind in ("text", "input_text", "output_text"))
    texts = {both.ours([{"role": "user", "content": content}]) for content in contents}
    assert texts == {both.native([{"role": "user", "content": PARTS[:1]}])}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([part("a"), {"type": "image_url", "image_url": {}}], r"content\[1\] .* 'image_url'"),
        (["a"], r"content\[0\] is a part of type 'str'"),
        ([{"type": "text"}], r"content\[0\]\.text must be a string"),
        (5, "not int"),
    ],
)
def test_what_is_not_text_is_refused_by_its_name(tokenizer: Any, content: Any, words: str) -> None:
    for name in ("gemma4", "qwen3"):
        renderer = Renderer(tokenizer, chat_template=trl_template(name))
        with pytest.raises(TemplateError, match=words):
            renderer.render([{"role": "user", "content": content}], None, generate=True)


# --- surrogates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "deepseekv3", "gemma4"])
def test_no_text_has_a_surrogate(tokenizer: Any, name: str) -> None:
    lone = "a\ud800b"
    tool = {**TOOL, "function": {**TOOL["function"], "description": lone}}  # type: ignore[dict-item]
    renderer = Renderer(tokenizer, chat_template=trl_template(name), kwargs={"bos_token": lone})
    for arguments in ({"at": lone}, {lone: 1}, json.dumps({"at": lone})):
        talk = [{"role": "user", "content": lone}, calling(arguments), result([part(lone)])]
        text = renderer.render(talk, [tool], generate=True)
        assert text.count("a\ufffdb") >= 3
        assert tokenizer(text)["input_ids"]
