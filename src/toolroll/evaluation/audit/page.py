"""`report_page`: an audit's report as one HTML file, which loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from toolroll.evaluation.audit.report_text import Heading, ReportPart
from toolroll.evaluation.viewer.page import page_style

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


def report_page(title: str, parts: Sequence[ReportPart]) -> str:
    """Return the report as a page that looks like that of `toolroll view`."""
    lines = []
    for part in parts:
        if isinstance(part, str):
            lines.append(f"<p>{escape(part)}</p>")
        elif isinstance(part, Heading):
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
