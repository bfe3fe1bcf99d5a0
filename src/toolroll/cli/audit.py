"""`toolroll audit` and its options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import orjson
import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from toolroll.cli.display import Output, page_line, print_line
from toolroll.cli.options import help_of
from toolroll.evaluation.run_config import json_object
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.run_directory import read_settings

if TYPE_CHECKING:
    from toolroll.evaluation.audit import AuditReport

_AROUND, _MOST, _LISTED = 12, 40, 5
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
body {{ display: block; height: auto; overflow: auto; }}
main {{ display: block; max-width: 960px; margin: 0 auto; padding: 16px; }}
h2 {{ margin-top: 28px; }}
p {{ margin: 6px 0; overflow-wrap: anywhere; }}
.trained {{ background: var(--trained); }}
.fault {{ color: var(--bad); outline: 1px solid var(--bad); font-weight: 600; }}
</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
"""


class _Token(NamedTuple):
    text: str
    trained: bool
    fault: bool


class _Heading(NamedTuple):
    name: str
    size: str


Part = str | _Heading | list[_Token]
"""A line of the report, the heading of a kind of fault, or the tokens of the first such fault."""


def audit(
    samples: Annotated[
        Path, typer.Argument(help="a run's folder, or a file or folder: .parquet, .jsonl, .pt")
    ],
    requests: Annotated[
        Path | None,
        typer.Option(help="SGLang's request log, or the folder of a run or of `toolroll serve`"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="the tokenizer: compare rows that have messages with its chat template"),
    ] = None,
    chat_template: Annotated[str | None, typer.Option(help=help_of("chat_template"))] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help=help_of("chat_template_kwargs"))
    ] = None,
    html: Annotated[Path | None, typer.Option(help="also write the report to this page")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="the report as JSON")] = False,
) -> None:
    """Check that training samples are what the model saw and sampled (docs/audit.md).

    Exit with 1 if they are not.

    Example: toolroll audit samples.parquet --requests sglang-log
    """
    from toolroll.evaluation.audit import TemplateCheck
    from toolroll.evaluation.audit import audit as audit_rows
    from toolroll.evaluation.audit.formats import read_rows
    from toolroll.evaluation.audit.request_log import read_record
    from toolroll.rollout.model.model import read_template
    from toolroll.rollout.model.tokenizers import load_tokenizer

    tokenizer = encode = template = None
    if model is not None:
        tokenizer = load_tokenizer(model)
        encode = tokenizer.encode  # adds a BOS, as the engine does
        kwargs = json_object(chat_template_kwargs, "--chat-template-kwargs")
        text = read_template(chat_template)
        template = TemplateCheck(tokenizer, chat_template=text, kwargs=kwargs)
    record = None if requests is None else read_record(requests, encode)
    bar = Console(stderr=True)
    rows = track(read_rows(samples), "rows", console=bar, disable=not bar.is_terminal)
    report = audit_rows(rows, record=record, template=template)
    if tokenizer is None and report.kinds:
        tokenizer = _recorded_tokenizer(requests, samples)
    parts = list(_parts(report, tokenizer))
    if as_json:
        typer.echo(orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2))
    else:
        _show(parts, Output())
    if html is not None:
        html.write_text(_page(f"toolroll audit {samples}", parts), encoding="utf-8")
        print_line(bar, page_line(html))
    if 0 < report.with_messages == report.unmatched_rows:
        raise UsageError(
            f"--model {model}: the turns and messages of no row can be matched: is this the "
            "tokenizer of the rows, with their --chat-template?"
        )
    if report.faulty_rows:
        raise typer.Exit(1)


def _recorded_tokenizer(*folders: Path | None) -> Any:
    """Return the tokenizer that the `run.json` of one of the folders names, or None."""
    from toolroll.rollout.model.tokenizers import load_tokenizer

    with suppress(UsageError):
        for folder in folders:
            settings = read_settings(folder).values() if folder is not None else ()
            models = {part["model"] for part in settings if part.get("model")}
            if len(models) == 1:
                return load_tokenizer(models.pop())
    return None


