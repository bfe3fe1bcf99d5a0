"""inspect-ai's ReAct agent as the solver of a task, with its model class of each dialect. Its tool
may show screenshots."""

from common import DIALECT, IMAGES, KEY, STREAM, SYSTEM, TASK, URL, Reported, look, run, screenshot
from inspect_ai import Task, eval_async
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.tool import Content, ContentImage, ContentText, ToolDef


async def look_tool(at: str) -> str | list[Content]:
    if not IMAGES:
        return look(at)
    return [ContentText(text=look(at)), ContentImage(image=screenshot(at))]


def model() -> Model:
    options = {"api_key": KEY, "streaming": STREAM}
    if DIALECT == "messages":
        config = GenerateConfig(max_tokens=1000)
        return get_model("anthropic/m", base_url=URL, config=config, **options)
    responses = DIALECT == "responses"
    return get_model("openai/m", base_url=f"{URL}/v1", responses_api=responses, **options)


@run
async def main() -> object:
    tool = ToolDef(look_tool, "look", "Look at something.", {"at": "What to look at."})
    task = Task(
        dataset=[Sample(input=TASK)], solver=react(prompt=SYSTEM, tools=[tool], submit=False)
    )
    [log] = await eval_async(task, model=model())
    [sample] = log.samples
    if sample.output.stop_reason != "stop":  # inspect-ai raises nothing
        raise Reported(f"stop reason {sample.output.stop_reason}")
    return sample.output.completion
