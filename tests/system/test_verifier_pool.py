"""Sequences are verified in other processes: with the same verdicts, without the user's code, and
whatever happens to those processes."""

import asyncio
import contextlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.patience import PATIENCE
from support.source import ROOT
from support.verified import USER, talked, verified_sequence
from support.wire import until
from transformers import PreTrainedTokenizerFast
from unit.template.test_verify_mutations import changed_sequences

from toolroll.agents.trainable import one_call_a_turn
from toolroll.rollout.model import conversation
from toolroll.rollout.template import ChatTemplate, verifier_pool
from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.template.verifier_pool import VerifierPool
from toolroll.rollout.template.verifier_worker import (
    CONFIRMED,
    NOT_CONFIRMED,
    VerifierWorker,
    state_digest,
)
from toolroll.rollout.template.verify import Verifier


@pytest.fixture
async def served(tokenizer: Any) -> tuple[Verifier, ServedSequence]:
    """A correct sequence and its verifier."""
    return await verified_sequence(tokenizer)


@pytest.fixture
def other(tokenizer: Any) -> Any:
    """A tokenizer with one more token."""
    copied = pickle.loads(pickle.dumps(tokenizer))
    copied.add_tokens(["<|more|>"], special_tokens=True)
    return copied


async def started(verifier: Verifier, sequence: ServedSequence, **options: Any) -> VerifierPool:
    """A pool with a process that is ready."""
    pool = VerifierPool(after=1, **options)
    assert await pool.check(verifier, sequence) is None
    assert await asyncio.to_thread(pool.ready.wait, PATIENCE)
    return pool


async def ended(pool: VerifierPool) -> None:
    for process in list(pool.processes):
        process.popen.kill()
        await asyncio.to_thread(process.popen.wait)


@pytest.fixture
async def pool(served: tuple[Verifier, ServedSequence]) -> AsyncIterator[VerifierPool]:
    """A pool with a process that has verified a sequence."""
    pool = await started(*served)
    yield pool
    await ended(pool)


def counted(verifier: Verifier) -> Mock:
    """Count the checks of `verifier` in this process."""
    calls = Mock(wraps=verifier.check)
    verifier.check = calls  # type: ignore[method-assign]
    return calls


class UserTokenizer(PreTrainedTokenizerFast):
    """A class that only the user's code has."""


def changed(sequence: ServedSequence) -> list[ServedSequence]:
    said = replace(sequence, messages=[{**USER, "content": "Else"}, *sequence.messages[1:]])
    others = [other for _, other in changed_sequences(sequence)]
    return [*others, said, replace(sequence, tools=[])]


# --- verdicts -------------------------------------------------------------------------------------


async def test_the_process_gives_the_verdicts_of_the_verifier(served: Any, pool: Any) -> None:
    verifier, sequence = served
    sequences = [sequence, *changed(sequence)]
    jobs = [pool._submit(verifier, each) for each in sequences]
    answers = [await asyncio.wrap_future(job.answer) for job in jobs if job is not None]
    expected = [verifier.check(each) for each in sequences]
    assert answers == [kind is None for kind in expected]
    assert expected[0] is None and None not in expected[1:]
    calls = counted(verifier)
    assert await asyncio.gather(*(pool.check(verifier, each) for each in sequences)) == expected
    assert calls.call_count == len(sequences) - 1  # a difference is confirmed here


async def test_other_options_reach_the_process(pool: Any, tokenizer: Any, other: Any) -> None:
    for template in (
        ChatTemplate(other),
        ChatTemplate(tokenizer, kwargs={"enable_thinking": False}),
        ChatTemplate(tokenizer).variant(head_hook=one_call_a_turn),
    ):
        async with talked(template.tokenizer, template=template, verify="sample") as made:
            calls = counted(template.verifier)
            assert await pool.check(template.verifier, made._sequence()) is None
            assert calls.call_count == 0


async def test_a_process_has_a_limited_number_of_tokenizers(
    served: Any, pool: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_pool, "_MOST_TOKENIZERS", 1)
    template = ChatTemplate(other)
    async with talked(other, template=template, verify="sample") as made:
        for verifier, checks in ((template.verifier, 1), (served[0], 0)):
            calls = counted(verifier)
            assert await pool.check(verifier, made._sequence()) is None
            assert calls.call_count == checks


