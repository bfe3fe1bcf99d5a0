"""`CARDS`: two cards with handwritten digits. `look` returns the image of a card, and `answer` ends
the episode: both digits right earn 1.0, all else earns 0.0.

The digits are scikit-learn's (1,797 images of 8 x 8 pixels). The splits share no image.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll import (
    Action,
    Environment,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
    ToolCall,
)
from toolroll.agents.environments.factory import Factory, openai_tool

ASK = "Which digits do cards 1 and 2 show?"
SPLITS = {"train": (range(1297), 6000), "held-out": (range(1297, 1797), 1000)}
"""The images of each split, and the number of its tasks."""
SCALE = 7
"""An image has 56 x 56 pixels, the least that SGLang leaves a Qwen2-VL: 4 tokens."""


def _tool(name: str, description: str, argument: str, schema: dict[str, Any]) -> Any:
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    return openai_tool(name, description, parameters)


TOOLS = (
    _tool("look", "Look at a card.", "card", {"type": "integer", "enum": [1, 2]}),
    _tool("answer", "Say the digits of both cards, such as 07.", "digits", {"type": "string"}),
)


@cache
def digits() -> npt.NDArray[np.uint8]:
    """Return the data set, one row for each image: 64 pixels from 0 to 16, and the digit."""
    return np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.uint8)


@cache
def image_url(sample: int) -> str:
    """Return an image of the data set as a data URL with a PNG file."""
    from PIL import Image

    pixels = np.minimum(digits()[sample, :64].reshape(8, 8) * 16, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.repeat(SCALE, 0).repeat(SCALE, 1)).convert("RGB").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Cards(Environment):
    """An episode with the two cards of a task."""

    blocking = False

    def reset(self, task: Task, seed: int) -> Observation:
        """Ask for the digits, which are in no text."""
        self._cards: list[int] = task.data["cards"]
        return Observation([{"role": "user", "content": ASK}], TOOLS)

    def step(self, action: Action) -> StepResult:
        """Show a card, or end with the answer or without one."""
        if not action.tool_calls:
            return StepResult(reward=0.0, done=True)
        messages = []
        for call in action.tool_calls:
            arguments = call.arguments or {}
            if call.name == "answer":
                right = arguments.get("digits") == _solution(self._cards)
                return StepResult(reward=float(right), done=True)
            card = arguments.get("card")
            content: Any = f"Error: {call.name} {card}: only look at card 1 or 2"
            if call.name == "look" and isinstance(card, int) and card in (1, 2):
                url = image_url(self._cards[card - 1])
                content = [{"type": "image_url", "image_url": {"url": url}}]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return StepResult(messages)


def _solution(cards: Sequence[int]) -> str:
    return "".join(str(digits()[sample, 64]) for sample in cards)


class CardsFactory(Factory):
    """The factory of the environment. A task is a pair of images, drawn from its index."""

    name = "cards"
    description = "Two cards with handwritten digits, which only their images show."
    splits: tuple[str, ...] = tuple(SPLITS)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks in order. Raise `UsageError` for an unknown split."""
        self.check_split(split)
        samples, count = SPLITS[split]
        draws = [random.Random(f"{split}/{at}").choices(samples, k=2) for at in range(count)]
        return [Task(f"{split}-{at}", at, split, {"cards": two}) for at, two in enumerate(draws)]

    def make(self, options: EnvironmentOptions) -> Cards:
        """Return a new environment. Raise `UsageError` for a setting."""
        self.check_settings(options.settings)
        return Cards()

    def reference(self, task: Task) -> Sequence[Action]:
        """Return the actions that earn 1.0."""
        solution = {"digits": _solution(task.data["cards"])}
        calls: list[tuple[str, dict[str, Any]]] = [
            *(("look", {"card": card}) for card in (1, 2)),
            ("answer", solution),
        ]
        return [Action("", (ToolCall(name, given, ""),)) for name, given in calls]


CARDS = CardsFactory()
