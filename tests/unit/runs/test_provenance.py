"""Which software, model and command produced a run: recorded, without secrets."""

from __future__ import annotations

import json
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.source import ROOT

from toolroll.evaluation.run_config import RunConfig
from toolroll.evaluation.run_setup import prepare
from toolroll.rollout.runs import provenance as module
from toolroll.rollout.runs.provenance import (
    benchmark_packages,
    command_without_secrets,
    commit,
    extended,
    package_version,
    provenance,
    without_secrets,
)
from toolroll.rollout.runs.registry import _Configured, load_environment
from toolroll.rollout.runs.run_directory import RunDirectory, read_settings
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer


async def test_a_run_names_its_software_its_model_and_its_command() -> None:
    async with (
        EmbeddedEngine(load_embedded_tokenizer(), lambda request: "Hi") as engine,
        AsyncExitStack() as stack,
    ):
        config = RunConfig(env="desk", engine=engine.url, model="embedded", parser="hermes")
        plan = await prepare(config, stack)
        command = ["toolroll", "--engine", "http://me:pw@host:1"]
        found = await provenance(plan.served, plan.factory, command)
        again = await provenance(plan.served, plan.factory, command)
        alone = await provenance(plan.served, command=command)
        assert plan.served is not None
        facts = await plan.served.engine.model_info()
    assert found["command"] == ["toolroll", "--engine", "http://***@host:1"]
    assert found["toolroll"] == package_version("toolroll")
    assert found["transformers"] == package_version("transformers")
    assert found["engine_model_path"] == facts.model_path is not None
    assert found["weight_version"] == facts.weight_version is not None
    assert found["sglang"] == facts.sglang_version is not None
    assert len(found["template_sha256"]) == len(found["tokenizer_sha256"]) == 64
    assert {**again, "date": found["date"]} == found
    assert {**alone, "date": found["date"]} == found | {"benchmark": {}}
    json.dumps(found)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--engine=http://me:pw@host:1/x", "--engine=http://***@host:1/x"),
        ('{"url": "http://a:b@c", "api_key": "sk-1", "n": 2}',
         '{"url": "http://***@c", "api_key": "***", "n": 2}'),
        ("http://host/v1?token=abc&x=1", "http://host/v1?token=***&x=1"),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("--api-key-env=OPENAI_API_KEY", "--api-key-env=OPENAI_API_KEY"),
        ("--max-new-tokens=5", "--max-new-tokens=5"),
        ("a@b", "a@b"),
        ('{"password": "my long pass", "n": 2}', '{"password": "***", "n": 2}'),
        (r'{"api_key": "a\"b", "n": 2}', '{"api_key": "***", "n": 2}'),
        ('{"api_key": ["sk-1", "sk-2"], "n": 2}', '{"api_key": ***, "n": 2}'),
        ("passwd=foo", "passwd=***"),
        ('{"judge": "sk-proj-abcdefghijklmnop"}', '{"judge": "***"}'),
        ("--model=Qwen/sk-8B", "--model=Qwen/sk-8B"),
    ],
)  # fmt: skip
def test_secrets_are_not_stored(word: str, shown: str) -> None:
    assert without_secrets(word) == shown


def test_a_key_in_a_word_of_its_own_is_not_stored() -> None:
    words = ["run.py", "--api-key", "abc", "--hf-token", "def", "--max-tokens", "5", "--secret"]
    assert command_without_secrets(words) == [
        "run.py", "--api-key", "***", "--hf-token", "***", "--max-tokens", "5", "--secret"
    ]  # fmt: skip


def test_the_commit_or_a_hash_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit() or ""
    in_checkout = (ROOT / ".git").exists()
    pattern = r"[0-9a-f]{40}(-dirty)?" if in_checkout else r"files [0-9a-f]{16}"
    assert re.fullmatch(pattern, found)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "lib" / "site" / "a" / "b" / "c.py"))
    assert re.fullmatch(r"files [0-9a-f]{16}", commit() or "")


def test_the_benchmarks_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert benchmark_packages(load_environment("desk")) == {}
    bfcl = load_environment("bfcl/multi_turn_base")
    assert benchmark_packages(bfcl) == {"bfcl-eval": package_version("bfcl-eval")}
    desk = load_environment("desk")
    monkeypatch.setattr(desk, "packages", ("numpy",), raising=False)
    assert list(benchmark_packages(_Configured(desk, {"policy": "brief"}))) == ["numpy"]


def test_a_later_run_adds_what_differs() -> None:
    first = {"date": "1", "toolroll": "0.1", "sglang": "0.5"}
    assert extended([], first) == [first]
    assert extended([first], {**first, "date": "2"}) == [first]
    second = extended([first], {**first, "date": "2", "sglang": "0.6"})
    assert second == [first, {"date": "2", "sglang": "0.6"}]
    assert extended(second, {**first, "date": "3"})[2:] == [{"date": "3", "sglang": "0.5"}]


def test_a_folder_keeps_the_first_and_each_environments_own(tmp_path: Path) -> None:
    first = {"date": "1", "toolroll": "0.1"}
    with RunDirectory(tmp_path, "pond", {}, provenance=first):
        pass
    with RunDirectory(tmp_path, "lake", {"n": 1}, provenance=first | {"toolroll": "0.2"}):
        pass
    with RunDirectory(tmp_path, "pond", {}, provenance=first | {"toolroll": "0.3"}) as folder:
        assert folder.provenance == [first, {"date": "1", "toolroll": "0.3"}]
    with RunDirectory(tmp_path, "pond", {}) as folder:
        assert len(folder.provenance) == 2
    assert json.loads((tmp_path / "run.json").read_text())["provenance"] == {
        "pond": [first, {"date": "1", "toolroll": "0.3"}],
        "lake": [{"date": "1", "toolroll": "0.2"}],
    }
    assert read_settings(tmp_path) == {"pond": {}, "lake": {"n": 1}}


def test_a_folder_without_provenance_gets_that_of_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema_version":1,"environments":{"pond":{}}}')
    with RunDirectory(tmp_path, "pond", {}, provenance={"date": "2"}) as folder:
        assert folder.provenance == [{"date": "2"}]
