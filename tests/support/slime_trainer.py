"""A trainer like slime for tests: its arguments, an engine that plays the desk, and the checks of
its samples.
"""

from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import slime_mirror
from support.qwen import tokenizer_for, trl_template

from toolroll.environments.desk.environment import Desk
from toolroll.rollout.runs.registry import load_environment
from toolroll.testing import EmbeddedEngine, PolicyRequest, Reply, load_embedded_tokenizer
from toolroll.testing.policy import LoggedRequest
from toolroll.testing.reference_policy import write_action
from toolroll.trainers import slime

DESK = load_environment("desk")
TASKS = DESK.tasks("test")
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 256,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def real_slime(module: str) -> Any:
    """A module of slime, or a skip that says where it is."""
    return pytest.importorskip(
        module,
        reason=f"slime is on GitHub only: github.com/THUDM/slime at {slime_mirror.COMMIT[:8]}",
    )


def reference_lines(index: int) -> list[str]:
    actions = DESK.reference(TASKS[index])
    assert actions is not None
    return [write_action(action) for action in actions]


def reference_line(index: int, turn: int) -> str:
    """What the reference of a task says in a turn, and goodbye after it."""
    lines = reference_lines(index)
    return lines[turn] if turn < len(lines) else "Goodbye."


def says(
    lines: Mapping[str, list[str]] | None = None, task: Callable[[str], int] = lambda session: 0
) -> Any:
    """A policy that plays the reference of the session's task; `lines[session]` in its place."""

    def policy(request: PolicyRequest) -> str | Reply:
        said = (lines or {}).get(request.routing_key) or reference_lines(task(request.routing_key))
        return said[request.call] if request.call < len(said) else "Goodbye."

    return policy


def plays_the_reference(request: PolicyRequest) -> str:
    """The reference of task 0, by the number of turns in the prompt."""
    return reference_line(0, request.text.count("<|turn|>assistant") - 1)


def router_of(engine: EmbeddedEngine) -> dict[str, Any]:
    """slime's arguments for the address of an engine."""
    ip, port = engine.url.removeprefix("http://").split(":")
    return {"sglang_router_ip": ip, "sglang_router_port": int(port)}


@asynccontextmanager
async def serving(
    policy: Any = None, **engine: Any
) -> AsyncIterator[tuple[EmbeddedEngine, Namespace]]:
    """An engine, and the arguments of a trainer that uses it."""
    async with EmbeddedEngine(load_embedded_tokenizer(), policy or says(), **engine) as embedded:
        yield embedded, arguments(**router_of(embedded))
        await slime.aclose()


@asynccontextmanager
async def forking(
    folder: Path, **engine_args: Any
) -> AsyncIterator[tuple[EmbeddedEngine, Namespace]]:
    """A trainer whose chat template removes thoughts, so that an episode with them forks. The
    second sample of each group has none.
    """
    tokenizer: Any = tokenizer_for(trl_template("qwen3"))
    tokenizer.save_pretrained(folder)

    def policy(request: PolicyRequest) -> str:
        line = reference_line(0, request.text.count("<|im_start|>assistant") - 1)
        return line if request.routing_key.endswith("/1") else f"<think>\nHm.\n</think>\n\n{line}"

    async with EmbeddedEngine(tokenizer, policy, **engine_args) as engine:
        yield engine, arguments(**router_of(engine), hf_checkpoint=str(folder))
        await slime.aclose()


async def play(
    args: Namespace, sample: Any, sampling: Mapping[str, Any] = SAMPLING, **options: Any
) -> Any:
    return await slime.generate(args, sample, dict(sampling), **options)


def fields_of(sample: Any, names: str | Iterable[str]) -> dict[str, Any]:
    names = names.split() if isinstance(names, str) else names
    return {name: getattr(sample, name) for name in names}


_NONE = (
    "rollout_max_context_len rollout_stop rollout_stop_token_ids reward_key eval_reward_key "
    "dynamic_sampling_filter_path rollout_sample_filter_path rollout_all_samples_process_path "
    "rollout_sample_hook_path apply_chat_template_kwargs"
)
"""slime's arguments that are None by default."""


def arguments(**given: Any) -> Namespace:
    """slime's arguments, as far as a rollout reads them, under slime's names."""
    values: dict[str, Any] = {
        **dict.fromkeys(_NONE.split()),
        "hf_checkpoint": "embedded",
        "partial_rollout": False,
        "use_rollout_routing_replay": False,
        "rollout_seed": 42,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 256,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 8,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "sglang_server_concurrency": 64,
        "group_rm": False,
        "toolroll_env": "desk",
        "toolroll_parser": "hermes",
        "toolroll_verify": "always",
    }
    return Namespace(**{**values, **given})


def every_sampled_token_is_as_served(outputs: list[Any], engine: EmbeddedEngine) -> None:
    served = {}
    for entry in engine.log:
        for at, (index, logprob) in enumerate(zip(entry.output_ids, entry.logprobs, strict=True)):
            served[entry.routing_key, len(entry.input_ids) + at] = (index, np.float32(logprob))
    for sample in (sample for output in outputs for group in output.samples for sample in group):
        cut = len(sample.tokens) - sample.response_length
        for at, (mask, logprob) in enumerate(
            zip(sample.loss_mask, sample.rollout_log_probs, strict=True)
        ):
            if mask:
                assert served[sample.session_id, cut + at] == (
                    sample.tokens[cut + at],
                    np.float32(logprob),
                )
            else:
                assert logprob == 0.0


def served_versions(entries: Iterable[LoggedRequest]) -> dict[int, str]:
    """The weight version of each token that one session sampled, by its position."""
    return {
        len(entry.input_ids) + i: span["version"]
        for entry in entries
        for span in entry.weight_versions
        for i in range(span["start"], span["end"])
    }


def version_spans(mask: list[int], prompt: int, versions: dict[int, str]) -> list[str]:
    """The version of each run of sampled tokens with one version, in the order of the turns."""
    return [
        version
        for sampled, run in groupby(enumerate(mask), key=lambda pair: pair[1])
        if sampled
        for version, _ in groupby(versions[prompt + i] for i, _ in run)
    ]


class Environments:
    """The desks that were reset, and those that were closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[Desk] = []
        self.closed: list[Desk] = []
        reset, close = Desk.reset, Desk.close

        async def counted_reset(desk: Desk, *args: Any) -> Any:
            observation = await reset(desk, *args)
            self.opened.append(desk)
            return observation

        async def counted_close(desk: Desk) -> None:
            is_open = desk in self.opened and desk not in self.closed
            await close(desk)
            if is_open:  # `reset` closes what it finds
                self.closed.append(desk)

        monkeypatch.setattr(Desk, "reset", counted_reset)
        monkeypatch.setattr(Desk, "close", counted_close)

    def clear(self) -> None:
        for seen in (self.opened, self.closed):
            seen.clear()

    def check_all_closed(self) -> None:
        assert sorted(map(id, self.closed)) == sorted(map(id, self.opened))
