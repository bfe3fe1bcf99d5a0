"""A parked episode holds no other back."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from toolroll.rollout.engine.admission import Admission, Load
from toolroll.rollout.engine.resume import PARKING, generate_resumed
from toolroll.rollout.types import Completion, GenerateRequest


class Engine:
    """An engine that aborts each first request of a session."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def generate(self, request: GenerateRequest, *, progress: Any = None) -> Completion:
        self.asked.append(request.session_id)
        again = self.asked.count(request.session_id) > 1
        return Completion(np.array([1], dtype=np.int32), None, "stop" if again else "abort")


class Parked:
    """Where all episodes wait until `go`."""

    def __init__(self, count: int) -> None:
        self._all = asyncio.Barrier(count)

    def stopped(self) -> bool:
        return True

    async def wait(self, request: GenerateRequest, turn: Completion) -> bool:
        async with asyncio.timeout(20):
            await self._all.wait()
        return True

    def sampled(self, request: GenerateRequest, turn: Completion) -> None:
        pass


async def test_episodes_that_do_not_fit_together_can_all_park() -> None:
    engine: Any = Engine()
    admission = Admission(engine)
    admission._load = Load(1000, 1e-6)  # one of them fits
    admission._answered = admission._asked = asyncio.get_running_loop().time()
    PARKING.set(Parked(3))

    async def play(number: int) -> Completion:
        ids = np.arange(600, dtype=np.int32) + number
        request = GenerateRequest(ids, {"max_new_tokens": 9}, str(number))
        whole = await admission.sample(
            request,
            lambda: generate_resumed(engine, request, max_resumes=0, parked=admission.parked),
        )
        admission.end(request.session_id)
        return whole

    made = await asyncio.gather(*map(play, range(3)))
    assert [whole.output_ids.tolist() for whole in made] == [[1, 1]] * 3
    assert admission.held == 0 and admission._own == 0
