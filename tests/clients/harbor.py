"""`python -m clients.harbor`: let Harbor's agents play tasks in local sandboxes, and the same
programs without Harbor. Print what the sessions hold.

Every sampled token must be trained exactly once, no history that only grew may fork, and both ways
must give the rewards that the tasks' tests give. The engine is scripted.

With `--sglang`, the engine is SGLang with a tiny random model. Its replies have no meaning, so
every reward that depends on them is 0. A proxy before it says what it sampled, and transformers
computes the logprobs again.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.episodes import call, judge_tokens, opened_model, serving
from support.program_trials import REWARD, factory, play, write_task
from support.proxy import (
    CLOSE,
    CountingProxy,
    counting_proxy,
    engine_answers,
    judge_answers,
    largest_error,
)
from support.qwen import qwen3_tokenizer
from support.servers import sglang_server
from support.tiny_model import tiny_model

from clients.__main__ import install
from clients.table import CLIENTS
from toolroll.environments.programs.agent import make_program_agent
from toolroll.rollout.episode import Episode
from toolroll.rollout.model.model import Model
from toolroll.testing import PolicyRequest, load_embedded_tokenizer

HEAD = """\
| agent | through | trials | requests | sequences | forks | sampled tokens | delivered | rewards |
|---|---|---|---|---|---|---|---|---|"""
THINKING = "<think>\nHm.\n</think>\n\n"
Say = Callable[[Sequence[str], str], str]
"""Write a reply that runs commands, or with none, the last reply, which has this text."""


def graded(condition: str) -> str:
    """The test of a task whose reward is 1 if `condition` is true, and else 0."""
    return f"if {condition}; then echo 1; else echo 0; fi > {REWARD}"


TASKS: dict[str, tuple[str, float, list[list[str]]]] = {
    "greet": (graded("grep -qx hello a"), 1.0, [["echo hello > a"]]),
    "retry": (
        graded("grep -qx hello a"),
        1.0,
        [["cat a"], ["ls no-such-file"], ["echo hello > a"], ["cat a"]],
    ),
    "several": (
        graded('[ "$(cat a b c)" = "$(printf "1\\n2\\n3")" ]'),
        1.0,
        [["echo 1 > a", "echo 2 > b"], ["echo 3 > c"]],
    ),
    "wrong": (graded("grep -qx hello a"), 0.0, [["echo goodbye > a"]]),
    "partly": (
        '[ -e z ] && reward=0.5 || reward=0; echo "{\\"reward\\": $reward, '
        '\\"files\\": $(ls | wc -l)}" > /logs/verifier/reward.json',
        0.5,
        [["touch x y z"], ["ls; printf '%%s' '<|im_end|>'"]],
    ),
}
"""Of each task: the test, the reward, and the commands of each reply."""


def tool(name: str, argument: str = "command") -> Say:
    """An agent with a shell, which is its tool `name`."""

    def say(commands: Sequence[str], text: str) -> str:
        calls = "".join(call(name, **{argument: command}) for command in commands)
        return THINKING + (calls or text)

    return say


def mini(commands: Sequence[str], text: str) -> str:
    """mini-swe-agent ends with a command."""
    return tool("bash")(commands or ["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"], "")


def terminus(commands: Sequence[str], text: str) -> str:
    """terminus-2 reads JSON, and asks for a confirmation of the end."""
    keys = [{"keystrokes": f"{command}\n", "duration": 0.1} for command in commands]
    state = {"analysis": text, "plan": text, "commands": keys, "task_complete": not commands}
    return json.dumps(state)


@dataclass(frozen=True)
class HarborAgent:
    """One agent: its name for Harbor, how it calls its tools, and the command without Harbor."""

    name: str
    say: Say
    folder: str = ""
    """The folder of its programs, in the folder of all clients."""
    command: str = ""
    args: dict[str, Any] = field(default_factory=dict)


CODEX = """codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m m \
-c model_provider=toolroll -c "model_providers.toolroll={name='toolroll', wire_api='responses', \
base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY'}" "$INSTRUCTION" """
OPENCODE = """cat > opencode.json <<END
{"provider": {"t": {"npm": "@ai-sdk/openai-compatible", "models": {"m": {}},
 "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"}}}}
