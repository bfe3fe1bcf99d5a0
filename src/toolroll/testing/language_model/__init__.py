"""A small Llama network in numpy, for the embedded engine."""

from toolroll.testing.language_model.model import LanguageModel
from toolroll.testing.language_model.weights import ModelFolderError

__all__ = ["LanguageModel", "ModelFolderError"]
