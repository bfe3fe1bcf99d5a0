"""The simulated user. Like the original, it calls its model when it is created."""

from typing import Any

from litellm import completion


class HumanUserSimulationEnv:
    def reset(self, instruction: str) -> str:
        return input(instruction)

    def step(self, content: str) -> str:
        return input(content)

    def get_total_cost(self) -> float:
        return 0.0


class LLMUserSimulationEnv:
    def __init__(self, model: str, provider: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self.model, self.provider, self.total_cost = model, provider, 0.0
        self.reset()

    def build_system_prompt(self, instruction: str | None) -> str:
        task = f" What you want: {instruction}." if instruction is not None else ""
        return f"You are a customer.{task} Say one line at a time, and ###STOP### when you have it."

    def reset(self, instruction: str | None = None) -> str:
        greeting = {"role": "user", "content": "Hi! How can I help you today?"}
        self.messages = [
            {"role": "system", "content": self.build_system_prompt(instruction)},
            greeting,
        ]
        return self._next()

    def step(self, content: str) -> str:
        self.messages.append({"role": "user", "content": content})
        return self._next()

    def get_total_cost(self) -> float:
        return self.total_cost

    def _next(self) -> str:
        answer: Any = completion(
            model=self.model, custom_llm_provider=self.provider, messages=self.messages
        )
        message = answer.choices[0].message
        self.messages.append({"role": "assistant", "content": message.content})
        self.total_cost += 0.5
        content: str = message.content
        return content


def load_user(user_strategy: str, model: str | None = "gpt-4o", provider: str | None = None) -> Any:
    if user_strategy == "human":
        return HumanUserSimulationEnv()
    if model is None or provider is None:
        raise ValueError("a model and a provider are needed")
    return LLMUserSimulationEnv(model, provider)
