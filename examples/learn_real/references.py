"""Reference episodes as training sequences: the replies of `learn_desk`'s teacher, and what the
desk answers.
"""

from __future__ import annotations

import numpy as np
from examples.learn_desk import teacher
from examples.learn_desk.batches import Sample
from examples.learn_desk.play import OPTIONS

from toolroll import ChatTemplate, Task, tokenize_conversation
from toolroll.environments.desk import DESK, reference


async def reference_sample(template: ChatTemplate, task: Task) -> Sample:
    """Play the teacher's replies. Return the conversation's tokens, with mask 1 on the replies.

    Raise `AssertionError` if the episode does not earn 1.0, or if the template does not show a
    reply as it is.
    """
    desk = DESK.make(OPTIONS)
    start = await desk.reset(task, 0)
    messages = list(start.messages)
    reward = None
    for action, text in zip(reference(task), teacher.replies(task), strict=True):
        calls = [{"name": one.name, "arguments": one.arguments} for one in action.tool_calls]
        reply = {
            "role": "assistant",
            "content": action.content,
            "reasoning_content": text.rpartition("</think>")[0].removeprefix("<think>"),
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
        result = await desk.step(action)
        messages += [reply, *result.messages]
        reward = result.reward
    await desk.close()
    found = tokenize_conversation(template, messages, start.tools)
    assert reward == 1.0, task.id
    assert not any(turn.excluded for turn in found.turns), task.id
    return Sample(found.input_ids, found.loss_mask, np.zeros(len(found.input_ids), np.float32))
