"""A small Llama network in numpy, for the embedded engine."""

from toolroll.rollout.testing.language_model.model import LanguageModel
from toolroll.rollout.testing.language_model.weights import ModelFolderError

__all__ = ["LanguageModel", "ModelFolderError"]
