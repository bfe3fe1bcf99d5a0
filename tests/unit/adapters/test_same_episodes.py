"""The same 20 desk episodes through every adapter: one oracle, the engine's own request log.

The oracle uses no code of the adapters, of sessions or of parsers: what the engine received and
sampled gives the ids, masks and logprobs, and the sampled text, played to a new desk, the reward.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from support import areal, miles_mirror, tinker_mirror, verl_mirror
from support import framework_engines as engines
from support.atropos_server import atropos_server
from support.desk_episodes import DESK, TASKS, known_tasks, openings
from support.qwen import tokenizer_for, trl_template
from support.slime_trainer import arguments, router_of
from support.trl_mirror import a_trainer
from support.verifiers_parts import verifiers_parts
from support.vllm_mirror import LlmEngine, asked_params

from toolroll.agents.text_agent import TextAgent
from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.endpoint.in_process import ManagedServer
from toolroll.parsers.openai import from_openai
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, EnvironmentOptions
from toolroll.rollout.errors import ActionError
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runs.runner import session_id
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RolloutArgs
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer, play_references
from toolroll.trainers import openrlhf, slime
from toolroll.trainers.areal import ToolrollWorkflow
from toolroll.trainers.atropos import ManagedServers
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings
from toolroll.trainers.miles import generate
from toolroll.trainers.skyrl import ToolrollGenerator
from toolroll.trainers.tinker import TinkerEngine, to_datums
from toolroll.trainers.trl import make_rollout_func
from toolroll.trainers.verl import ToolrollAgentLoop, agent_loop

EPISODES = known_tasks()[:20]
MAX_NEW = 256
SETTINGS: dict[str, Any] = {"env": "desk", "parser": "hermes", "verify": "always"}


@dataclass
class Tokens:
    """One sequence: all ids, and the mask and logprob (0.0 for what was not sampled) of each."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Sequence[int], response: Sequence[int], mask: Any, logprobs: Any) -> Tokens:
        before = len(prompt)
        return cls([*prompt, *response], [0] * before + [*mask], [0.0] * before + [*logprobs])


@dataclass
class Played:
    """One episode: its sequences, and its reward."""

    sequences: list[Tokens]
    reward: float | None


# --- the oracle -----------------------------------------------------------------------------------


def sequences(requests: Sequence[Any]) -> list[Tokens]:
    """What was served and sampled, in order. A prompt that does not go on from what was served
    before begins a new sequence, in which nothing before it is trained.
    """
    served: list[Tokens] = []
    for request in requests:
        prompt = request.input_ids.tolist()
        if not served or prompt[: len(served[-1].ids)] != served[-1].ids:
            served.append(Tokens())
        last = served[-1]
        observed = prompt[len(last.ids) :]
        last.ids += [*observed, *request.output_ids]
        last.mask += [0] * len(observed) + [1] * len(request.output_ids)
        last.logprobs += [0.0] * len(observed) + list(request.logprobs)
    return served


async def reward_of(index: int, texts: Sequence[str]) -> float | None:
    """The desk's reward for these replies. It never gets a call that cannot be read."""
    desk = DESK.make(EnvironmentOptions())
    await desk.reset(TASKS[index], 0)  # type: ignore[misc]
    reward = None
    for text in texts:
        reply = text.rpartition("</think>\n\n")[2]
        try:
            calls = list(map(json.loads, re.findall(r"<tool_call>(.*?)</tool_call>", reply, re.S)))
        except ValueError:
            continue
        content = reply.partition("<tool_call>")[0]
        tool_calls = tuple(ToolCall(c["name"], c["arguments"], "", id="x") for c in calls)
        try:
            result = await desk.step(Action(content, tool_calls))  # type: ignore[misc]
        except ActionError:
            continue
        reward = reward if result.reward is None else result.reward
    return reward


async def expected(world: World) -> dict[int, Played]:
    """The episodes by task, from the log of the engine alone."""
    by_task: dict[int, list[Any]] = defaultdict(list)
    for request in sorted(world.engine.log, key=lambda entry: entry.arrival):
        assert request.status == 200
        by_task[world.task_of(world.tokenizer.decode(request.input_ids))].append(request)
    played = {}
    for index, requests in by_task.items():
        texts = [world.tokenizer.decode(request.output_ids) for request in requests]
        replies = [text.removesuffix(world.tokenizer.eos_token) for text in texts]
        played[index] = Played(sequences(requests), await reward_of(index, replies))
    return played


