"""`toolroll check-template`: shows what a chat template does to the tokens of tool-calling
episodes, as a table or as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolroll.evaluation.certify import TemplateReport, certify
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import check_syntax, read_template
from toolroll.rollout.model.tokenizers import load_tokenizer
from toolroll.rollout.template import ChatTemplate

_STYLES = {"append": "green", "fork": "yellow", "refuse": "red", "wrong": "bold red"}


def report(
    model: str, template: str | None, kwargs: dict[str, Any] | None, *, trust_remote_code: bool
) -> TemplateReport:
    """Return the report on the chat template `template` (see `read_template`), or on the
    tokenizer's own if `template` is None.

    `model`: the folder or name of the tokenizer. `kwargs`: variables of the chat template.
    """
    if Path(model).suffix in (".jinja", ".jinja2"):
        raise UsageError(
            "a template is checked with its tokenizer: toolroll check-template MODEL "
            f"--chat-template {model}"
        )
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    chat_template = ChatTemplate(tokenizer, chat_template=read_template(template), kwargs=kwargs)
    check_syntax(chat_template, template)
    return certify(chat_template)


def show(certificate: TemplateReport, console: Console, *, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        console.out(
            orjson.dumps(certificate.to_json(), option=orjson.OPT_INDENT_2).decode(),
            highlight=False,
        )
        return
    stops = (
        ", ".join(f"{text} ({index})" for text, index in certificate.stop_tokens.items()) or "none"
    )
    facts = {
        "stop tokens": stops,
        "generation prompt": repr(certificate.generation_prompt),
        "opens reasoning": " and ".join(
            f"after a {last}" for last, opens in certificate.opens_reasoning.items() if opens
        )
        or "no",
        "arguments": {"dict": "as an object", "text": "as JSON text"}.get(
            certificate.arguments, certificate.arguments
        ),
        "shows the date": "yes: the same date during a whole session"
        if certificate.dated
        else "no",
        "tools change": certificate.tools_change,
        "encoder": certificate.encoder,
        "fingerprint": certificate.fingerprint,
    }
    for name, value in facts.items():
        console.print(f"[bold]{name}:[/] {escape(value)}", highlight=False)
    table = Table("appended messages", "outcome", "with preserve")
    for probe in certificate.probes:
        style = _STYLES[probe.outcome]
        with_preserve = {True: "append", False: "fork", None: ""}[probe.preserved]
        table.add_row(escape(probe.what), f"[{style}]{probe.outcome}[/]", with_preserve)
    console.print(table)
    for line in certificate.remarks():
        console.print(f"- {escape(line)}", highlight=False)
    if forks := certificate.forks("fork"):
        console.print(f"[yellow]{escape(forks)}.[/]", highlight=False)
    if certificate.exact:
        ending = "." if certificate.remarks() else ", which stay unchanged."
        forked = any(probe.outcome == "fork" for probe in certificate.probes)
        but = ", except for the forks above (the setting history prevents some)" if forked else ""
        console.print(
            f"[green]Tool calling is exact{but}: each tool result is appended to the tokens of the "
            f"earlier prompts and replies{ending}[/]"
        )
    else:
        console.print("[red]Tool calling cannot be exact in one sequence with this template.[/]")
