"""Chat templates: exact first prompts and exact deltas, for any Hugging Face chat template."""

from toolroll.rollout.template.chat_template import ChatTemplate, Delta

__all__ = ["ChatTemplate", "Delta"]
