"""`RolloutWorker`: the trainer's side of the process that plays the episodes."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from typing import Any

from toolroll.rollout.errors import RolloutError
from toolroll.trainers.trl.loop import Channels, Job, play

_STOP_WITHIN = 15.0
_KILL_AFTER = 5.0


class RolloutWorker:
    """TRL's `RolloutWorkerProtocol`. `start` plays `job` in a spawned process, from the group
    `first_group`.
    """

    def __init__(self, job: Job) -> None:
        self.first_group = 0
        self._job = job
        self._context = multiprocessing.get_context("spawn")
        self.rollout_buffer: Any = self._context.Queue()
        self.metrics_queue: Any = self._context.Queue()
        self._version: Any = self._context.Value("i", 0)
        self._progress: Any = self._context.Value("d", 0.0)
        self._process: Any = None
        self._link: Any = None

    def start(self) -> None:
        """Start the process. What it raises is raised by `check_health`."""
        self._link, theirs = self._context.Pipe()
        self._progress.value = time.time()
        channels = Channels(
            self.rollout_buffer, self.metrics_queue, self._version, self._progress, theirs
        )
        self._process = self._context.Process(
            target=play,
            args=(self._job, self.first_group, channels),
            name="toolroll-trl",
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process, and the episodes in flight with it."""
        if self._process is None:
            return
        with suppress(OSError):
            self._link.send("stop")
        self._process.join(_STOP_WITHIN)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(_KILL_AFTER)
        self._link.close()
        self._process = None

    def update_model_version(self, model_version: int) -> None:
        """Note the version of the weights that the engine has now."""
        self._version.value = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RolloutError` if the process failed or ended, or if no turn was sampled for
        `stale_after_s` seconds. TRL calls this while it waits for rows.
        """
        if self._process is None:
            raise RolloutError("the rollout process is not running")
        if self._link.poll():
            with suppress(EOFError):
                raise RolloutError(f"the rollout process failed: {self._link.recv()}")
        if not self._process.is_alive():
            raise RolloutError(
                f"the rollout process ended with exit status {self._process.exitcode}"
            )
        age = time.time() - self._progress.value
        if age > stale_after_s:
            raise RolloutError(
                f"no turn was sampled for {age:.0f} s (heartbeat_stale_after_s={stale_after_s:g}): "
                "the engine or the environment hangs"
            )