# --- the engine -----------------------------------------------------------------------------------


@dataclass
class World:
    """An engine that plays the references, with mistakes. It knows a task by its opening: adapters
    name their sessions differently. `indices`: each episode's task, in the environment `env`.
    """

    tokenizer: Any
    folder: Path
    thought: str = ""
    indices: Sequence[int] = tuple(EPISODES)
    env: str = "desk"
    engine: EmbeddedEngine = field(init=False)

    def __post_init__(self) -> None:
        tasks = [TASKS[index] for index in EPISODES]
        replies = play_references(DESK, tasks, samples=1, mistakes=0.6)
        self._openings = {index: openings()[TASKS[index].id] for index in EPISODES}
        self._replies = {
            index: replies[session_id(DESK.name, TASKS[index].id, 0)] for index in EPISODES
        }

    @property
    def settings(self) -> dict[str, Any]:
        return {**SETTINGS, "env": self.env}

    def task_of(self, text: str) -> int:
        fitting = [index for index, opening in self._openings.items() if opening in text]
        return max(fitting, key=lambda index: len(self._openings[index]))

    def reply(self, request: PolicyRequest) -> str:
        replies = self._replies[self.task_of(request.text)]
        marker = "<|im_start|>assistant" if self.thought else "<|turn|>assistant"
        turn = request.text.count(marker) - 1
        return self.thought + (replies[turn] if turn < len(replies) else "Goodbye.")


@asynccontextmanager
async def world(name: str, folder: Path) -> AsyncIterator[World]:
    """`forks`: a chat template that removes thoughts from the history when the user speaks."""
    thought = "<think>\nHm.\n</think>\n\n" if name == "forks" else ""
    tokenizer: Any = tokenizer_for(trl_template("qwen3")) if thought else load_embedded_tokenizer()
    playing = World(tokenizer, folder, thought)
    tokenizer.save_pretrained(folder)
    async with EmbeddedEngine(tokenizer, playing.reply, split="random") as playing.engine:
        yield playing


# --- adapters that play toolroll's episodes -------------------------------------------------------


def trainer_args(world: World) -> Any:
    place = router_of(world.engine)
    return arguments(**place, hf_checkpoint=str(world.folder), toolroll_env=world.env)


def of_samples(episode: Any) -> Played:
    samples = episode if isinstance(episode, list) else [episode]
    tokens = []
    for sample in samples:
        prompt = len(sample.tokens) - sample.response_length
        ids = sample.tokens[:prompt], sample.tokens[prompt:]
        tokens.append(Tokens.of(*ids, sample.loss_mask, sample.rollout_log_probs))
    (reward,) = {sample.reward for sample in samples}
    return Played(tokens, reward)


PARAMS = {"max_new_tokens": MAX_NEW, "temperature": 1.0}


def of_trainer(world: World) -> list[Any]:
    return [miles_mirror.Sample(index=i, prompt=task) for i, task in enumerate(world.indices)]


async def with_slime(world: World) -> list[Played]:
    args = trainer_args(world)
    episodes = await asyncio.gather(
        *(slime.generate(args, sample, dict(PARAMS)) for sample in of_trainer(world))
    )
    await slime.aclose()
    return list(map(of_samples, episodes))


async def with_miles(world: World) -> list[Played]:
    state = miles_mirror.GenerateState(trainer_args(world))
    inputs = [
        miles_mirror.GenerateFnInput(state, sample, dict(PARAMS), False)
        for sample in of_trainer(world)
    ]
    outputs = await asyncio.gather(*map(generate, inputs))
    await slime.aclose()
    return [of_samples(output.samples) for output in outputs]


async def with_skyrl(world: World) -> list[Played]:
    config = engines.GeneratorConfig(max_turns=30, step_wise_trajectories=True)
    config.sampling_params.max_generate_length = MAX_NEW
    client = engines.SkyrlClient(world.engine.url)
    settings = EpisodeSettings(**world.settings)
    generator = ToolrollGenerator(config, world.tokenizer, client, settings)
    ids = [engines.TrajectoryID(str(index), i) for i, index in enumerate(world.indices)]
    prompts = [[{"role": "user", "content": str(index)}] for index in world.indices]
    try:
        output = await generator.generate({"prompts": prompts, "trajectory_ids": ids})
    finally:
        await generator.aclose()
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")
    played, tokens = [], list[Tokens]()
    rows = zip(*(output[name] for name in names), output["is_last_step"], strict=True)
    for *row, rewards, is_last in rows:
        tokens.append(Tokens.of(*row))
        if is_last:
            played.append(Played(tokens, sum(rewards)))
            tokens = []
    return played


