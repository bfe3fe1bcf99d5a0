"""`SessionStore`: keeps the sessions of `toolroll serve --out FOLDER` on disk.

Finished sessions are episodes in `episodes.jsonl`, like those of `toolroll run`. Unfinished ones
are in `sessions.jsonl`, the journal. Invariants:

- An answer is in the journal before it is returned.
- Whenever the process is killed, each session is in one of the two files.
- Only one process at a time uses the folder.
- A folder of another model, tokenizer or chat template is refused.
- If the store has begun to finish a session, it goes on even if the client disconnects. If
  finishing fails, the session stays in the journal. This process or the next one can try again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from toolroll.endpoint.conversation.messages import fork_advice
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.disk.journal import Journal, Keep, read_lines
from toolroll.endpoint.disk.session_log import SessionLog, session_of
from toolroll.endpoint.errors import ApiError, api_error
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.restore import Key, Restored, restore
from toolroll.endpoint.sessions.sessions import Sessions
from toolroll.evaluation.report import report, write_summary
from toolroll.rollout.episode import Episode, InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.episode_file import FILE_NAME, cut_torn_line, read_episodes
from toolroll.rollout.runs.provenance import Provenance, template_hashes
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.runs.summary import recomputed_tokens
from toolroll.rollout.types import StopReason

logger = logging.getLogger(__name__)

ENV = "serve"
"""The environment's name in `run.json` and `episodes.jsonl`."""
JOURNAL_NAME = "sessions.jsonl"
_STALE = 8 * 2**20
"""The journal is not compacted while finished sessions take up at most this number of its bytes."""