async def test_the_worker_takes_no_tokenizer_with_another_state(tokenizer: Any) -> None:
    digest, body = state_digest(tokenizer), pickle.dumps(tokenizer)
    other = pickle.loads(body)
    assert state_digest(other) == digest
    worker = VerifierWorker()
    assert worker.answer(digest, b"", b"") == NOT_CONFIRMED
    assert worker.answer(digest, None, body) == CONFIRMED
    for change in (
        lambda: other.add_tokens(["<|more|>"]),
        lambda: setattr(other, "chat_template", "{{ bos_token }}"),
        lambda: other.add_special_tokens({"bos_token": "<think>"}),
        lambda: other.backend_tokenizer.enable_truncation(5),
    ):
        before = state_digest(other)
        change()
        assert state_digest(other) != before
        assert worker.answer(digest, None, pickle.dumps(other)) == NOT_CONFIRMED
    other.__class__ = UserTokenizer
    assert worker.answer(state_digest(other), None, pickle.dumps(other)) == NOT_CONFIRMED


# --- what stays in threads ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["class", "attribute", "hook", "hook of no module"])
async def test_what_a_user_wrote_stays_in_threads(tokenizer: Any, caplog: Any, what: str) -> None:
    def shout(head: str) -> str:
        return head + "!"

    caplog.set_level(logging.INFO, verifier_pool.__name__)
    own = pickle.loads(pickle.dumps(tokenizer))
    if what == "class":
        own.__class__ = UserTokenizer
    elif what == "attribute":
        own.note = lambda: None
    elif what == "hook of no module":
        shout.__module__ = None  # type: ignore[assignment]
    template = ChatTemplate(own)
    if "hook" in what:
        template = template.variant(head_hook=shout)
    pool = VerifierPool(after=1)
    async with talked(own, template=template, verify="sample") as made:
        calls = counted(template.verifier)
        if "hook" not in what:
            pool._threads += 1
            pool._serve(template.verifier)  # what the thread does
        pool.ready.set()  # a process for another tokenizer
        for _ in range(2):
            assert await pool.check(template.verifier, made._sequence()) is None
    assert calls.call_count == 2 and pool._jobs.empty()
    [record] = caplog.records
    assert "verified in threads" in record.message