async def with_areal(world: World) -> list[Played]:
    workflow = ToolrollWorkflow(
        areal.gconfig(max_new_tokens=MAX_NEW), world.tokenizer, EpisodeSettings(**world.settings),
        group_size=1, baseline="none", normalize=False,
    )  # fmt: skip
    async with areal.inference(world.engine.url) as inference:
        try:
            rows = await asyncio.gather(
                *(workflow.arun_episode(inference, {"index": index}) for index in world.indices)
            )
        finally:
            await workflow.aclose()
    played = []
    for row in rows:
        names = ("input_ids", "loss_mask", "logprobs")
        tokens = [
            Tokens(*(row[name][i][:length].tolist() for name in names))
            for i, length in enumerate(row["attention_mask"].sum(1).tolist())
        ]
        (reward,) = set(row["rewards"].tolist())
        played.append(Played(tokens, reward))
    return played


async def with_trl(world: World) -> list[Played]:
    trainer = a_trainer(seed=0)
    trainer.processing_class = world.tokenizer
    rollout = make_rollout_func(world.settings, engine=world.engine.url)
    output = await asyncio.to_thread(rollout, [str(index) for index in world.indices], trainer)
    await asyncio.to_thread(rollout.close)
    names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "toolroll_reward")
    return [
        Played([Tokens.of(*row)], reward)
        for *row, reward in zip(*(output[name] for name in names), strict=True)
    ]


async def with_verl(world: World) -> list[Played]:
    servers = verl_mirror.Servers(world.engine.url)
    given = verl_mirror.loop_arguments(servers, world.tokenizer)

    async def played(index: int) -> Played:
        loop = ToolrollAgentLoop(**given, settings=world.settings)
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
        outputs = await loop.run(params, extra_info={"index": index}, raw_prompt=[], session_id=0)
        tokens = [
            Tokens.of(o.prompt_ids, o.response_ids, o.response_mask, o.response_logprobs)
            for o in outputs
        ]
        return Played(tokens, outputs[-1].reward_score)

    try:
        return await asyncio.gather(*map(played, world.indices))
    finally:
        for player in agent_loop._players.pop():
            await player.aclose()  # verl's worker keeps it as long as its process


async def with_tinker(world: World) -> list[Played]:
    pytest.importorskip("tinker", reason="tinker is not installed")
    settings = EpisodeSettings(**world.settings)
    client = tinker_mirror.SamplingClient(world.engine.url)
    engine = TinkerEngine(client, world.tokenizer, context_length=8192)
    args = settings.rollout_args()
    model = Model.from_args(args, tokenizer=world.tokenizer, engine=lambda _: engine)
    player = EpisodePlayer(model, settings)
    results = await asyncio.gather(*(player.play(index, PARAMS) for index in world.indices))
    await player.aclose()
    return [Played(list(map(of_datum, to_datums(each, 1.0))), each.reward) for each in results]


def of_datum(datum: Any) -> Tokens:
    """Position i of a datum's inputs is about the token i + 1."""
    ids, inputs = datum.model_input.to_ints(), datum.loss_fn_inputs
    mask = [0, *map(int, inputs["advantages"].tolist())]
    return Tokens(
        [*ids, inputs["target_tokens"].tolist()[-1]], mask, [0.0, *inputs["logprobs"].tolist()]
    )


# --- adapters that answer another program's chat completions --------------------------------------


class Program(TextAgent):
    """A program that plays the desk with an OpenAI client."""

    def __init__(self, create: Any) -> None:
        super().__init__(Threads(1))
        self._create = create

    async def reply(
        self, messages: Any, tools: Any, sampling_params: Any, session_id: str
    ) -> AssistantTurn:
        answer = await self._create(messages=list(messages), tools=list(tools), max_tokens=MAX_NEW)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        return AssistantTurn(from_openai(message), message)


async def play(create: Any, index: int) -> float | None:
    result = await Program(create).asolve(DESK.make(EnvironmentOptions()), task=TASKS[index])
    return result.reward


