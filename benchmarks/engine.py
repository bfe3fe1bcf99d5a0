"""A real SGLang server, on a GPU for example: turns per second compared with the tight loop, and
the recorded log-probabilities compared with those of one prefill of each finished sequence.

    python -m benchmarks.engine http://127.0.0.1:30000 --model Qwen/Qwen3-8B --episodes 512

The template must be one of Qwen's, which the tight loop knows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np

from benchmarks import tight
from benchmarks.conversations import workload
from benchmarks.loop import OURS, TIGHT, UNVERIFIED
from benchmarks.tables import Table, number
from benchmarks.world import Material, RecordedFactory, RecordedWorld, material
from toolroll.agents.tool_calling import make_agent
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.environment import EnvironmentOptions
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.tokenizers import load_tokenizer
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Status, Trajectory

TURNS = 12
AGENT = {"parallel_calls": "first", "on_length": "continue", "on_invalid_call": "respond"}


@dataclass(frozen=True)
class Load:
    """A load: concurrent episodes, the duration of the warm-up, in which they start one after
    another, and of the measurement, in seconds; the tokens of a turn.
    """

    episodes: int
    warmup: float
    seconds: float
    tokens: int

    @property
    def params(self) -> dict[str, Any]:
        """The sampling parameters."""
        return {"temperature": 1.0, "max_new_tokens": self.tokens}


class CountingFactory(RecordedFactory):
    """A factory whose environments count their steps."""

    def __init__(self, given: Material, load: Load) -> None:
        super().__init__(given, episodes=load.episodes, spread_seconds=load.warmup)
        self.steps = 0

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """Return a new environment."""
        made = RecordedWorld(self._given, turns=TURNS, start_seconds=next(self._starts, 0.0))
        step = made.step

        async def counted(action: Any) -> Any:
            self.steps += 1
            return await step(action)

        made.step = counted  # type: ignore[method-assign]
        return made


@dataclass
class Bench:
    """The engine at `url`, and what is played on it. Finished sequences are kept in `kept`."""

    url: str
    template: ChatTemplate
    given: Material
    kept: list[Trajectory]

    async def throughput(self, loop: str, load: Load) -> list[str]:
        """Play `load`, and return the cells of its row."""
        async with aiohttp.ClientSession() as http:
            await self._flush(http)
        factory = CountingFactory(self.given, load)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(paced_garbage())
            if loop == TIGHT:
                tasks = itertools.cycle(factory.tasks("test"))
                tok = self.template.tokenizer
                playing = tight.run(
                    self.url, tok, factory, tasks, load.episodes, params=load.params
                )
            else:
                model = await stack.enter_async_context(self._model())
                playing = self._runner(model, factory, loop, load).run(
                    factory.tasks("test"), self._done
                )
            running = asyncio.ensure_future(playing)
            await asyncio.wait([running], timeout=load.warmup)
            steps, cpu, began = factory.steps, time.process_time(), time.perf_counter()
            await asyncio.wait([running], timeout=load.seconds)
            while factory.steps == steps and not running.done():  # a slow engine
                await asyncio.wait([running], timeout=load.seconds)
            steps, cpu = factory.steps - steps, time.process_time() - cpu
            rate = steps / (time.perf_counter() - began)
            if running.done():
                raise RuntimeError("the run has ended too soon") from running.exception()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                await running
        return [loop, number(rate), number(cpu / steps * 1e6)]

    def _model(self) -> Model:
        config = EngineConfig(engine=self.url, vocab_size=len(self.template.tokenizer))
        parser = get_parser("hermes", self.template.encoder.control)
        return Model(Engine(config), self.template, parser)

    def _runner(self, model: Model, factory: RecordedFactory, loop: str, load: Load) -> Runner:
        verify = "off" if loop == UNVERIFIED else "sample"
        settings = RunSettings(
            sampling_params=load.params, concurrency=load.episodes, max_turns=TURNS, samples=1000
        )
        return Runner(factory, lambda: make_agent(model, {"verify": verify, **AGENT}), settings)

    def _done(self, episode: Any) -> None:
        assert episode.result.status is not Status.ABORTED, episode.result.info
        self.kept += episode.result.trajectories

    async def exactness(self, sequences: int) -> Table:
        """Compare the log-probabilities of the last `sequences` that ended."""
        if not self.kept:
            raise RuntimeError("no episode has ended: measure more seconds, or fewer tokens a turn")
        pairs, off, cached, turns = [], [], 0, 0
        for trajectory in self.kept[-sequences:]:
            ids = trajectory.input_ids.tolist()
            again = np.array(await self._prefill(ids))
            trained = np.flatnonzero(trajectory.loss_mask)
            pairs.append(np.abs(again[trained] - trajectory.logprobs[trained]))
            shifted = trained[trained + 1 < len(ids)]
            off.append(np.abs(again[shifted + 1] - trajectory.logprobs[shifted]))
            for earlier, later in pairwise(trajectory.turns):
                turns += 1
                cached += later.cached_tokens >= earlier.stop - 1
        head = "sequences,trained tokens,mean difference,99 %,largest,mean if one token off"
        table = Table("Recorded log-probabilities, and those of one prefill", head.split(","))
        differences = np.concatenate(pairs)
        amounts = (differences.mean(), np.quantile(differences, 0.99), differences.max())
        cells = [number(float(amount)) for amount in (*amounts, np.concatenate(off).mean())]
        table.rows.append([str(len(pairs)), f"{len(differences):,}", *cells])
        table.notes.append(f"Turns whose whole history was in the cache: {cached} of {turns}.")
        table.figures = {"mean": amounts[0], "off": np.concatenate(off).mean()}
        return table

    async def _prefill(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token, NaN for the first."""
        params = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}/generate", json={**body, "logprob_start_len": 0}) as response,
        ):
            response.raise_for_status()
            answer = await response.json()
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == ids
        return [float("nan"), *(entry[0] for entry in entries[1:])]

    async def _flush(self, http: aiohttp.ClientSession) -> None:
        """Empty the prefix cache. The engine refuses while it works on requests."""
        while True:
            async with http.post(f"{self.url}/flush_cache") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.2)


async def run(bench: Bench, load: Load, sequences: int = 48) -> list[Table]:
    """Measure and tabulate."""
    head = ["loop", "turns/s", "us of CPU per turn in the loop's process"]
    table = Table(f"Turns per second, {load.episodes:,} episodes at once", head)
    warm = replace(load, episodes=min(40, load.episodes))
    await bench.throughput(OURS, warm)  # starts the verifier's process, and fills caches
    for loop in (TIGHT, OURS, UNVERIFIED):
        table.rows.append(await bench.throughput(loop, load))
    return [table, await bench.exactness(sequences)]


def main() -> None:
    """Measure the engine that the command line names."""
    reader = argparse.ArgumentParser(prog="python -m benchmarks.engine")
    reader.add_argument("url")
    reader.add_argument("--model", required=True, help="folder or name of the tokenizer")
    reader.add_argument("--episodes", type=int, default=512)
    reader.add_argument("--tokens", type=int, default=64, help="of each turn, at most")
    reader.add_argument("--seconds", type=float, default=20.0, help="of each row")
    asked = reader.parse_args()
    template = ChatTemplate(load_tokenizer(asked.model))
    bench = Bench(asked.url, template, material(workload()), [])
    load = Load(asked.episodes, asked.seconds, asked.seconds, asked.tokens)
    for table in asyncio.run(run(bench, load)):
        print(table.text())


if __name__ == "__main__":
    main()
