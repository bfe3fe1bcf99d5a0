"""`toolroll audit` and its options."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from toolroll.cli.display import Output, page_line, print_line
from toolroll.cli.options import help_of
from toolroll.evaluation.run_config import json_object, tokenizer_name
from toolroll.rollout.errors import UsageError

if TYPE_CHECKING:
    from toolroll.evaluation.audit.report_text import ReportPart


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

    Exit with 1 if they are not, and with 2 if no row can be matched with --model.

    Example: toolroll audit samples.parquet --requests sglang-log
    """
    from toolroll.evaluation.audit import TemplateCheck
    from toolroll.evaluation.audit import audit as audit_rows
    from toolroll.evaluation.audit.formats import read_rows
    from toolroll.evaluation.audit.page import report_page
    from toolroll.evaluation.audit.report_text import report_parts
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
    if tokenizer is None and report.kinds and (html is not None or not as_json):
        tokenizer = _recorded_tokenizer(requests, samples)
    parts = list(report_parts(report, tokenizer))
    if as_json:
        typer.echo(orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2))
    else:
        _show(parts, Output())
    if html is not None:
        html.write_text(report_page(f"toolroll audit {samples}", parts), encoding="utf-8")
        print_line(bar, page_line(html))
    if report.faulty_rows:
        raise typer.Exit(1)
    if record is None and report.rows == report.unmatched_rows:
        raise UsageError(
            f"--model {model}: the turns and messages of no row can be matched: is this the "
            "tokenizer of the rows, with their --chat-template?"
        )


def _recorded_tokenizer(*folders: Path | None) -> Any:
    """Return the tokenizer that the `run.json` of one of the folders names, or None if it is not on
    this machine.
    """
    from toolroll.rollout.model.tokenizers import load_tokenizer, local_name
    from toolroll.rollout.runs.run_directory import read_settings

    for folder in filter(None, folders):
        with suppress(UsageError):
            names = [tokenizer_name(settings) for settings in read_settings(folder).values()]
            models = {*filter(None, names)}
            if len(models) == 1 and (name := local_name(models.pop())):
                return load_tokenizer(name)
    return None


def _show(parts: Sequence[ReportPart], console: Console) -> None:
    """Print the report. The tokens before a fault, of the fault, and after it have a line each."""
    for part in parts:
        if isinstance(part, str):
            print_line(console, part)
        elif isinstance(part, list):
            label = "before"
            for fault, tokens in groupby(part, lambda token: token.fault):
                line = Text("   fault: " if fault else f"{label:>8}: ")
                for token in tokens:
                    trained = "green" if token.trained else "dim"
                    line.append(token.text, style="white on red" if fault else trained)
                console.print(line, soft_wrap=True)
                label = "after"
        else:
            console.print(f"[bold]{part.name}[/]: {part.size}")
    if console.color_system is not None and any(isinstance(part, list) for part in parts):
        print_line(console, "(green tokens are trained)")
