"""instructor: an answer of a given type. The first reply is not of this type, so instructor repeats
the request with the error."""

from typing import Any

import instructor
from common import DIALECT, KEY, SYSTEM, TASK, URL, run
from pydantic import BaseModel


class Seen(BaseModel):
    """What was seen."""

    count: int


def client() -> Any:
    if DIALECT == "messages":
        from anthropic import AsyncAnthropic

        return instructor.from_anthropic(AsyncAnthropic(base_url=URL, api_key=KEY))
    from openai import AsyncOpenAI

    mode = instructor.Mode.RESPONSES_TOOLS if DIALECT == "responses" else instructor.Mode.TOOLS
    return instructor.from_openai(AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)


@run
async def main() -> object:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    more = {"max_tokens": 1000} if DIALECT == "messages" else {}
    return await client().create(model="m", messages=messages, response_model=Seen, **more)
