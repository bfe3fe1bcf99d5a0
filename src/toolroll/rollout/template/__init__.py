"""Exact prompt ids for any Hugging Face chat template: the first prompt, and the ids that each turn
appends to it (the delta).
"""

from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.cursor import Cursor
from toolroll.rollout.template.transcript import tokenize_conversation

__all__ = [
    "ChatTemplate",
    "Cursor",
    "tokenize_conversation",
]
