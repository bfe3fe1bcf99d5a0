"""MkDocs hooks: the command-line reference is made from the commands."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown: `cli.md` gets the help of every command."""
    if page.file.src_uri != "cli.md":
        return markdown
    import typer
    from typer.cli import get_docs_for_click

    from toolroll.rollout.cli.app import app

    command = typer.main.get_command(app)
    made = get_docs_for_click(obj=command, ctx=typer.Context(command), name="toolroll")
    # From the first command on: the page has its title already.
    return markdown.replace("<!-- commands -->", made[made.index("## `toolroll") :])
