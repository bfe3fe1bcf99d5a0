"""One episode of the desk against the embedded engine: what comes back is what was served and sampled, token for token."""

import asyncio

from toolroll import RolloutArgs, ServedModel, TrainableToolCallingAgent, load_environment
from toolroll.rollout.testing import EmbeddedEngine, load_embedded_tokenizer, play_references, reference_policy
from toolroll.rollout.types import EnvironmentOptions


async def main() -> None:
    desk = load_environment("desk")
    task = desk.tasks("test")[0]
    lines = play_references(desk, [task], samples=1)  # no weights here: the engine says the reference solution
    async with EmbeddedEngine(load_embedded_tokenizer(), reference_policy(lines)) as engine:
        args = RolloutArgs(engine_url=engine.url, hf_checkpoint="embedded", tool_call_parser="hermes")
        async with ServedModel.from_args(args) as served:
            agent = TrainableToolCallingAgent(served=served, sampling_params={"max_new_tokens": 256})
            session = f"desk/{task.id}#0"
            result = await agent.asolve(desk.make(EnvironmentOptions()), task=task, session_id=session)
    [trajectory] = result.trajectories
    print(result.status, result.stop_reason, "reward", result.reward)
    print(len(trajectory), "tokens,", trajectory.trained_tokens, "of them trained, in", len(trajectory.turns), "turns")
    last = trajectory.turns[-1]
    print("last turn:", served.template.encoder.decode(trajectory.input_ids[last.start : last.stop]))


if __name__ == "__main__":
    asyncio.run(main())
