"""A real SGLang server as a process."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

MODULE = "sglang.launch_server"
FLAGS = {
    # The trainer is on the same GPU. These backends need no CUDA compiler.
    "cuda": "--dtype bfloat16 --mem-fraction-static 0.4 --attention-backend triton "
    "--sampling-backend pytorch",
    "cpu": "--device cpu --dtype float32 --max-total-tokens 20000 --sleep-on-idle",
}


@dataclass(frozen=True)
class Server:
    """A server that has been started. It answers after `wait`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        """Wait until the server answers. Raise `RuntimeError` with the end of its log if it ends,
        or takes longer than 400 s.
        """
        end = time.monotonic() + 400
        while time.monotonic() < end and self.process.poll() is None:
            try:
                return self.ask("/health")
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"SGLang did not start ({self.log}):\n{self.log.read_text()[-3000:]}")

    def load(self, model: Path, version: str) -> None:
        """Let the server load the weights in the folder `model`."""
        self.ask("/update_weights_from_disk", model_path=str(model), weight_version=version)

    def ask(self, path: str, **body: Any) -> None:
        """Send a request. Raise `OSError` if there is no answer, or if it is an error."""
        data = json.dumps(body).encode() if body else None
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        with build_opener(ProxyHandler({})).open(request) as answer:  # without a proxy
            answer.read()


@contextmanager
def sglang(model: Path, device: str, log: Path, flags: Sequence[str]) -> Iterator[Server]:
    """Start a server of the folder `model`, and end it. `flags` are added to its command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", MODULE, "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--context-length", "4096"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, *FLAGS[device].split(), *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            # If this process is killed, the kernel ends the server (Linux: PR_SET_PDEATHSIG).
            preexec_fn=partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL),
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        process.wait(60)
