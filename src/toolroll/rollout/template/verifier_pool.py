"""`VerifierPool`: verifies sequences in other processes, so that the event loop has the GIL.

Invariants:

- Every sequence gets the verdict of `Verifier.check`. A process only confirms sequences. A sequence
  that it does not confirm is verified again in a thread of this process: because it is wrong,
  because the process cannot read it, or because the process died.
- A sequence for which a process needs more than the time limit counts as wrong.
- No process is used for a tokenizer that cannot be pickled, or whose state has a different digest
  there.
- The processes never run the user's code, and end when this process ends for any reason.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import pickle
import socket
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread, main_thread
from types import FunctionType
from typing import NamedTuple
from weakref import WeakKeyDictionary

from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.template.verifier_worker import CONFIRMED, state_digest
from toolroll.rollout.template.verify import Verifier

logger = logging.getLogger(__name__)

DID_NOT_FINISH = "did not finish"

_AFTER = 32
_BACKLOG = 64
"""Sequences that wait for each process, about a second of work, before the next one is started."""
_MOST = 4
_MOST_TOKENIZERS = 4
_LIMIT = 120.0
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # that PyTorch is missing, in the midst of a bar
}
_PROGRAM = """\
import sys
sys.path = sys.argv[1:]
from toolroll.rollout.template.verifier_worker import main
main()
"""
"""Not an executor of `concurrent.futures`: it imports the user's main module again, does not say
which sequence a process had when it died, and waits for a process that hangs at exit.
"""


class _Job(NamedTuple):
    """A sequence to verify. `answer` is True if it is correct, False if a thread must verify it,
    and None if the process did not finish.
    """

    verifier: Verifier
    options: bytes
    sequence: bytes
    answer: Future[bool | None]


class _Process:
    """A process that verifies sequences. `limit`: the time limit in seconds for each answer.
    `known`: the digests of the tokenizers that it has.
    """

    def __init__(self, limit: float) -> None:
        self.known = set[bytes]()
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(limit)
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *sys.path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # so that Ctrl-C does not interrupt it
            )
        atexit.register(self.end)

    def end(self) -> None:
        """Kill the process."""
        atexit.unregister(self.end)
        self.popen.kill()
        self.popen.wait()

    def confirms(self, *request: bytes | None) -> bool:
        """Return the answer. Raise `EOFError` or `OSError` if the process died, and `TimeoutError`
        after the time limit.
        """
        self.channel.sendall(pickle.dumps(request))
        answer = self.channel.recv(1)
        if not answer:
            raise EOFError("it was killed")
        return answer == CONFIRMED


class VerifierPool:
    """The first process is started in the background after `after` sequences, so that short runs
    need none. It keeps up with an event loop. If many episodes end at once, `backlog` sequences
    wait for each process, and the next one is started, if a core is left for it. If all have died,
    the next one is started as the first was.

    `limit`: the time limit in seconds for one sequence. Thread-safe.
    """

    def __init__(
        self, *, after: int = _AFTER, backlog: int = _BACKLOG, limit: float = _LIMIT
    ) -> None:
        self.after, self._backlog, self._limit = after, backlog, limit
        self._digests: WeakKeyDictionary[Verifier, bytes | None] = WeakKeyDictionary()
        """Of the tokenizers' state. None if no process can use the tokenizer."""
        self._has_explained = False
        self.processes: list[_Process] = []
        self.reset()

    def reset(self) -> None:
        """Forget the processes. Call this in a fork, which has neither the threads nor their
        locks.
        """
        self._lock = Lock()
        self._left = self.after
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads = 0
        self.ready = Event()
        """A process was ready, and not all have ended since."""
        for process in self.processes:
            process.channel.close()
        self.processes = []

    async def check(self, verifier: Verifier, sequence: ServedSequence) -> str | None:
        """Return the verdict of `verifier.check(sequence)`, or `DID_NOT_FINISH`."""
        # A process has no processor for images.
        job = None if sequence.images else self._submit(verifier, sequence)
        if job is not None:
            is_correct = await asyncio.wrap_future(job.answer)
            if is_correct is not False:
                return None if is_correct else DID_NOT_FINISH
        return await asyncio.to_thread(verifier.check, sequence)

    def _submit(self, verifier: Verifier, sequence: ServedSequence) -> _Job | None:
        if not self._can_take(verifier):
            return None
        with self._lock:
            if not self.ready.is_set():
                self._left -= 1
                if self._left <= 0 and not self._threads:
                    self._start(verifier)
                return None
            try:
                options = pickle.dumps(verifier.options)
                body = pickle.dumps(_with_own_record(sequence), pickle.HIGHEST_PROTOCOL)
            except Exception:  # noqa: BLE001 - for example, a message with an unusual object
                return None
            job = _Job(verifier, options, body, Future())
            self._jobs.put(job)
            if self._jobs.qsize() > self._backlog * self._threads:
                self._start(verifier)
            return job

    def _start(self, verifier: Verifier) -> None:
        """Start a process, unless there are as many as gain something."""
        if self._threads >= _most_processes():
            return
        serve = partial(self._serve, verifier)
        try:
            Thread(target=serve, name="toolroll-verifier", daemon=True).start()
        except (RuntimeError, MemoryError):  # too many threads, for now
            return
        self._threads += 1

    def _can_take(self, verifier: Verifier) -> bool:
        hook = verifier.head_hook
        is_ours = isinstance(hook, FunctionType) and (hook.__module__ or "").startswith("toolroll.")
        if callable(verifier.options["chat_template"]) or not (hook is None or is_ours):
            self._explain("a hook or other code renders prompts")
            return False
        return self._digests.get(verifier, b"") is not None

    # --- in the thread of a process ---------------------------------------------------------------

    def _serve(self, verifier: Verifier) -> None:
        try:
            process = _Process(self._limit)
            self.processes.append(process)
            try:
                if self._send(process, verifier) is not None:
                    self.ready.set()
                    while True:
                        self._answer(process, self._jobs.get())
            finally:
                self.processes.remove(process)
                process.end()
                process.channel.close()
        except Exception as error:  # noqa: BLE001 - threads do its work
            if main_thread().is_alive():  # otherwise the interpreter exits, and killed the process
                note = "another one, or this process, verifies its sequences"
                if isinstance(error, TimeoutError):
                    note = "the check of a sequence did not finish, so its episode is not trained"
                logger.warning("a process that verifies sequences has ended (%r): %s", error, note)
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self.ready.clear()
                    self._left = self.after
                    while not self._jobs.empty():
                        answer = self._jobs.get().answer
                        if answer.set_running_or_notify_cancel():
                            answer.set_result(False)

    def _answer(self, process: _Process, job: _Job) -> None:
        if not job.answer.set_running_or_notify_cancel():
            return
        try:
            digest = self._send(process, job.verifier)
            is_correct = digest and process.confirms(digest, job.options, job.sequence)
        except BaseException as error:
            job.answer.set_result(None if isinstance(error, TimeoutError) else False)
            raise
        job.answer.set_result(bool(is_correct))

    def _send(self, process: _Process, verifier: Verifier) -> bytes | None:
        """Send the tokenizer, unless the process has it. Return the digest of its state, or None if
        the process cannot use it. Raise `EOFError` or `OSError` if the process died, and `EOFError`
        after the time limit.
        """
        try:
            if verifier not in self._digests:
                self._digests[verifier] = state_digest(verifier.tokenizer)
            digest = self._digests[verifier]
            if digest is None or digest in process.known:
                return digest
            body = pickle.dumps(verifier.tokenizer)
        except Exception as error:  # noqa: BLE001 - any error of the tokenizer
            self._explain(f"the tokenizer cannot be pickled ({error!r})")
        else:
            if len(process.known) == _MOST_TOKENIZERS:
                return None
            try:
                if process.confirms(digest, None, body):
                    process.known.add(digest)
                    return digest
            except TimeoutError as error:  # the sequence that waits for it may be correct
                raise EOFError("it did not read the tokenizer in time") from error
            self._explain("the tokenizer has a class of your own, or changes when it is pickled")
        self._digests[verifier] = None
        return None

    def _explain(self, reason: str) -> None:
        if not self._has_explained:
            self._has_explained = True
            logger.info("sequences are verified in threads, which is slower: %s", reason)


def _with_own_record(sequence: ServedSequence) -> ServedSequence:
    """Return the sequence with a record of its own answers only: a session may have thousands."""
    if sequence.record is None:
        return sequence
    ids = sequence.input_ids[sequence.dropped :]
    return replace(sequence, record=sequence.record.part(ids, sequence.sampled_spans()))


def _most_processes() -> int:
    """Return 0 on one core, where a process would gain nothing, and if `sys.executable` is the
    user's program.
    """
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    if os.name != "posix" or getattr(sys, "frozen", False):
        return 0
    return min(len(cores) - 1, _MOST)


POOL = VerifierPool()
"""The processes for all event loops of this process."""
if sys.platform != "win32":
    os.register_at_fork(after_in_child=POOL.reset)
