"""Aider's coder, which has no tools, through two messages."""

from __future__ import annotations

import os

from common import DIALECT, KEY, STREAM, TASK, URL, Reported, run

# read when the packages are imported
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AIDER_ANALYTICS": "false"}
if DIALECT == "messages":
    os.environ |= {"ANTHROPIC_API_BASE": URL, "ANTHROPIC_API_KEY": KEY}
else:
    os.environ |= {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY}

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model, model_info_manager


async def main() -> object:
    # otherwise Aider downloads a list of models
    model_info_manager._cache_loaded, model_info_manager.content = True, {"m": {}}
    model = Model("anthropic/m" if DIALECT == "messages" else "openai/m")
    io = InputOutput(pretty=False, yes=True)
    coder = Coder.create(main_model=model, io=io, use_git=False, stream=STREAM)
    for message in (TASK, "And now?"):
        answer = coder.run(message)
        if not answer:
            raise Reported("no answer")
    return answer


run(main)
