"""`FRAMEWORKS`: the training frameworks that have an adapter, and what each adapter returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """A training framework. `version`: the tested version. `path`: the import path of the adapter's
    class or function for the framework. `forks`: how a forked episode is returned. `aborted`: how a
    failed episode is returned. `interrupted`: what keeps an episode during a weight update, or when
    the trainer has enough samples. `support` has one entry for each name in `SUPPORT`.
    """

    name: str
    version: str
    path: str
    forks: str
    aborted: str
    interrupted: str
    support: tuple[str, ...]


SUPPORT = ("routed experts", "sampling mask", "processes", "LoRA", "shown by")
"""What large runs need, and a command that runs the trainer's tests. In `support`, "-" means that
the trainer does not use it.
"""

_ONE = "one sequence"
_ALL = "all sequences with {}; otherwise " + _ONE

FRAMEWORKS = (
    Framework(
        "slime",
        "commit 624b824a",
        "toolroll.trainers.slime.generate",
        "several samples with one rollout_id; in an evaluation, the first",
        "ABORTED, no reward, zero mask, remove_sample",
        "parked and continued, with --partial-rollout and in the fully asynchronous rollout",
        ("yes", "no", "several", "-", 'make test-peers PYTEST_ARGS="-k slime"'),
    ),
    Framework(
        "miles",
        "commit 31f1ca96",
        "toolroll.trainers.miles.generate",
        "several samples with one rollout_id; in an evaluation, the first",
        "ABORTED, no reward, zero mask, remove_sample",
        "parked and continued, with --partial-rollout",
        ("yes", "-", "several", "yes", 'make test-peers PYTEST_ARGS="-k miles"'),
    ),
    Framework(
        "TRL",
        "1.16.0",
        "toolroll.trainers.trl.async_rollouts",
        _ALL.format("AsyncGRPOTrainer"),
        "no row; otherwise reward None, zero mask",
        "the engine continues the turn",
        ("-", "-", "one", "no", "pytest tests/contract -k trl"),
    ),
    Framework(
        "verl",
        "0.9.1",
        "toolroll.trainers.verl.ToolrollAgentLoop",
        _ALL.format("GRPO"),
        "an error, so that verl normalizes the group without it",
        "verl's client resumes the turn (async_training.partial_rollout)",
        ("yes", "-", "several", "yes", "pytest tests/contract -k verl"),
    ),
    Framework(
        "SkyRL",
        "0.3.0",
        "toolroll.trainers.skyrl.ToolrollGenerator",
        _ALL.format("step_wise_trajectories"),
        "nothing with step_wise_trajectories; otherwise stop reason abort, zero mask",
        "SkyRL's engines pause and continue the turn",
        ("yes", "no", "one", "yes", "pytest tests/contract -k skyrl"),
    ),
    Framework(
        "AReaL",
        "1.0.4",
        "toolroll.trainers.areal.ToolrollWorkflow",
        _ALL.format("group_size"),
        "nothing with group_size; otherwise an error, for which AReaL rejects the group",
        "AReaL's client resumes the turn",
        ("-", "-", "one", "yes", "pytest tests -k areal"),
    ),
    Framework(
        "Tinker",
        "0.38.0",
        "toolroll.trainers.tinker.ToolrollGroup",
        "several Datums",
        "no Datum; in tinker-cookbook an error",
        "Tinker interrupts no turn",
        ("-", "-", "several", "yes", "pytest tests/contract -k tinker"),
    ),
    Framework(
        "verifiers, prime-rl",
        "0.4.0",
        "toolroll.trainers.verifiers.EndpointClient",
        "branches of the trace",
        "a trace with a ProviderError",
        "the endpoint resumes the turn (--max-resumes)",
        ("yes", "no", "one", "no", 'make test-newest-peers PYTEST_ARGS="-k verifiers"'),
    ),
    Framework(
        "OpenRLHF",
        "0.11.2",
        "toolroll.trainers.openrlhf.AgentExecutor",
        _ONE,
        "the exception that the agent raises; a context overflow is a truncated sample",
        "max_resumes",
        ("-", "-", "several", "-", "pytest tests/contract -k openrlhf"),
    ),
    Framework(
        "Atropos",
        "0.4.0",
        "toolroll.trainers.atropos.BaseEnv",
        "several nodes of the session",
        "an exception; nothing is stored",
        "max_resumes",
        ("-", "-", "several", "-", "pytest tests/contract -k atropos"),
    ),
)
