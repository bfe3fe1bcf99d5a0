"""`toolroll view`: prints the table of a run, and writes a page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from toolroll.cli.display import shortened
from toolroll.endpoint.sessions.session_store import unfinished_sessions
from toolroll.evaluation.report import read_summary, report_of
from toolroll.evaluation.run_config import tokenizer_name
from toolroll.evaluation.viewer import ShownTokens, write_page
from toolroll.evaluation.viewer.data import Pieces
from toolroll.evaluation.viewer.page import PiecesOf
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.tokenizers import load_tokenizer
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.run_directory import read_run_file, refuse_no_run, unfinished
from toolroll.rollout.runs.summary import Summary

PAGE_NAME = "view.html"


def view(
    folder: Path, *, out: Path | None, tokenizer: str | None, tokens: int | None
) -> tuple[Path, int, list[str], dict[str, dict[str, Any]]]:
    """Write the page for the run in `folder`. Return the page's path, the number of episodes,
    messages for the user, and the reports of the episodes by environment.

    Args:
        folder: The folder of a run.
        out: The file to write; by default `view.html` in `folder`.
        tokenizer: The tokenizer for all environments. By default, `run.json` names one for each
            environment.
        tokens: The number of episodes to include with tokens; see `ShownTokens`.

    Raises:
        UsageError: `folder` is not the folder of a run, `out` cannot be written, or `tokenizer`
            cannot be loaded.
    """
    refuse_no_run(folder)
    out = out or folder / PAGE_NAME
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder: the page is a file")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    settings = read_run_file(folder)["environments"]
    messages, bad_lines = list[str](), list[str]()
    summaries: dict[str, Summary] = {}

    @cache  # for the page, and for the table
    def reports() -> dict[str, dict[str, Any]]:
        written = read_summary(folder)
        open_runs = unfinished(folder, {env: run.episodes for env, run in summaries.items()})
        return {
            env: report_of(
                summary, written.get(env, {}), settings.get(env), unfinished=open_runs.get(env)
            )
            for env, summary in summaries.items()
        }

    count, with_tokens = write_page(
        out,
        page_title(folder),
        _summed(read_episodes(folder, on_bad_line=bad_lines.append), summaries),
        tokens=ShownTokens(pieces_by_model(settings, tokenizer, messages.append), tokens),
        settings=settings,
        summary=reports,
    )
    messages += shortened(bad_lines) + unfinished_sessions(folder)
    if count > with_tokens:
        messages.append(
            f"the tokens of the first {with_tokens} episodes are in the page; the other episodes "
            f"have their conversation only (to include more: --tokens)"
        )
    counts = {env: summary.episodes for env, summary in summaries.items()}
    left = unfinished(folder, counts)
    messages += [f"{env}: {line}" for env, line in left.items() if env not in counts]
    return out, count, messages, reports()


def _summed(episodes: Iterable[Episode], summaries: dict[str, Summary]) -> Iterator[Episode]:
    """Yield `episodes`, and add each to the summary of its environment."""
    for episode in episodes:
        summaries.setdefault(episode.env, Summary(episode.env)).add(episode)
        yield episode


def page_title(folder: Path) -> str:
    """Return the title of the page of the run in `folder`: its name, models and latest date."""
    run = read_run_file(folder)
    models = sorted({settings.get("model") or "" for settings in run["environments"].values()})
    dates = [history[-1].get("date", "")[:10] for history in run["provenance"].values() if history]
    title = [f"toolroll: {folder.resolve().name}", *models, max(dates, default="")]
    return ", ".join(filter(None, title))


def pieces_by_model(
    settings: dict[str, dict[str, Any]], tokenizer: str | None, say: Callable[[str], None]
) -> PiecesOf:
    """Return a function that loads the tokenizer of an environment. `tokenizer`: as for `view`.
    `say` gets a message if the tokenizer that `run.json` names cannot be loaded.
    """

    @cache
    def pieces(name: str) -> Pieces | None:
        try:
            return Pieces(load_tokenizer(name))
        except UsageError as error:
            if tokenizer is not None:
                raise
            say(f"tokens are shown as ids; to show their text, give --tokenizer: {error}")
            return None

    def of(env: str) -> Pieces | None:
        name = tokenizer or tokenizer_name(settings.get(env, {}))
        return None if name is None else pieces(name)

    return of
