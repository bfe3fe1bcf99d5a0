"""The miles adapter, and the slime adapter's older form, with miles' types."""

import argparse
import asyncio
import copy
import importlib
import inspect
import pickle
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import miles_mirror
from support.miles_mirror import GenerateFnInput, GenerateState, Sample
from support.slime_mirror import train_data
from support.slime_trainer import SAMPLING, fields_of, play, serving

from toolroll.rollout.errors import UsageError
from toolroll.testing import EmbeddedEngine
from toolroll.trainers.miles import generate
from toolroll.trainers.slime import SlimeSettings, read_settings
from toolroll.trainers.slime.samples import EpisodeSamples


@pytest.fixture(autouse=True)
def _miles(monkeypatch: pytest.MonkeyPatch) -> None:
    miles_mirror.install(monkeypatch)


def call(
    args: Namespace, sample: Any, state: GenerateState | None = None, **sampling: Any
) -> GenerateFnInput:
    return GenerateFnInput(state or GenerateState(args), sample, SAMPLING | sampling, False)


Served = tuple[EmbeddedEngine, Namespace]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as (engine, args):
        yield engine, args


async def test_both_forms_return_the_same_sample(served: Served) -> None:
    """The older form takes a sample without a session id."""
    engine, args = served
    older = await play(args, Sample(index=3, prompt=0, label="L", routing_key="key"))
    assert (older.reward, older.routing_key) == (1.0, "key") and "session_id" not in vars(older)
    assert {entry.routing_key for entry in engine.log if entry.output_ids} == {"key"}
    given = Sample(index=3, prompt="0", label="L")
    output = await generate(call(args, given))
    [sample] = output.samples
    assert isinstance(output, miles_mirror.GenerateFnOutput) and type(sample) is Sample
    keys = {entry.routing_key for entry in engine.log if entry.output_ids}
    assert keys == {sample.routing_key, "key"} and len(keys) == 2
    train_data([sample])
    names = "status reward label tokens loss_mask"
    assert fields_of(sample, names) == fields_of(older, names)
    assert given.tokens == [] and given.routing_key is None, "the given sample was changed"


async def test_an_abort_ends_the_episodes_of_its_own_rollout_only(served: Served) -> None:
    """The calls share one player, and the last one's state stopped all of them."""
    engine, args = served
    running, aborted = GenerateState(args), GenerateState(args, aborted=True)
    first, second = Sample(index=0, prompt=0), Sample(index=1, prompt=0)
    playing = asyncio.create_task(generate(call(args, first, running)))
    await engine.until(lambda core: len(core.log) > 0)
    stopped = await generate(call(args, second, aborted))
    assert stopped.samples.status is Sample.Status.ABORTED
    assert (await playing).samples.reward == 1.0
    playing = asyncio.create_task(generate(call(args, first, running)))
    turns = len(engine.log)
    await engine.until(lambda core: len(core.log) > turns)
    other = asyncio.create_task(generate(call(args, second)))
    await asyncio.sleep(0)
    running.aborted = True
    assert (await playing).samples.status is Sample.Status.ABORTED
    assert (await other).samples.reward == 1.0


def test_the_samples_of_an_episode_are_one_item_of_a_group() -> None:
    """miles reads and sets the fields of a group's items, also if an item is a list."""
    first, second = Sample(index=4, response_length=2), Sample(index=4, response_length=3)
    for item in (EpisodeSamples([first, second]), copy.deepcopy(EpisodeSamples([first, second]))):
        again: Any = pickle.loads(pickle.dumps(item))
        assert isinstance(again, list) and [s.response_length for s in again] == [2, 3]
        assert (item.index, item.status, item.response_length) == (4, Sample.Status.PENDING, 2)
        item.routing_key, item.loss_mask = "key", [0, 0]
        assert [sample.routing_key for sample in item] == ["key", "key"]
        assert [sample.loss_mask for sample in item] == [[0, 0], [0, 0, 0]]
        with pytest.raises(AttributeError, match="absent"):
            item.absent  # noqa: B018


def test_miles_takes_it_for_its_own_form_and_reads_its_flags() -> None:
    """miles calls a function with three parameters, or another first one, in the older form."""
    assert list(inspect.signature(generate).parameters) == ["input"]
    parser = argparse.ArgumentParser()
    vars(generate)["add_arguments"](parser)
    assert read_settings(parser.parse_args([])) == SlimeSettings()
    given = "--toolroll-env desk --toolroll-max-turns 4 --toolroll-pace-gc false"
    settings = read_settings(parser.parse_args([*given.split(), "--toolroll-env-args", '{"a": 1}']))
    assert (settings.env, settings.max_turns, settings.pace_gc) == ("desk", 4, False)
    assert settings.env_args == {"a": 1}
    with pytest.raises(UsageError, match="toolroll_max_turns"):
        read_settings(parser.parse_args(["--toolroll-max-turns", "many"]))


@pytest.mark.parametrize(
    ("trained", "names"),
    [({"lora_rank": 0}, None), ({"lora_rank": 8}, "miles_lora"),
     ({"lora_adapter_path": "a"}, "miles_lora"), ({"lora_rank": 8, "lora_train_only": True}, None)],
)  # fmt: skip
async def test_the_trained_adapter_is_recorded(trained: dict[str, Any], names: str | None) -> None:
    async with serving(lora_paths=("miles_lora",)) as (engine, args):
        vars(args).update({"lora_train_only": False, **trained})
        [sample] = (await generate(call(args, Sample(prompt=0)))).samples
    assert {entry.lora_path for entry in engine.log if entry.output_ids} == {names}
    recorded = sample.metadata["toolroll"].get("lora_paths", [None])
    assert set(recorded) == {names} and sample.reward == 1.0
    assert names is None or len(recorded) == len(sample.weight_versions)


async def test_an_adapter_of_one_s_own_is_refused_and_a_nucleus_is_not(served: Served) -> None:
    """A nucleus is taken because miles' loss reads none."""
    engine, args = served
    sample = Sample(prompt=0, adapter=Namespace(name="a", slot=1))
    with pytest.raises(UsageError, match="--multi-lora-n-adapters"):
        await generate(call(args, sample))
    assert not any(entry.output_ids for entry in engine.log)
    args.rollout_top_p = 0.9
    [sample] = (await generate(call(args, Sample(prompt=0), top_p=0.9))).samples
    assert sample.reward == 1.0
    assert {entry.sampling_params["top_p"] for entry in engine.log if entry.output_ids} == {0.9}


@pytest.mark.peers
def test_miles_lora_names_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip(
        "miles.utils.types",
        reason=f"miles is on GitHub only: github.com/radixark/miles at {miles_mirror.COMMIT[:8]}",
    )
    lora = importlib.import_module("miles.utils.lora")
    assert lora.LORA_ADAPTER_NAME == "miles_lora"
    trained = [Namespace(lora_rank=8, lora_train_only=only) for only in (False, True)]
    assert [lora.lora_rollout_enabled(args) for args in trained] == [True, False]
