"""OpenRLHF's own rollout actor loads and plays the agent executor."""

from pathlib import Path

from support.bare import run_apart

_ACTOR = """
import asyncio

absent("vllm")  # needs CUDA; the actor makes its engine
bare("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray", "openrlhf.utils")
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import AgentExecutorBase
from support.vllm_mirror import AsyncLLM, LlmEngine, asked_params
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer

vllm_engine.TokensPrompt = dict  # a typed dictionary
vllm_engine.random_uuid = iter("abcdefgh").__next__


async def main():
    tokenizer = load_embedded_tokenizer()
    say = lambda request: "Bye." if "I look." in request.text else "I look."
    async with EmbeddedEngine(tokenizer, say) as engine:
        kind = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
        actor = kind.__new__(kind)
        actor.executor = vllm_engine._load_agent_executor(FILE)
        assert isinstance(actor.executor, AgentExecutorBase)
        assert not isinstance({}, AgentExecutorBase)
        actor.llm, actor._mm_pad_token_ids = AsyncLLM(LlmEngine(engine.url)), None
        played = await actor.generate_responses("Hi", "L", asked_params(), 2048, tokenizer, 2)
        served = [(it.input_ids.tolist(), it.output_ids, it.logprobs) for it in engine.log]
    assert len(played) == 2 and len(served) == 4
    for one in played:
        assert one["reward"] == 0.5 and len(one["action_ranges"]) == 2
        for start, stop in one["action_ranges"]:
            tokens = one["observation_tokens"]
            found = (tokens[:start], tokens[start:stop], one["rollout_log_probs"][start:stop])
            assert found in served
            served.remove(found)


asyncio.run(main())
"""

_AGENT = """
from toolroll.trainers import openrlhf


class AgentExecutor(openrlhf.AgentExecutor):
    async def run_agent(self, prompt, label, session_id):
        messages = [{"role": "user", "content": prompt}]
        for _ in range(2):
            answer = await self.client.chat.completions.create(
                model=self.model_name, messages=messages
            )
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, messages[0]]
        return 0.5
"""


def test_openrlhf_s_actor_plays_the_agent_of_a_file(tmp_path: Path) -> None:
    """As it loads the file of `--train.agent_func_path`; the actor's methods call vLLM's engine."""
    file = tmp_path / "agent.py"
    file.write_text(_AGENT)
    run_apart(f"FILE = {str(file)!r}\n{_ACTOR}")
