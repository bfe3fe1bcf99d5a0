"""One episode of the desk against the embedded engine: what comes back is what was served and
sampled, token for token.
"""

import asyncio

from toolroll import Model, RolloutArgs, TrainableToolCallingAgent, load_environment
from toolroll.rollout.testing import (
    EmbeddedEngine,
    load_embedded_tokenizer,
    play_references,
    reference_policy,
)
from toolroll.rollout.types import EnvironmentOptions


async def main() -> None:
    desk = load_environment("desk")
    task = desk.tasks("test")[0]
    # no weights here: the engine says the reference solution
    policy = reference_policy(play_references(desk, [task], samples=1))
    async with EmbeddedEngine(load_embedded_tokenizer(), policy) as engine:
        args = RolloutArgs(
            engine_url=engine.url, hf_checkpoint="embedded", tool_call_parser="hermes"
        )
        async with Model.from_args(args) as served:
            agent = TrainableToolCallingAgent(
                served=served, sampling_params={"max_new_tokens": 256}
            )
            result = await agent.asolve(
                desk.make(EnvironmentOptions()), task=task, session_id=f"desk/{task.id}#0"
            )
    [trajectory] = result.trajectories
    print(
        result.status.value,
        result.reward,
        f"{len(trajectory)} tokens, {trajectory.trained_tokens} of them trained",
    )
    for turn in trajectory.turns:
        print(
            turn.start,
            turn.stop,
            served.template.encoder.decode(trajectory.input_ids[turn.start : turn.stop]),
        )


if __name__ == "__main__":
    asyncio.run(main())
