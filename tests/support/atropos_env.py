"""An Atropos environment as its authors write them, with one import changed."""

from typing import Any

from toolroll.testing import embedded_tokenizer_path
from toolroll.trainers.atropos import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class CountingEnv(BaseEnv):
    """Asks for two letters."""

    name = "counting"
    env_config_cls = BaseEnvConfig

    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]:
        name = str(embedded_tokenizer_path())
        config = BaseEnvConfig(
            tokenizer_name=name, group_size=4, max_token_length=64, use_wandb=False
        )
        return config, [APIServerConfig(model_name=name, base_url="http://localhost:9001/v1")]

    async def setup(self) -> None:
        self.items = [{"question": "Write two letters o.", "answer": "oo"}]
        self.iter = 0

    async def get_next_item(self) -> dict[str, str]:
        item = self.items[self.iter % len(self.items)]
        self.iter += 1
        return item

    async def collect_trajectories(self, item: dict[str, str]) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completions = await managed.chat_completion(
                messages=[
                    {"role": "system", "content": "Use <answer> tags."},
                    {"role": "user", "content": item["question"]},
                ],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
                split="train",
            )
            nodes = managed.get_state()["nodes"]
        scores = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(completions.choices, nodes, strict=True):
            right = choice.message.content == f"<answer>{item['answer']}</answer>"
            scores["tokens"].append(node.tokens)
            scores["masks"].append(node.masked_tokens)
            scores["inference_logprobs"].append(node.logprobs)
            scores["scores"].append(float(right))
        return (scores if len(set(scores["scores"])) > 1 else None), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> float:
        right = 0
        for item in self.items:
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                completion = await managed.completion(
                    prompt=item["question"], n=2, max_tokens=64, temperature=0.0, split="eval"
                )
                right += any("oo" in choice.text for choice in completion.choices)
        return right / len(self.items)
