"""`examples/learn_real` with short turns, with rewards that differ, and with a server that starts
faster: `python -m support.rehearsal`, with the command's options.

A model of two layers earns nothing, and groups with equal rewards are not trained on.
"""

from functools import partial

from examples.learn_desk import play as playing
from examples.learn_real import parts, server
from examples.learn_real.__main__ import main

from toolroll.environments.desk import Desk
from toolroll.rollout.environment import Action, Observation, StepResult, Task

MAX_NEW_TOKENS = 16


class DrawnDesk(Desk):
    """A desk whose reward depends only on the episode's seed."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self._drawn = float(seed % 2)
        return await super().reset(task, seed)

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        return StepResult(result.messages, self._drawn, result.done)

    async def truncated_reward(self) -> float:
        return self._drawn


if __name__ == "__main__":
    server.MODULE = "forked_sglang"
    playing.MAX_NEW_TOKENS = MAX_NEW_TOKENS
    play = partial(playing.play, make_desk=DrawnDesk)
    parts.__dict__.update(MAX_NEW_TOKENS=MAX_NEW_TOKENS, play=play)
    main()
