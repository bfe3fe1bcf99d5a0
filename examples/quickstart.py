"""Play one task of `desk` against the embedded engine, and print the turns whose tokens are
trained.
"""

import asyncio

from toolroll import (
    EnvironmentOptions,
    Model,
    RolloutArgs,
    TrainableToolCallingAgent,
    load_environment,
)
from toolroll.testing import (
    EmbeddedEngine,
    load_embedded_tokenizer,
    play_references,
    reference_policy,
)


async def main() -> None:
    desk = load_environment("desk")
    task = desk.tasks("test")[0]
    # The engine has no weights: it replies with the reference solution.
    policy = reference_policy(play_references(desk, [task], samples=1))
    async with EmbeddedEngine(load_embedded_tokenizer(), policy) as engine:
        args = RolloutArgs(engine=engine.url, model="embedded")
        sampling = {"temperature": 1.0, "max_new_tokens": 512}
        async with Model.from_args(args) as model:
            agent = TrainableToolCallingAgent(model=model, sampling_params=sampling)
            env = desk.make(EnvironmentOptions())
            result = await agent.asolve(env, task=task, session_id=f"desk/{task.id}#0")
    [trajectory] = result.trajectories
    trained, tokens = trajectory.trained_tokens, len(trajectory)
    print(result.status.value, result.reward, f"{trained} of {tokens} tokens trained")
    for turn in trajectory.turns:
        ids = trajectory.input_ids[turn.start : turn.stop]
        print(turn.start, turn.stop, model.template.encoder.decode(ids))


if __name__ == "__main__":
    asyncio.run(main())
