"""Exact prompt ids for any Hugging Face chat template: the first prompt, and the ids that each turn
appends to it (the delta). `certify` reports how a template behaves.
"""

from toolroll.rollout.template.certify import TemplateReport, certify
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.cursor import Cursor
from toolroll.rollout.template.transcript import tokenize_conversation

__all__ = [
    "ChatTemplate",
    "Cursor",
    "TemplateReport",
    "certify",
    "tokenize_conversation",
]
