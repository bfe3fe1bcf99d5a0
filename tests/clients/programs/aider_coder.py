"""Aider's coder, which has no tools, through two messages."""

import os

from common import BASE, KEY, LITELLM, MAKER, STREAM, TASK, Reported, run

# read when the packages are imported
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AIDER_ANALYTICS": "false"}
os.environ |= {f"{MAKER.upper()}_API_BASE": BASE, f"{MAKER.upper()}_API_KEY": KEY}

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model, model_info_manager


@run
async def main() -> object:
    # otherwise Aider downloads a list of models
    model_info_manager._cache_loaded, model_info_manager.content = True, {"m": {}}
    model = Model(LITELLM)
    io = InputOutput(pretty=False, yes=True)
    coder = Coder.create(main_model=model, io=io, use_git=False, stream=STREAM)
    for message in (TASK, "And now?"):
        answer = coder.run(message)
        if not answer:
            raise Reported("no answer")
    return answer
