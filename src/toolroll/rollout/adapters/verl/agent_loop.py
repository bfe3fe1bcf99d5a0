"""`ToolrollAgentLoop`: the class that verl instantiates for each sample.

verl creates a new object for every sample. So this module keeps the state that samples share (chat
template, tasks, user simulators), in one `EpisodePlayer` per event loop, server manager and
settings.
"""

from __future__ import annotations

import asyncio
import importlib
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from toolroll.rollout.adapters.episodes import EpisodePlayer, task_index, why_aborted
from toolroll.rollout.adapters.verl.output import to_fields
from toolroll.rollout.adapters.verl.server_engine import ServerEngine, ServerManager
from toolroll.rollout.adapters.verl.settings import VerlSettings
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Status

_VERL = "verl.experimental.agent_loop.agent_loop"


@dataclass
class _Shared:
    player: EpisodePlayer
    played: Counter[tuple[int, str]] = field(default_factory=Counter)


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, str], _Shared]] = (
    WeakKeyDictionary()
)


class ToolrollAgentLoop:
    """Plays the task that a row's `extra_info` names. `settings` has the fields of `VerlSettings`.

    The other arguments are the same as for verl's `AgentLoopBase`.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: ServerManager,
        tokenizer: Any,
        data_config: Any,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.rollout_config = trainer_config.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.settings = VerlSettings.read(settings or {}, where="settings of the agent loop")
        self._template_kwargs = data_config.config.get("apply_chat_template_kwargs") or {}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Play one episode and return it as verl's `AgentLoopOutput`.

        `response_logprobs` is None unless verl requests logprobs (`rollout.calculate_log_probs`).
        Raise `RolloutError` for an aborted episode if `on_aborted` is "raise".
        """
        shared = self._shared()
        info = _extra_info(row)
        index = task_index(info["index"])
        key = (index, f"{info.get('env')}/{info.get('split')}")
        number = shared.played[key]
        shared.played[key] += 1
        wanted = sampling_params.get("logprobs")
        asked = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        limit = int(self.rollout_config.response_length)
        result = await shared.player.play(
            index,
            {"max_new_tokens": limit, **asked},
            metadata=info,
            number=number,
            session_id=uuid.uuid4().hex,
        )
        if result.status is Status.ABORTED and self.settings.on_aborted == "raise":
            raise RolloutError(f"the episode of task {index} was aborted: {why_aborted(result)}")
        fields = to_fields(
            result,
            prompt_length=int(self.rollout_config.prompt_length),
            response_length=limit,
            filler=next(iter(shared.player.model.template.stop_token_ids), 0),
        )
        if not wanted:
            fields["response_logprobs"] = None
        verl = _verl()
        fields["metrics"] = verl.AgentLoopMetrics(**fields["metrics"])
        return verl.AgentLoopOutput(**fields)

    def _shared(self) -> _Shared:
        """Return the state that all samples with this loop, server manager and settings share."""
        players = _shared.setdefault(asyncio.get_running_loop(), {})
        # The player keeps a reference to the server manager, so its id is not reused.
        key = (id(self.server_manager), self.settings.model_dump_json())
        if key not in players:
            players[key] = _Shared(self._player(self.settings))
        return players[key]

    def _player(self, settings: VerlSettings) -> EpisodePlayer:
        config = self.rollout_config
        if config.get("enable_rollout_routing_replay"):
            raise UsageError(
                "rollout.enable_rollout_routing_replay: toolroll does not pass the routed experts "
                "to verl; run without it"
            )
        turns = (config.get("multi_turn") or {}).get("max_assistant_turns")
        length = int(config.prompt_length) + int(config.response_length)
        settings = settings.filled(
            max_turns=int(turns) if turns else None,
            chat_template_kwargs=dict(self._template_kwargs),
            context_length=config.get("max_model_len") or length,
        )
        engine = ServerEngine(
            self.server_manager,
            backend=str(config.name),
            context_length=int(settings.context_length or length),
            vocab_size=len(self.tokenizer),
        )
        model = Model.from_args(
            settings.rollout_args(), tokenizer=self.tokenizer, engine=lambda given: engine
        )
        return EpisodePlayer(model, settings)


def _extra_info(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's `extra_info`, which names the row's task. A key that is missing or None is
    read from `extra_info.metadata`. (A Parquet file stores missing keys as None.)
    """
    info = row.get("extra_info") or {}
    metadata = info.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise UsageError(
            f"extra_info.metadata must be a mapping, with env and split, not {metadata!r:.60}"
        )
    own = {name: value for name, value in info.items() if value is not None}
    found = {**metadata, **own}
    index = found.get("index", row.get("index"))
    if index is None:
        raise UsageError("a row needs extra_info.index, the task's index")
    return {**found, "index": int(index)}


def _verl() -> Any:
    """Import verl's agent loop module and return it. Raise `UsageError` if it is not installed."""
    try:
        verl = importlib.import_module(_VERL)
    except ImportError as error:
        raise UsageError(
            f"ToolrollAgentLoop runs inside verl 0.9: pip install verl ({error})"
        ) from error
    verl.AgentLoopBase.register(ToolrollAgentLoop)
    return verl