END
mv opencode.json ~; OPENCODE_CONFIG=~/opencode.json opencode run -m t/m "$INSTRUCTION" """
UNKNOWN = {"max_input_tokens": 200_000, "max_output_tokens": 8_000}
FREE = dict.fromkeys(("input_cost_per_token", "output_cost_per_token"), 0)
AGENTS = (
    HarborAgent("codex", tool("exec_command", "cmd"), "codex/node_modules/.bin", CODEX),
    HarborAgent(
        "claude-code",
        tool("Bash"),
        "claude_code/node_modules/.bin",
        'claude -p --dangerously-skip-permissions "$INSTRUCTION"',
    ),
    HarborAgent("opencode", tool("bash"), "opencode/node_modules/.bin", OPENCODE),
    HarborAgent("mini-swe-agent", mini, "mini_swe_agent/bin"),
    HarborAgent(
        "terminus-2",
        terminus,
        args={"model_info": UNKNOWN | FREE, "record_terminal_session": False},
    ),
)
CONTEXT, REPLY = 65_536, 48
"""With SGLang: the context, and the limit of a reply, in tokens."""
VARIABLES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


SHORT = {
    name: str(REPLY)
    for name in ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "OPENCODE_EXPERIMENTAL_OUTPUT_TOKEN_MAX")
}
"""Limits of programs that set their own limit of a reply."""


def policy(say: Say) -> Callable[[PolicyRequest], str]:
    """Reply with the commands of the task that the prompt names, one list after another."""

    def reply(request: PolicyRequest) -> str:
        if "title generator" in request.text:
            return "A title"
        [name] = {name for name in TASKS if f"Play the task {name}." in request.text}
        turn = request.text.count("<|turn|>assistant") - 1
        said = TASKS[name][2]
        return say(said[turn], "Hm.") if turn < len(said) else say([], "All done.")

    return reply


Differences = Callable[[Episode], list[str]]
"""Say what is wrong with the tokens of an episode."""
OpenModel = Callable[[HarborAgent], AbstractAsyncContextManager[tuple[Model, Differences]]]


@asynccontextmanager
async def scripted(agent: HarborAgent) -> AsyncIterator[tuple[Model, Differences]]:
    """A model that solves the tasks."""
    options: dict[str, Any] = {"context_length": 1_000_000, "split": "random"}
    reply = policy(agent.say)
    async with serving(load_embedded_tokenizer(), reply, **options) as (engine, model):

        def judge(episode: Episode) -> list[str]:
            result, task = episode.result, episode.task_id
            if result.reward != TASKS[task][1]:
                return [f"the reward is {result.reward}"]
            judge_tokens(result.trajectories, engine, result.info["program"]["session"])
            forks = result.info.get("forks", ())
            return [f"false fork: {each}" for each in forks if "another conversation" not in each]

        yield model, judge


def random_replies(proxy: CountingProxy, folder: Path) -> OpenModel:
    """Models whose engine is SGLang behind `proxy`, with the weights in `folder`."""

    @asynccontextmanager
    async def opened(agent: HarborAgent) -> AsyncIterator[tuple[Model, Differences]]:
        proxy.clear()

        def judge(episode: Episode) -> list[str]:
            result = episode.result
            session = result.info["program"]["session"]
            answers = [each for each in engine_answers(proxy) if each.session == session]
            judge_answers(result.trajectories, answers)
            error = largest_error(folder, result.trajectories)
            wrong = [f"the reward is {result.reward}"] if result.reward != 0 else []
            return wrong + ([f"logprobs differ by {error}"] if error > CLOSE else [])

        async with opened_model(proxy.url, qwen3_tokenizer(), "qwen25") as model:
            yield model, judge

    return opened


async def rows(
    agent: HarborAgent, way: str, opened: OpenModel, clients: Path, python: str, **limits: Any
) -> list[str]:
    """Play the tasks with `agent`, print its row, and return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (test, _, _) in TASKS.items():
            task = write_task(Path(folder), name, test=f"{test}\n")
            (task / "instruction.md").write_text(f"Play the task {name}.\n")
        if agent.folder:
            stem = Path(agent.folder).parts[0]
            install(next(each for each in CLIENTS if Path(each.program).stem == stem), clients)
        path = f"{clients / agent.folder}:{os.environ['PATH']}" if agent.folder else None
        variables = VARIABLES | ({"PATH": path} if path else {})
        settings: dict[str, Any] = {
            "variables": variables | (SHORT if opened is not scripted else {}),
            "verify": "always",
            "timeout": 1200.0,
        }
        if way == "Harbor":
            settings |= {"harbor_agent": agent.name, "harbor_python": python}
            settings["harbor_args"] = agent.args
        else:
            settings["command"] = agent.command
        shown = [str(clients), str(Path(python).parents[1]), sys.prefix, sys.base_prefix]
        tasks = factory(Path(folder), folders=shown)
        async with opened(agent) as (model, judge):
            program = make_program_agent(model, settings)
            episodes = list((await play(tasks, program, concurrency=2, **limits)).values())
            wrong = [line for episode in episodes for line in differences(episode, judge)]
    results = [episode.result for episode in episodes]
    total = lambda name: int(sum(result.metrics.get(name, 0) for result in results))
    rewards = sorted({(each.task_id, str(each.result.reward)) for each in episodes})
    print(
        f"| {agent.name} | {way} | {len(episodes)} | {total('turns')} | "
        f"{sum(len(result.trajectories) for result in results)} | {total('forks')} | "
        f"{total('completion_tokens')} | "
        f"{total('trained_tokens') / max(1, total('completion_tokens')):.3f} | "
        f"{', '.join(f'{task} {reward}' for task, reward in rewards)} |",
        flush=True,
    )
    reasons = Counter(reason for each in results for reason in each.info.get("forks", ()))
    ends = Counter(f"{each.status}, {each.stop_reason}" for each in results)
    print(f"{agent.name}: {dict(ends)}; forks: {dict(reasons)}", file=sys.stderr, flush=True)
    return [f"{agent.name} ({way}): {line}" for line in wrong]


