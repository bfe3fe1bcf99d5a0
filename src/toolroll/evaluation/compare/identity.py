"""`unlike`: what two runs must have in common to be compared, and do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolroll.evaluation.compare.run import ComparedRun
from toolroll.rollout.runs.run_directory import difference

KINDS: Mapping[str, str] = {
    "template": "template_sha256 chat_template_kwargs parser history",
    "tokenizer": "tokenizer_sha256",
    "user": "user_model user_strategy",
    "limits": "max_turns max_new_tokens context_length on_length",
    "benchmark": "benchmark environment read env_args split",
    "packages": "packages",
    "seed": "seed",
}
"""The settings and the provenance that must be equal, by the name for `--allow-different`."""

TASKS = "tasks"
"""The name for `--allow-different` that also pairs tasks whose data differ."""

MODEL = "model"
"""The name for `--allow-different` that stands for what usually differs between models."""
OF_A_MODEL = frozenset({"template", "tokenizer"})

_OF_ONE_RUN = frozenset(
    "date command options engine user_url baseline_url tasks samples template regraded processes "
    "concurrency".split()
)
"""What is not compared: it identifies a run, follows from something else, or is about speed."""
_SIDES = ("baseline", "candidate")


def unlike(base: ComparedRun, candidate: ComparedRun) -> dict[str, list[str]]:
    """Return the differences between the runs by kind, as lines. The kind "" has the differences
    that do not forbid a comparison.
    """
    lines: dict[str, list[str]] = {}
    facts = [run.facts for run in (base, candidate)]
    facts = [_other_files(*pair) for pair in (facts, reversed(facts))]
    for kind, names in KINDS.items():
        parts = ({name: fact.get(name) for name in names.split()} for fact in facts)
        if different := difference(*parts, sides=_SIDES):
            lines[kind] = different
    for side, run in zip(_SIDES, (base, candidate), strict=True):
        if len(run.environments) > 1:
            line = f"{side} has episodes of {len(run.environments)} versions of the environment"
            lines.setdefault("benchmark", []).append(line)
    classified = {name for names in KINDS.values() for name in names.split()} | _OF_ONE_RUN
    unclassified = [{name: fact[name] for name in fact.keys() - classified} for fact in facts]
    if different := difference(*unclassified, sides=_SIDES):
        lines[""] = different
    return lines


def _other_files(facts: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return `facts` without the files that the environment read in both runs, under any name."""
    common = {*(other.get("read") or {}).values()}
    read = {name: value for name, value in (facts.get("read") or {}).items() if value not in common}
    return {**facts, "read": read}
