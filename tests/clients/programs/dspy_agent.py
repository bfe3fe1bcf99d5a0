"""dspy's ReAct."""

import dspy
from common import DIALECT, KEY, TASK, URL, look, run


@run
async def main() -> object:
    kind = "responses" if DIALECT == "responses" else "chat"
    model = dspy.LM("openai/m", api_base=f"{URL}/v1", api_key=KEY, model_type=kind, cache=False)
    with dspy.context(lm=model):
        return (await dspy.ReAct("task -> answer", tools=[look]).acall(task=TASK)).answer
