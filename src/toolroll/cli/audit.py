"""`toolroll audit` and its options."""

from __future__ import annotations

from functools import partial
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from toolroll.cli.display import Output, page_line, print_line
from toolroll.cli.options import help_of
from toolroll.evaluation.run_config import json_object

if TYPE_CHECKING:
    from toolroll.evaluation.audit import AuditReport

_AROUND, _MOST, _LISTED = 12, 40, 5
_PAGE = 100  # columns


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
    if as_json:
        typer.echo(orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2))
    else:
        _show(report, tokenizer, Output())
    if html is not None:
        page = Console(record=True, file=StringIO(), width=_PAGE)
        _show(report, tokenizer, page)
        title = f"<head><title>toolroll audit {escape(str(samples))}</title>"
        html.write_text(page.export_html().replace("<head>", title, 1), encoding="utf-8")
        print_line(bar, page_line(html))
    if report.faulty_rows:
        raise typer.Exit(1)


def _show(report: AuditReport, tokenizer: Any, console: Console) -> None:
    from toolroll.evaluation.audit.template import PROMPT, UNMATCHED

    say, record = partial(print_line, console), report.record
    say(f"{report.faulty_rows} of {report.rows} rows have a fault")
    if record is not None:
        share = (report.delivered_tokens or 0) / record.sampled_tokens
        count = record.sampled_tokens
        say(f"{share:.1%} of the {count} sampled tokens are in turns that are trained as sampled")
        if record.without_ids:
            say(f"{record.without_ids} prompts were sent as text: give the engine's --model")
    else:
        say("Not checked without --requests: what the engine was sent and sampled")
    if report.without_logprobs and record is None:
        count = report.without_logprobs
        say(f"Not checked without logprobs ({count} rows): whether trained tokens were sampled")
    if not report.with_messages and record is None:
        say("Not checked without --model and rows with messages: the text of the prompts and turns")
    if report.untrained_rows:
        say(f"{report.untrained_rows} rows have no trained token")
    for name, kind in report.kinds.items():
        share = len(kind.rows) / report.rows
        size = f"{_count(len(kind.rows), 'row')} ({share:.1%}), {_count(kind.places, 'place')}"
        console.print(f"[bold]{name}[/]: {size}")
        if len(kind.rows) > 1:
            more = f" and {len(kind.rows) - _LISTED} others" if len(kind.rows) > _LISTED else ""
            say(f"in {'; '.join(Path(place).name for place in kind.rows[:_LISTED])}{more}")
        say(f"{kind.row.place}, tokens {kind.fault.start} to {kind.fault.stop}:")
        console.print(_drawn(kind, tokenizer), soft_wrap=not console.record)
        if name.endswith(UNMATCHED):
            say("is --model the tokenizer of these rows?")
        if name.endswith(PROMPT) and not kind.row.tools:
            say("the row has no `tools`: if the model had some, the prompt shows them")
    if report.kinds:
        say("(the first fault of each kind is between >> and <<; green tokens are trained)")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _drawn(kind: Any, tokenizer: Any) -> Text:
    """Return the tokens of the first fault and around it: green if trained, and the fault itself on
    red, between >> and <<.
    """
    from toolroll.evaluation.viewer.data import Pieces

    row, (_, start, stop, _) = kind.row, kind.fault
    first, last = max(0, start - _AROUND), min(stop, start + _MOST) + _AROUND
    ids = row.ids[first:last].tolist()
    pieces = [f"{index} " for index in ids] if tokenizer is None else Pieces(tokenizer).of(ids)
    text = Text()
    for index, piece in enumerate(pieces, first):
        style = "green" if row.trained[index] else "dim"
        shown = piece if piece.isprintable() else repr(piece)[1:-1]
        if index == start:
            text.append(">>")
        text.append(shown, style="white on red" if start <= index < stop else style)
        if index == stop - 1:
            text.append("<<")
    return text
