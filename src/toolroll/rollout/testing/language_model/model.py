"""`LanguageModel`: a small Llama network, loaded from a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolroll.rollout.testing.language_model.config import LlamaConfig, ModelFolderError
from toolroll.rollout.testing.language_model.network import Network
from toolroll.rollout.testing.language_model.weights import Weights


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A network that the embedded engine can sample from (`load_engine`). It needs numpy, not
    torch.
    """

    folder: Path
    network: Network

    @property
    def config(self) -> LlamaConfig:
        """The shape of the network."""
        return self.network.config

    @classmethod
    def from_folder(cls, folder: str | Path) -> LanguageModel:
        """Load config.json and model.safetensors.

        Raise `ModelFolderError`, which names what is missing or not supported.
        """
        path = Path(folder)
        config = LlamaConfig.from_folder(path)
        return cls(path, Network(config, Weights.from_folder(path, config)))

    def updated(self, folder: str | Path) -> LanguageModel:
        """Return the same network with the weights in `folder`.

        Raise `ModelFolderError` if the weights do not fit.
        """
        updated = LanguageModel.from_folder(folder)
        if different := self.config.differences(updated.config):
            raise ModelFolderError(f"{folder} is another network: {', '.join(different)} differ")
        return updated
