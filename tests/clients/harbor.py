"""`python -m clients.harbor`: let Harbor's agents play tasks in local sandboxes, and the same
programs without Harbor. Print what the sessions hold.

Every sampled token must be trained exactly once, no history that only grew may fork, and both ways
must give the rewards that the tasks' tests give. The engine is scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.episodes import call, judge_tokens, serving
from support.program_trials import REWARD, factory, play, write_task

from clients.__main__ import install
from clients.table import CLIENTS
from toolroll.agents.programs.agent import make_program_agent
from toolroll.rollout.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer
from toolroll.rollout.types import Episode

HEAD = """\
| agent | through | trials | requests | sequences | forks | sampled tokens | delivered | rewards |
|---|---|---|---|---|---|---|---|---|"""
THINKING = "<think>\nHm.\n</think>\n\n"
Say = Callable[[Sequence[str], str], str]
"""Write a reply that runs commands, or with none, the last reply, which has this text."""

TASKS: dict[str, tuple[str, float, list[list[str]]]] = {
    "greet": (f"grep -qx hello a && echo 1 > {REWARD}", 1.0, [["echo hello > a"]]),
    "retry": (
        f"grep -qx hello a && echo 1 > {REWARD}",
        1.0,
        [["cat a"], ["ls no-such-file"], ["echo hello > a"], ["cat a"]],
    ),
    "several": (
        f'[ "$(cat a b c)" = "$(printf "1\\n2\\n3")" ] && echo 1 > {REWARD}',
        1.0,
        [["echo 1 > a", "echo 2 > b"], ["echo 3 > c"]],
    ),
    "wrong": (
        f"if grep -qx hello a; then echo 1; else echo 0; fi > {REWARD}",
        0.0,
        [["echo goodbye > a"]],
    ),
    "partly": (
        'echo "{\\"reward\\": 0.5, \\"files\\": $(ls | wc -l)}" > /logs/verifier/reward.json',
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
VARIABLES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


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


async def rows(agent: HarborAgent, way: str, clients: Path, python: str, samples: int) -> list[str]:
    """Play the tasks with `agent`, print its row, and return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (test, _, _) in TASKS.items():
            task = write_task(Path(folder), name, test=f"{test}\n")
            (task / "instruction.md").write_text(f"Play the task {name}.\n")
        if agent.folder:
            stem = Path(agent.folder).parts[0]
            install(next(each for each in CLIENTS if Path(each.program).stem == stem), clients)
        path = f"{clients / agent.folder}:{os.environ['PATH']}" if agent.folder else None
        settings: dict[str, Any] = {
            "variables": VARIABLES | ({"PATH": path} if path else {}),
            "verify": "always",
        }
        if way == "Harbor":
            settings |= {"harbor_agent": agent.name, "harbor_python": python}
            settings["harbor_args"] = agent.args
        else:
            settings["command"] = agent.command
        shown = [str(clients), str(Path(python).parents[1])]
        tasks = factory(Path(folder), folders=shown)
        reply = policy(agent.say)
        options: dict[str, Any] = {"context_length": 1_000_000, "split": "random"}
        async with serving(load_embedded_tokenizer(), reply, **options) as (engine, model):
            program = make_program_agent(model, settings)
            limits = {"max_turns": 50, "concurrency": 2, "samples": samples}
            episodes = list((await play(tasks, program, **limits)).values())
            wrong = [line for episode in episodes for line in differences(episode, engine)]
    results = [episode.result for episode in episodes]
    total = lambda name: int(sum(result.metrics[name] for result in results))
    rewards = sorted({(each.task_id, each.result.reward) for each in episodes})
    print(
        f"| {agent.name} | {way} | {len(episodes)} | {total('turns')} | "
        f"{sum(len(result.trajectories) for result in results)} | {total('forks')} | "
        f"{total('completion_tokens')} | "
        f"{total('trained_tokens') / max(1, total('completion_tokens')):.3f} | "
        f"{', '.join(f'{task} {reward}' for task, reward in rewards)} |",
        flush=True,
    )
    return [f"{agent.name} ({way}): {line}" for line in wrong]


def differences(episode: Episode, engine: EmbeddedEngine) -> list[str]:
    """What is wrong with `episode`, by the requests that the engine saw."""
    result, task = episode.result, episode.task_id
    if result.reward != TASKS[task][1]:
        return [f"{task}: the reward is {result.reward}: {result.info.get('error', result.info)}"]
    try:
        judge_tokens(result.trajectories, engine, result.info["program"]["session"])
    except AssertionError as error:
        return [f"{task}: {error}"]
    false = [each for each in result.info.get("forks", ()) if "another conversation" not in each]
    return [f"{task}: false fork: {reason}" for reason in false]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="the agents' names")
    parser.add_argument("--folder", type=Path, default=Path(".venv/clients"))
    parser.add_argument("--python", default=".venv/harbor/bin/python", help="that has Harbor")
    parser.add_argument("--samples", type=int, default=1, help="trials of each task")
    options = parser.parse_args()
    print(HEAD, flush=True)
    wrong: list[str] = []
    folder, python = options.folder.absolute(), str(Path(options.python).absolute())
    for agent in AGENTS:
        for way in ("Harbor", "command"):
            if (not options.names or agent.name in options.names) and (
                way == "Harbor" or agent.command
            ):
                wrong += asyncio.run(rows(agent, way, folder, python, options.samples))
    for line in wrong:
        print(f"DIFFERS: {line}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
