"""A small Llama network in numpy, for the embedded engine."""

from toolroll.rollout.testing.language_model.config import ModelFolderError
from toolroll.rollout.testing.language_model.model import LanguageModel

__all__ = ["LanguageModel", "ModelFolderError"]