class Executor(openrlhf.AgentExecutor):
    async def run_agent(self, prompt: Any, label: Any, session_id: str) -> Any:
        async def create(**body: Any) -> Any:
            return await self.client.chat.completions.create(model=self.model_name, **body)

        return {"reward": await play(create, int(prompt))}


async def with_openrlhf(world: World) -> list[Played]:
    played = []
    executor = Executor()
    for index in world.indices:
        row = await executor.execute(
            prompt=str(index), label="", sampling_params=asked_params(), max_length=8192,
            hf_tokenizer=world.tokenizer, llm_engine=LlmEngine(world.engine.url),
        )  # fmt: skip
        ids = row["observation_tokens"]
        mask = [0] * len(ids)
        for start, stop in row["action_ranges"]:
            mask[start:stop] = [1] * (stop - start)
        played.append(Played([Tokens(ids, mask, row["rollout_log_probs"])], row["reward"]))
    return played


async def with_atropos(world: World) -> list[Played]:
    server = atropos_server(world.engine.url)
    manager = SimpleNamespace(servers=[server], use_proxy=False, tool_parser="hermes")
    managed_server = ManagedServers(manager).managed_server

    async def played(index: int) -> Played:
        session = (
            ManagedServer(server, world.tokenizer, tool_parser="hermes", history="fork")
            if world.thought
            else managed_server(tokenizer=world.tokenizer)
        )
        async with session as managed:
            reward = await play(managed.chat_completion, index)
            nodes = managed.get_state()["nodes"]
        tokens = []
        for node in nodes:
            mask = [int(token != -100) for token in node.masked_tokens]
            pairs = zip(mask, node.logprobs, strict=True)
            tokens.append(Tokens(node.tokens, mask, [p if kept else 0.0 for kept, p in pairs]))
        return Played(tokens, reward)

    return await asyncio.gather(*map(played, world.indices))


async def with_verifiers(world: World) -> list[Played]:
    args = RolloutArgs(engine=world.engine.url, model=str(world.folder))
    model = Model.from_args(args, tokenizer=world.tokenizer)
    endpoint = Endpoint(model, EndpointSettings(port=0))
    with verifiers_parts() as vf:
        async with EndpointServer(endpoint) as server:
            dialect = vf.ChatDialect()
            client = vf.EndpointClient(vf.TrainClientConfig(base_url=f"{server.url}/v1"))

            async def played(index: int) -> Played:
                trace = vf.new_trace(f"trace-{index}")

                async def create(**given: Any) -> Any:
                    body = {"model": "default", **given}
                    request = dialect.parse_request(body)
                    turn = vf.prepare_turn(trace, request.messages, request.tools)
                    response = await client.get_response(
                        dialect, body, vf.SamplingConfig(), trace.id, turn
                    )
                    turn.commit(response)
                    return ChatCompletion.model_validate(response.raw)

                reward = await play(create, index)
                rows = [(one.token_ids, one.sampled_mask, one.logprobs) for one in trace.branches]
                tokens = [Tokens(ids, list(map(int, mask)), values) for ids, mask, values in rows]
                return Played(tokens, reward)

            episodes = [await played(index) for index in world.indices]
            await client.close()
    await model.aclose()
    return episodes


ADAPTERS: dict[str, Callable[[World], Awaitable[list[Played]]]] = {
    "slime": with_slime,
    "miles": with_miles,
    "skyrl": with_skyrl,
    "areal": with_areal,
    "trl": with_trl,
    "verl": with_verl,
    "tinker": with_tinker,
    "openrlhf": with_openrlhf,
    "atropos": with_atropos,
    "verifiers": with_verifiers,
}
SINGLE = {"trl", "openrlhf"}
"""A forked episode gives them the sequence with the most trained tokens, not all of them."""


@pytest.mark.parametrize("history", ["kept", pytest.param("forks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ADAPTERS)
async def test_the_same_episodes(name: str, history: str, tmp_path: Path, mirrors: None) -> None:
    async with world(history, tmp_path) as playing:
        played = await ADAPTERS[name](playing)
        oracle = await expected(playing)
    known = [oracle[index] for index in EPISODES]
    assert any(len(episode.sequences) > 1 for episode in known) == (history == "forks")
    assert {episode.reward for episode in known} == {0.0, 1.0}
    if name in SINGLE:
        for episode in known:
            episode.sequences = [max(episode.sequences, key=lambda tokens: sum(tokens.mask))]
    for episode, from_the_log in zip(played, known, strict=True):
        assert episode == from_the_log