async def test_one_core_needs_no_process(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    pool = VerifierPool(after=1)
    monkeypatch.setattr(verifier_pool, "Thread", None)
    calls = counted(served[0])
    for _ in range(3):
        assert await pool.check(*served) is None
    assert calls.call_count == 3


# --- a process that dies or hangs -----------------------------------------------------------------


@pytest.mark.parametrize("at_work", [False, True])
async def test_a_killed_process_leaves_no_sequence_unchecked(
    served: Any, pool: Any, at_work: bool, caplog: pytest.LogCaptureFixture
) -> None:
    verifier, sequence = served
    pool.processes[0].popen.send_signal(signal.SIGSTOP)
    calls = counted(verifier)
    jobs = [asyncio.create_task(pool.check(verifier, sequence)) for _ in range(3 * at_work)]
    await asyncio.sleep(0)  # the tasks start
    await ended(pool)
    assert [await job for job in jobs] == [None] * len(jobs)
    assert await pool.check(verifier, changed(sequence)[0]) is not None
    assert calls.call_count == len(jobs) + 1

    await until(lambda: bool(caplog.records), "a warning about the process")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert await pool.check(verifier, sequence) is None
    assert await asyncio.to_thread(pool.ready.wait, PATIENCE)  # the next one
    assert await pool.check(verifier, sequence) is None
    assert calls.call_count == len(jobs) + 2


async def test_a_sequence_that_is_not_verified_in_time_is_not_trained(
    tokenizer: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "POOL", pool)
    [process] = pool.processes
    process.popen.send_signal(signal.SIGSTOP)
    process.channel.settimeout(0.01)
    async with talked(tokenizer, verify="sample") as made:
        await made.settle()
        [trajectory] = made.session.trajectories()
    assert {turn.excluded for turn in trajectory.turns} == {"verification: did not finish"}
    assert await asyncio.to_thread(process.popen.wait, PATIENCE) == -signal.SIGKILL


async def test_an_unread_tokenizer_costs_no_check(pool: Any, other: Any, monkeypatch: Any) -> None:
    template, send, [process] = ChatTemplate(other), pool._send, pool.processes

    def hang(process: Any, verifier: Verifier) -> bytes | None:
        process.popen.send_signal(signal.SIGSTOP)
        process.channel.settimeout(0.01)
        return send(process, verifier)

    monkeypatch.setattr(pool, "_send", hang)
    async with talked(other, template=template, verify="sample") as made:
        calls = counted(template.verifier)
        assert await pool.check(template.verifier, made._sequence()) is None
        assert calls.call_count == 1
    await asyncio.to_thread(process.popen.wait, PATIENCE)


async def test_a_refused_thread_starts_later(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: Any) -> None:
        raise RuntimeError("can't start new thread")

    pool = VerifierPool(after=1)
    with monkeypatch.context() as patch:
        patch.setattr(verifier_pool, "Thread", refused)
        assert await pool.check(*served) is None
    assert await pool.check(*served) is None
    assert await asyncio.to_thread(pool.ready.wait, PATIENCE)
    await ended(pool)


# --- many sequences at once -----------------------------------------------------------------------


@pytest.fixture
async def backlog(
    served: tuple[Verifier, ServedSequence], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[VerifierPool, list[asyncio.Task[str | None]]]]:
    """A pool of two processes, and the checks of five sequences. The first process hangs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    pool = await started(*served, backlog=2)
    pool.processes[0].popen.send_signal(signal.SIGSTOP)
    checks = [asyncio.create_task(pool.check(*served)) for _ in range(5)]
    await until(lambda: len(pool.processes) == 2, "a second process")
    yield pool, checks
    await ended(pool)


async def test_more_processes_verify_what_waits(served: Any, backlog: Any) -> None:
    """The second process takes all sequences but the one that the first has."""
    pool, checks = backlog
    calls = counted(served[0])
    await until(lambda: sum(check.done() for check in checks) == 4, "four verdicts")
    assert len(pool.processes) == 2  # no more than gain something
    pool.processes[0].popen.send_signal(signal.SIGCONT)
    assert await asyncio.gather(*checks) == [None] * 5
    assert calls.call_count == 0


async def test_a_process_that_dies_loses_only_its_sequence(served: Any, backlog: Any) -> None:
    pool, checks = backlog
    calls = counted(served[0])
    pool.processes[0].popen.kill()
    assert await asyncio.gather(*checks) == [None] * 5
    assert calls.call_count == 1 and pool.ready.is_set()
    assert await pool.check(*served) is None
    assert calls.call_count == 1


# --- other programs -------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, signal, sys
from support.verified import verified_sequence
from toolroll.rollout.template.verifier_pool import POOL
with open(os.environ["RAN"], "a") as file:
    file.write("once")
verifier, sequence = asyncio.run(verified_sequence())
check = verifier.check
async def verified(here):
    verifier.check = check if here else None
    return await POOL.check(verifier, sequence)
POOL.after = 1
POOL.reset()
assert asyncio.run(verified(True)) is None
POOL.ready.wait()
assert asyncio.run(verified(False)) is None
if os.environ.get("FORK") and not os.fork():
    assert asyncio.run(verified(True)) is None
    POOL = None
print(POOL and POOL.processes[0].popen.pid, flush=True)
if os.environ.get("PAUSE"):
    signal.pause()
"""


@contextmanager
def program(
    folder: Path, how: str = "plain.py", **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Run `PROGRAM` in a session of its own, as a file or from standard input ("-")."""
    file = folder / "plain.py"
    file.write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(folder)])
    own = {"PYTHONPATH": path, "RAN": str(folder / "ran")}
    with (
        file.open() as stdin,
        subprocess.Popen(
            [sys.executable, how],
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **own, **variables},
            start_new_session=True,
            # a job in the background may ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["plain.py", "-"])
def test_the_program_of_the_user_runs_once(tmp_path: Path, how: str) -> None:
    with program(tmp_path, how) as process:
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert (tmp_path / "ran").read_text() == "once"
    with pytest.raises(ProcessLookupError):
        os.kill(int(output), 0)


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, "fork"),
        (signal.SIGKILL, "fork"),
        (signal.SIGINT, "hang"),
    ],
)
def test_the_process_ends_with_the_program(tmp_path: Path, number: int, how: str) -> None:
    """A fork of the program lives on. A process that hangs is gone when the program is."""
    fork = how == "fork"
    with program(tmp_path, PAUSE="1", FORK="1" if fork else "") as process:
        assert process.stdout is not None
        lines = {process.stdout.readline() for _ in range(1 + fork)} - {"None\n"}
        [pid] = map(int, lines)
        watched = os.pidfd_open(pid)
        if how == "hang":
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(number)
        process.wait(PATIENCE)
        assert select.select([watched], [], [], 0 if how == "hang" else PATIENCE)[0]
        os.close(watched)
        if fork:
            os.killpg(process.pid, 0)
