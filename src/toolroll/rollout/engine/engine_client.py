"""`EngineClient`: the interface through which the rest of the package uses an engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolroll.rollout.engine.health import Health
from toolroll.rollout.engine.model_info import ModelInfo
from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.types import Completion, GenerateRequest, IdArray


@dataclass(frozen=True, slots=True)
class EncodedRequest(GenerateRequest):
    """A request whose ids were encoded before, because a session encodes each id only once.
    `input_ids_json` contains them as JSON text ("1,2,3", without brackets).
    """

    input_ids_json: bytes = b""


class EngineClient(Protocol):
    """An engine that samples token ids. `Engine` is the implementation for SGLang.

    Subclass it to use a different engine. Methods that are not abstract have a default for an
    engine without HTTP routes.
    """

    takes_images: bool = False
    """Whether `generate` sends the images of a request."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The address, or a name for error messages."""

    @abstractmethod
    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Sample one turn. `progress` gets all ids sampled so far, at least once."""

    def stopped(self) -> bool:
        """Return True while the trainer lets the running episode start no turn."""
        return False

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """Return the context length, the vocabulary size and the weight version."""

    async def check_model(self) -> None:
        """Raise `UsageError` if the engine is known to serve a different model by now. This is
        called once per episode, after its last turn.
        """
        return

    @abstractmethod
    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Post `payload` unchanged. Return the JSON of the answer."""

    async def get(self, url: str) -> Any:
        """Return the JSON at `url`, or None if there is none."""
        return None

    async def workers(self) -> list[str]:
        """Return the addresses that answer SGLang's routes, such as `/tokenize`."""
        return []

    async def dropped_params(self) -> frozenset[str]:
        """Return the sampling parameters that the router in front of the engine silently drops."""
        return frozenset()

    def open_session(self, session_id: str) -> Callable[[], None]:
        """Let the engine's cache keep the prefixes of the session's requests. Return the function
        that ends this. It may be called more than once.
        """
        return lambda: None

    def allow_sampled(self, ids: IdArray) -> None:
        """Allow `ids` in prompts: the engine sampled them in an earlier process."""
        return

    def keep_sessions(self, folder: Path) -> None:
        """Keep the ids of open sessions in `folder`, for `close_left_sessions`."""
        return

    async def close_left_sessions(self, folder: Path) -> int:
        """Close the sessions that killed processes left open at the engine, by the files in
        `folder`. Return their number.
        """
        return 0

    async def wait_until_healthy(self) -> Health:
        """Wait until the engine can answer. Return the last health check."""
        return await self.health()

    async def health(self) -> Health:
        """Return whether the engine can answer, and if not, why."""
        return Health(True)

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""
