"""SGLang's server and router as processes, on the CPU.

The server is the real one (0.5.23) with a tiny random model. `stubs/` replaces packages without a
CPU build: sgl_kernel, torchvision and triton (imports only; their kernels are never called). Its
command `forked_sglang` starts the server with a third of the CPU time.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from support.processes import (
    HOST,
    START_DEADLINE,
    Server,
    ServerFailed,
    free_ports,
    get_json,
    serving,
)
from support.tiny_model import CONTEXT_LENGTH, Dtype, tiny_model

STUBS = Path(__file__).with_name("stubs")
"""To be put on the PYTHONPATH of a process that imports sglang on a machine without a GPU."""


def sglang_environment(
    extra: Mapping[str, str] | None = None, *, packages: Path | None = None
) -> dict[str, str]:
    """The environment in which SGLang starts on a CPU, without a network. `packages`: a folder
    whose packages come before all others.
    """
    first = [str(packages)] if packages is not None else []
    path = [*first, str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # With more threads, a decode step waits at OpenMP's barriers for other work on those cores,
        # and takes ten times as long.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


@contextmanager
def sglang_server(
    log_folder: Path,
    *,
    dtype: Dtype = "float32",
    model: Path | None = None,
    flags: Sequence[str] = (),
    name: str = "sglang",
    packages: Path | None = None,
    torchvision: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server of the tiny model (or of `model`); open once /health, which samples a token,
    gives a 200. `packages`: a folder with another SGLang. `torchvision`: a folder with the real
    one, for a model that reads images. `environment`: further variables.
    """
    folder = tiny_model(dtype) if model is None else model
    module = "forked_sglang" if packages is None else "sglang.launch_server"

    def command(port: int) -> list[str]:
        # --max-total-tokens: else the KV cache takes all free memory. --sleep-on-idle: else an idle
        # server takes a whole core. --dtype: "auto" would serve float32 weights in half precision.
        return [
            sys.executable, "-m", module, "--device", "cpu", "--model-path", str(folder),
            "--dtype", dtype,
            "--host", HOST, "--port", str(port), "--context-length", str(CONTEXT_LENGTH),
            "--max-total-tokens", "20000",
            "--skip-server-warmup", "--sleep-on-idle", "--random-seed", "7", "--log-level", "info",
            *flags,
        ]  # fmt: skip

    log = log_folder / f"{name}.log"
    with serving(
        # 0.5.15's default is the port + 10,000, which may be above 65,535
        command, ready="/health", log=log, name=name,
        environment=sglang_environment(
            {
                "SGLANG_GRPC_PORT": str(free_ports(1)[0]),
                "TORCHDYNAMO_DISABLE": "1" if torchvision else "0",
                **(environment or {}),
            },
            packages=packages or torchvision,
        ),
    ) as server:  # fmt: skip
        yield server


Router = Literal["sglang-router", "smg"]
_MODULES: Mapping[Router, str] = {"sglang-router": "sglang_router", "smg": "smg"}
_FLAGS: Mapping[Router, Sequence[str]] = {
    # counts a client's own 400 as a worker's failure
    "sglang-router": ["--disable-circuit-breaker"],
    "smg": ["--enable-rl"],
}


@contextmanager
def router(
    urls: Sequence[str], log_folder: Path, *, kind: Router, name: str, flags: Sequence[str] = ()
) -> Iterator[Server]:
    """A router over the workers at `urls`; open once it has found all of them healthy.

    Policy `manual` is the only one of sglang-router 0.3.2 that keeps a session at its worker by the
    header x-smg-routing-key. smg has it too.
    """

    def command(port: int) -> list[str]:
        # the default is a fixed port on 0.0.0.0, and an error if it is taken
        metrics = free_ports(1)[0]
        return [
            sys.executable, "-m", f"{_MODULES[kind]}.launch_router", "--host", HOST, "--port",
            str(port),
            "--prometheus-host", HOST, "--prometheus-port", str(metrics), "--policy", "manual",
            "--assignment-mode", "min_group", "--worker-startup-check-interval", "1",
            *_FLAGS[kind], "--worker-urls", *urls, *flags,
        ]  # fmt: skip

    log = log_folder / f"{name}.log"
    with serving(
        command, ready="/readiness", environment=sglang_environment(), log=log, name=name
    ) as server:
        deadline = time.monotonic() + START_DEADLINE
        while (get_json(f"{server.url}/readiness")[1] or {}).get("healthy_workers") != len(urls):
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{name} did not find {len(urls)} healthy workers:\n{server.log_tail()}"
                )
            time.sleep(0.1)
        yield server
