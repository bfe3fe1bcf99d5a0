"""An asynchronous interface to tau-bench's own user simulators, which use litellm. Each call runs
in a thread.

Invariants: the event loop never waits for litellm. A failed call or an unfinished answer raises
`UserSimulatorError`, and never becomes a line of the user. A stop marker in the simulator's
reasoning does not end the episode. Calls that hang do not keep the process from exiting, and delay
other calls only if there are many of them (see `Threads`).

For a model behind an OpenAI-compatible endpoint, use `toolroll.agents.users`, which has retries and
a seed and needs no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

from toolroll.agents.environments.tau_bench.package import (
    INSTALL,
    import_litellm,
    import_module,
    installed,
    whole_completion,
)
from toolroll.agents.users import visible_text
from toolroll.rollout.environment import UserSimulator
from toolroll.rollout.errors import UsageError, UserSimulatorError, message_of
from toolroll.rollout.runtime.threads import BlockingRunner, Threads

STRATEGIES = ("llm", "verify", "reflection", "react")


class TauBenchUser(UserSimulator):
    """The user of one episode. `load()` creates tau-bench's object, whose constructor calls its
    model.
    """

    def __init__(self, load: Callable[[], Any], threads: BlockingRunner) -> None:
        self._load = load
        self._threads = threads
        self._user: Any = None
        self._metrics = {"user_calls": 0.0, "user_seconds": 0.0, "user_errors": 0.0}

    async def reset(self, instruction: str) -> str:
        """Return the user's first line."""
        self._user = await self._call(self._load)
        return await self._line(self._user.reset, instruction=instruction)

    async def step(self, content: str) -> str:
        """Return the user's reply to `content`."""
        if self._user is None:
            raise UsageError("step was called before reset(instruction) of the user simulator")
        return await self._line(self._user.step, content)

    async def _line(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        text = await self._call(function, *args, **kwargs)
        self._metrics["user_calls"] += 1
        line = visible_text(text) if isinstance(text, str) else ""
        if not line:
            self._metrics["user_errors"] += 1
            raise UserSimulatorError(
                f"tau-bench's user simulator returned a reply without visible text: {text!r:.200}"
            )
        return line

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return await self._threads.run_in_thread(
                partial(function, *args, **kwargs), what="tau-bench's user simulator"
            )
        except UsageError:
            raise
        except Exception as error:
            self._metrics["user_errors"] += 1
            raise UserSimulatorError(
                f"tau-bench's user simulator failed: {type(error).__name__}: "
                f"{message_of(error, 1500)}"
            ) from error
        finally:
            self._metrics["user_seconds"] += perf_counter() - start

    def metrics(self) -> Mapping[str, float]:
        """Return user_calls, user_seconds, user_errors, and user_cost if litellm knows the model's
        price.
        """
        cost = self._user.get_total_cost() if self._user is not None else None
        return {**self._metrics, **({"user_cost": float(cost)} if cost is not None else {})}


class TauBenchUsers:
    """Makes one `TauBenchUser` per episode. Up to `concurrency` model calls run at once.

    async with TauBenchUsers("gpt-4o", "openai") as users:
        options = EnvironmentOptions(user=users.make)
        env = load_environment("tau-bench/retail").make(options)
    """

    def __init__(
        self,
        model: str,
        provider: str,
        *,
        strategy: str = "llm",
        concurrency: int = 64,
        package: str = "tau_bench",
    ) -> None:
        if strategy not in STRATEGIES:
            raise UsageError(
                f"tau-bench's user strategies are {', '.join(STRATEGIES)}, not {strategy!r}"
            )
        if not installed(package, "retail"):
            raise UsageError(f"tau-bench is not installed: {INSTALL}")
        if concurrency < 1:
            raise UsageError(f"concurrency must be at least 1, not {concurrency}")
        users: Any = import_module(f"{package}.envs.user")
        users.completion = whole_completion  # tau-bench ignores the finish reason
        self._load = partial(
            users.load_user, user_strategy=strategy, model=model, provider=provider
        )
        self._threads = Threads(concurrency)

    async def __aenter__(self) -> TauBenchUsers:
        # Before the first episode, because the import takes seconds.
        await self._threads.run_in_thread(import_litellm)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Do nothing, because the threads do not outlive their calls."""

    def make(self, seed: int | None = None) -> TauBenchUser:
        """Return a new user. `seed` has no effect, because tau-bench's users take none."""
        return TauBenchUser(self._load, self._threads)


def tau_bench_users(**settings: Any) -> TauBenchUsers:
    """Return the user simulators of the entry point `tau-bench` in the group `toolroll.users`.

    `settings`: model, provider, strategy, concurrency.
    """
    try:
        return TauBenchUsers(**settings)
    except TypeError as error:
        raise UsageError(
            f"tau-bench's user simulators take model, provider, strategy, concurrency: {error}"
        ) from error