class SessionStore:
    """Keeps the sessions of one endpoint in `folder`. `settings`: the settings that determine the
    sessions' tokens (`store_settings`).
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        provenance: Provenance | None = None,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.finish_at_end = False
        """If True, `aclose` finishes all sessions. If False, the next process continues them."""
        self.finished: dict[Key, int] = {}
        """The number of answers of each finished session."""
        self._directory = RunDirectory(
            folder, ENV, settings, sync="always", provenance=provenance, bound_when_empty=True
        )
        self._open = ExitStack()
        self._journal: Journal | None = None
        self._logs: dict[Key, SessionLog] = {}
        self._samples: Counter[str] = Counter()
        self._appending = asyncio.Lock()
        self._finishing: set[asyncio.Task[dict[str, Any]]] = set()
        self._closed = False
        self._stale = 0
        self._most_stale = _STALE

    @property
    def journal(self) -> Journal:
        """The open journal."""
        assert self._journal is not None, "the store is not open"
        return self._journal

    @property
    def path(self) -> Path:
        """The episode file."""
        return self.folder / FILE_NAME

    async def open(
        self,
        sessions: Sessions,
        templates: TemplateCache,
        settle: Callable[[LiveSession], Awaitable[None]],
    ) -> None:
        """Lock the folder, and add its unfinished sessions to `sessions`. Do nothing if the store
        is already open. `settle` verifies a session before it is written as an episode.

        Raise `UsageError` if another process uses the folder, or if the folder belongs to another
        model.
        """
        if self._journal is not None:
            return
        self._settle = settle
        self._sessions = sessions
        try:
            self._open.enter_context(self._directory)
            self.finished = await asyncio.to_thread(_finished, self.path)
            path = self.folder / JOURNAL_NAME
            torn = cut_torn_line(path)
            self._journal = Journal(path)
            restored = restore(path, self._restored, templates, self.finished)
        except BaseException:
            if self._journal is not None:
                await self._journal.aclose()
                self._journal = None  # so that this method can be called again
            self._open.close()
            raise
        self._take(restored, torn)

    def _take(self, restored: Restored, torn: int) -> None:
        self._samples = restored.samples
        for name, sample in self.finished:
            self._samples[name] = max(self._samples[name], sample + 1)
        lives = sorted(
            (live for live, _ in restored.sessions.values()), key=lambda live: live.created
        )
        self._logs = {key: log for key, (_, log) in restored.sessions.items()}
        newest = {live.id: live for live in sorted(lives, key=lambda live: live.sample)}
        self._sessions.restore(live for live in lives if newest[live.id] is live)
        self._stale = restored.stale
        self._compact()
        for live in lives:
            if newest[live.id] is not live:  # it was being finished when its name was used again
                self.finish(live)
        if lives or torn:
            logger.info(
                "restored unfinished sessions: %d, of %s%s",
                len(lives),
                self.folder,
                f" (removed an incomplete last line of {torn} bytes)" if torn else "",
            )

    def _restored(self, name: str, sample: int) -> tuple[LiveSession, SessionLog]:
        live = self._sessions.empty(name)
        return live, self._log(live, sample)

    def _log(self, live: LiveSession, sample: int) -> SessionLog:
        """Give `live` a log in the journal."""
        live.sample = sample
        live.log = log = SessionLog(live.id, sample, self.journal)
        return log

    # --- sessions ---------------------------------------------------------------------------------

    def begin(self, live: LiveSession) -> None:
        """Write to the journal that `live` exists, and give `live` a log in the journal."""
        self.journal.check()
        sample = self._samples[live.id]
        self._samples[live.id] += 1
        log = self._logs[live.id, sample] = self._log(live, sample)
        log.begin(live.sampling_params, created=live.created, opening=live.opening)

    def finish(self, live: LiveSession) -> asyncio.Task[dict[str, Any]]:
        """Start a task that aborts the requests of `live`, accepts no new ones, and appends `live`
        to the episode file. A session without an answer is only dropped. The task returns the data
        about the session that clients get (`written`). The store keeps a reference to the task,
        because the client that requested the end may disconnect.

        The task raises `ApiError` (503) if the episode cannot be written. Then the session stays in
        the journal, and is added to the sessions again, but gets no more answers. It can be
        finished again.
        """
        task = asyncio.get_running_loop().create_task(self._finish(live))
        self._finishing.add(task)
        task.add_done_callback(partial(self._done, live))
        return task

    def _done(self, live: LiveSession, task: asyncio.Task[dict[str, Any]]) -> None:
        self._finishing.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            trace = None if isinstance(error, ApiError) else error
            problem = "the session %s could not be finished: %s"
            logger.error(problem, live.id, api_error(error), exc_info=trace)
            self._sessions.put_back(live)

    async def _finish(self, live: LiveSession) -> dict[str, Any]:
        log = live.log
        assert isinstance(log, SessionLog)
        await live.end()
        log.ended = True
        await log.saved()  # an answer that cannot be saved is not trained
        await self._settle(live)
        episode = _episode(live, ENV, live.sample, str(self.settings.get("model") or ""))
        if episode is not None and live.key not in self.finished:
            try:
                async with self._appending:
                    await asyncio.to_thread(self._directory.append, episode)
            except UsageError as error:
                raise ApiError(503, "storage_failed", str(error)) from error
            self.finished[live.key] = len(live.trace)
        self._logs.pop(live.key, None)
        saved = log.end()
        self._stale += log.size
        await asyncio.shield(saved)
        self._compact()
        return self.written(*live.key)

    def file_of(self, session_id: str) -> Path | None:
        """Return the episode file if the session is finished, or is being finished."""
        ended = any(session_id == name for name, _ in (*self.finished, *self._logs))
        return self.path if ended else None

    def written(self, name: str, sample: int) -> dict[str, Any]:
        """Return the data about a finished session that clients get. `file` is the path of the
        episode file. It is None if the session had no answer.
        """
        turns = self.finished.get((name, sample))
        return {
            "session_id": name,
            "sample": sample,
            "turns": turns or 0,
            "file": None if turns is None else str(self.path),
        }

    def _compact(self) -> None:
        """Remove finished sessions from the journal if they take up more than half of it, and more
        bytes than the limit `stale`.
        """
        unfinished = sum(log.size for log in self._logs.values())
        if self._stale > max(self._most_stale, unfinished):
            self._stale = 0
            self.journal.compact(self._kept)

    def _kept(self) -> Keep:
        unfinished = frozenset(self._logs)
        return lambda line: session_of(line) in unfinished

    async def aclose(self, lives: Iterable[LiveSession]) -> None:
        """Close the files. If `finish_at_end` is True, first finish `lives`, all sessions of the
        endpoint. They get no more requests.
        """
        if self._journal is None or self._closed:
            return
        self._closed = self._journal.stopping = True
        try:
            for live in lives if self.finish_at_end else ():
                await asyncio.wait([self.finish(live)])  # `_done` logs a failure
            while self._finishing:
                await asyncio.wait(self._finishing)
            await self._journal.aclose()
            logger.info(
                "%s has finished sessions: %d; unfinished (the next start continues them): %d",
                self.folder,
                len(self.finished),
                len(self._logs),
            )
            if self.finished:
                provenance = self._directory.provenance
                run_report = report(
                    self._directory.summary,
                    settings=self.settings,
                    allow_unequal=True,
                    provenance=provenance,
                )
                write_summary(self.folder, {ENV: run_report})
        finally:
            self._open.close()


def store_settings(model: Model, name: str | None) -> dict[str, Any]:
    """Return the settings that determine the tokens of a session: the model's `name`, the hashes of
    its tokenizer and chat template, the template's arguments, the history policy and the parser's
    name.
    """
    template = model.template
    return {
        "model": name,
        **template_hashes(model),
        "template_kwargs": dict(template.renderer.kwargs),
        "history": template.history,
        "parser": model.parser.name,
    }


def _finished(path: Path) -> dict[Key, int]:
    """Return the number of answers of each session in the episode file `path`."""
    answers: dict[Key, int] = {}
    if path.is_file():
        for _, line in read_lines(path):
            data = orjson.loads(line)
            if data["env"] == ENV:
                answers[data["task_id"], data["sample"]] = int(data["metrics"].get("turns", 0))
    return answers


def unfinished_sessions(folder: Path) -> list[str]:
    """Return a message with the number of sessions in `folder` that have an answer, but are not
    finished. Return no message if there are none. Lines that cannot be read are ignored, because
    the next server refuses them.
    """
    path = folder / JOURNAL_NAME
    answered, ended = set[Key](), set[Key]()
    for _, line in read_lines(path) if path.is_file() else ():
        with suppress(ValueError, LookupError, TypeError):
            data = orjson.loads(line)
            if data["kind"] in ("chat", "text", "end"):
                (ended if data["kind"] == "end" else answered).add((data["s"], data["k"]))
    if answered - ended:  # a kill may have come between the episode and the end
        episodes = read_episodes(folder, on_bad_line=lambda message: None)
        ended |= {(episode.task_id, episode.sample) for episode in episodes if episode.env == ENV}
    how = f"DELETE /sessions/ID at its server, toolroll serve --out {folder}; Ctrl-C there ends all"
    count = len(answered - ended)
    unfinished = "1 unfinished session" if count == 1 else f"{count} unfinished sessions"
    return [f"left out: {unfinished}. To finish one: {how}"] if count else []


def _episode(live: LiveSession, env: str, sample: int, model: str) -> Episode | None:
    """Return the session `live` as an episode. Return None if the session has no answer.

    The reward is None unless the client gave one. The stop reason is `done`.
    """
    if not live.trace:
        return None
    session = {
        "id": live.id,
        "created": live.created,
        "forks": list(live.tree.forks),
        "ignored_fields": dict(live.ignored_fields),
        "fork_advice": fork_advice(live.tree.forks),
    }
    result = session_result(live, live.reward, StopReason.DONE, {"session": session, **live.info})
    return Episode(env, live.id, 0, sample, 0, result, model)


def session_result(
    live: LiveSession, reward: float | None, reason: StopReason, info: dict[str, Any]
) -> InteractionResult:
    """Return the session `live` as a result: all its sequences, and the conversation of its last
    chat completion.
    """
    last = live.tree.last_turn()
    return InteractionResult.of(
        live.session.trajectories(),
        messages=last.messages() if last is not None else [],
        stop_reason=reason,
        prompt="",
        reward=reward,
        info=info,
        metrics=_metrics(live),
        tools=list(last.tools) if last is not None else [],
    )


def _metrics(live: LiveSession) -> dict[str, float]:
    answers = [node.completion for node, _ in live.trace if node.completion is not None]
    trajectories = live.session.trajectories()
    texts = sum(kind == "text_completion" for _, kind in live.trace)
    counted: dict[str, Any] = {
        "turns": len(live.trace),
        "tool_calls": live.tree.tool_calls(),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "completion_tokens": sum(len(answer.output_ids) for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "trained_tokens": sum(part.trained_tokens for part in trajectories),
        "recomputed_tokens": recomputed_tokens(trajectories),
        "forks": len(live.tree.forks),
        "seconds": sum(answer.latency for answer in answers),
        **({"text_completions": texts} if texts else {}),
        **{f"token_mismatches/{kind}": count for kind, count in live.mismatches.items()},
    }
    return {name: float(value) for name, value in counted.items()}
