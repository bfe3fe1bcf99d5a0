"""A MkDocs hook that writes the help of all commands into the page `cli.md`."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return `markdown`. In `cli.md`, replace `<!-- commands -->` with the help of all commands."""
    if page.file.src_uri != "cli.md":
        return markdown
    import typer
    from typer.cli import get_docs_for_click

    from toolroll.cli.app import app

    command = typer.main.get_command(app)
    made = get_docs_for_click(obj=command, ctx=typer.Context(command), name="toolroll")
    # Without the generated title, because the page has its own.
    return markdown.replace("<!-- commands -->", made[made.index("## `toolroll") :])