def _parts(report: AuditReport, tokenizer: Any) -> Iterator[Part]:
    from toolroll.evaluation.audit.template import PROMPT, UNMATCHED

    record = report.record
    yield f"{report.faulty_rows} of {report.rows} rows have a fault"
    if record is not None:
        share = (report.delivered_tokens or 0) / record.sampled_tokens
        count = record.sampled_tokens
        yield f"{share:.1%} of the {count} sampled tokens are in turns that are trained as sampled"
        if record.without_ids:
            yield f"{record.without_ids} prompts were sent as text: give the engine's --model"
    else:
        yield "Not checked without --requests: what the engine was sent and sampled"
    if report.without_logprobs and record is None:
        count = report.without_logprobs
        yield f"Not checked without logprobs ({count} rows): whether trained tokens were sampled"
    if not report.with_messages and record is None:
        yield "Not checked without --model and rows with messages: the text of prompts and turns"
    if report.untrained_rows:
        yield f"{report.untrained_rows} rows have no trained token"
    for name, kind in report.kinds.items():
        share = len(kind.rows) / report.rows
        size = f"{_count(len(kind.rows), 'row')} ({share:.1%}), {_count(kind.places, 'place')}"
        yield _Heading(name, size)
        if len(kind.rows) > 1:
            more = f" and {len(kind.rows) - _LISTED} others" if len(kind.rows) > _LISTED else ""
            yield f"in {'; '.join(Path(place).name for place in kind.rows[:_LISTED])}{more}"
        yield f"{kind.row.place}, tokens {kind.fault.start} to {kind.fault.stop}:"
        yield list(_tokens(kind, tokenizer))
        if name.endswith(UNMATCHED):
            yield "is --model the tokenizer of these rows?"
        if name.endswith(PROMPT) and not kind.row.tools:
            yield "the row has no `tools`: if the model had some, the prompt shows them"
    if report.kinds:
        ids = "" if tokenizer is not None else "; --model decodes the ids"
        yield f"(the first fault of each kind is shown{ids})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _tokens(kind: Any, tokenizer: Any) -> Iterator[_Token]:
    """Yield the tokens of the first fault and around it."""
    from toolroll.evaluation.viewer.data import Pieces

    row, (_, start, stop, _) = kind.row, kind.fault
    first, last = max(0, start - _AROUND), min(stop, start + _MOST) + _AROUND
    ids = row.ids[first:last].tolist()
    pieces = [f"{index} " for index in ids] if tokenizer is None else Pieces(tokenizer).of(ids)
    for index, piece in enumerate(pieces, first):
        text = piece if piece.isprintable() else repr(piece)[1:-1]
        yield _Token(text, bool(row.trained[index]), start <= index < stop)


def _show(parts: Sequence[Part], console: Console) -> None:
    """Print the report. The tokens before a fault, of the fault, and after it have a line each."""
    for part in parts:
        if isinstance(part, str):
            print_line(console, part)
        elif isinstance(part, _Heading):
            console.print(f"[bold]{part.name}[/]: {part.size}")
        else:
            label = "before"
            for fault, tokens in groupby(part, lambda token: token.fault):
                line = Text("   fault: " if fault else f"{label:>8}: ")
                for token in tokens:
                    trained = "green" if token.trained else "dim"
                    line.append(token.text, style="white on red" if fault else trained)
                console.print(line, soft_wrap=True)
                label = "after"
    if console.color_system is not None and any(isinstance(part, list) for part in parts):
        print_line(console, "(green tokens are trained)")


def _page(title: str, parts: Sequence[Part]) -> str:
    """Return the report as a page that looks as that of `toolroll view`."""
    from toolroll.evaluation.viewer.page import page_style

    lines = []
    for part in parts:
        if isinstance(part, str):
            lines.append(f"<p>{escape(part)}</p>")
        elif isinstance(part, _Heading):
            lines.append(f"<h2>{escape(part.name)}</h2>\n<p>{escape(part.size)}</p>")
        else:
            spans = (
                f'<span class="{"trained" * token.trained} {"fault" * token.fault}">'
                f"{escape(token.text)}</span>"
                for token in part
            )
            lines.append(f'<div class="tokens">{"".join(spans)}</div>')
    head = _HEAD.format(title=escape(title), style=page_style())
    legend = (
        '<p>Tokens: <span class="trained">trained</span>, <span class="fault">the fault</span></p>'
    )
    lines += [legend] * any(isinstance(part, list) for part in parts)
    return "\n".join([head, *lines, "</main>\n</body>\n</html>\n"])