def differences(episode: Episode, judge: Differences) -> list[str]:
    """What is wrong with `episode`."""
    error = episode.result.info.get("error")
    try:
        lines = [f"it failed: {error}"] if error else judge(episode)
    except AssertionError as assertion:
        lines = [str(assertion)]
    return [f"{episode.task_id}: {line}" for line in lines]


def open_models(stack: ExitStack, folder: Path) -> OpenModel:
    """Models whose engine is an SGLang that is started here, and ends with `stack`."""
    context = str(CONTEXT)
    flags = ["--context-length", context, "--max-total-tokens", str(4 * CONTEXT)]
    # on the CPU, each chunk costs as much as the whole
    flags += ["--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"]
    flags += ["--json-model-override-args", json.dumps({"max_position_embeddings": CONTEXT})]
    server = stack.enter_context(sglang_server(folder, flags=flags))
    proxy = stack.enter_context(counting_proxy(server.url))
    return random_replies(proxy, tiny_model())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="the agents' names")
    parser.add_argument("--folder", type=Path, default=Path(".venv/clients"))
    parser.add_argument("--python", default=".venv/harbor/bin/python", help="that has Harbor")
    parser.add_argument("--samples", type=int, default=1, help="trials of each task")
    parser.add_argument("--ways", nargs="*", default=["Harbor", "command"])
    parser.add_argument("--sglang", action="store_true", help="play with SGLang's random replies")
    options = parser.parse_args()
    print(HEAD, flush=True)
    wrong: list[str] = []
    folder, python = options.folder.absolute(), str(Path(options.python).absolute())
    limits: dict[str, Any] = {"samples": options.samples, "max_turns": 50}
    opened: OpenModel = scripted
    with ExitStack() as stack:
        if options.sglang:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            opened = open_models(stack, logs)
            short = {"temperature": 1.0, "max_new_tokens": REPLY}
            limits |= {"max_turns": 4, "sampling_params": short, "reruns": 0}
        for agent in AGENTS:
            for way in options.ways:
                if (not options.names or agent.name in options.names) and (
                    way == "Harbor" or agent.command
                ):
                    played = rows(agent, way, opened, folder, python, **limits)
                    wrong += asyncio.run(played)
    for line in wrong:
        print(f"DIFFERS: {line}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
