"""What renders: `transformers`' own `apply_chat_template` with templates that are compiled once, or
code in place of a template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import jinja2

from toolroll.rollout.template.sandbox import compile_template
from toolroll.rollout.template.snapshot import snapshot

T = TypeVar("T")

ChatFunction = Callable[..., str]
"""Code that renders: `function(messages, *, tools, add_generation_prompt, **variables)`."""
PLAIN = ("_plain_template_data",)
PASSES = ("_normalize_chat_messages", *PLAIN)
"""Functions of `transformers` (from 5.22) that copy all messages and tools in each render. They
look at each message alone, and change nothing that they have returned before.
"""


def function_of(tokenizer: Any, chat_template: str | ChatFunction | None) -> ChatFunction | None:
    """Return the function `chat_template`, or the `apply_chat_template` of a tokenizer that
    overrides this method, or None.

    The function that is returned passes on copies, because the code may change them. All errors of
    the code become errors of `jinja2`.
    """
    from transformers import PreTrainedTokenizerBase

    code: Any = tokenizer.apply_chat_template
    fixed: dict[str, Any] = {"tokenize": False}
    if callable(chat_template):
        code, fixed = chat_template, {}
    elif getattr(code, "__func__", None) is PreTrainedTokenizerBase.apply_chat_template:
        return None
    elif chat_template is not None:
        fixed["chat_template"] = chat_template

    def render(messages: Any, *, tools: Any, **options: Any) -> str:
        try:
            text = code(snapshot(messages), tools=snapshot(tools), **fixed, **options)
            if not isinstance(text, str):
                raise TypeError(f"it must return the text, not a {type(text).__name__}")
            text.encode()  # no lone surrogates
        except Exception as error:
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error
        return text

    return render


def applier(tokenizer: Any, now: datetime) -> Callable[..., Any]:
    """Return `tokenizer.apply_chat_template`, with templates compiled by `compile_template`, for
    messages and tools that have been through `PASSES`.

    This is `transformers`' own code with some global names rebound. If this version of
    `transformers` compiles templates elsewhere, return the tokenizer's method unchanged. That
    method is correct, but it is slower and reads the clock on each call.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    method: Callable[..., Any] = tokenizer.apply_chat_template
    function = PreTrainedTokenizerBase.apply_chat_template
    done = {
        name: partial(_unless_list, getattr(chat_template_utils, name, _same)) for name in PASSES
    }
    compiler = partial(compile_template, now=now)
    render = _rebound(
        chat_template_utils.render_jinja_template, "_compile_jinja_template", compiler, **done
    )
    apply = _rebound(function, "render_jinja_template", render, **done)
    return method if render is None or apply is None else partial(apply, tokenizer)


def through(value: T, passes: Sequence[str]) -> T:
    """Return what the functions `passes` of the installed `transformers` make of `value`."""
    from transformers.utils import chat_template_utils

    for name in passes:
        value = getattr(chat_template_utils, name, _same)(value)
    return value


def _same(value: T) -> T:
    return value


def _unless_list(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `function(value)`, but a list unchanged: messages, tools or documents, which have been
    through `function`.
    """
    return value if type(value) is list else function(value)


def _rebound(function: Any, name: str, value: Any, **others: Any) -> Callable[..., Any] | None:
    """Return a copy of `function` in which the global `name` is `value`, and so are `others`.
    Return None if `function` does not use `name`. The original is not changed, because other
    threads use it.
    """
    if not isinstance(function, FunctionType) or name not in function.__code__.co_names:
        return None
    names = {**function.__globals__, name: value, **others}
    rebound = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound
