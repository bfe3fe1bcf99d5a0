"""The embedded engine with a language model: what is sampled, and what changes while it runs."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedded import events, session, wired
from support.tiny_llama import tiny_tensors, wired_model, write_model, write_tiny_llama
from support.wire import Answer, Wire

from toolroll.rollout.errors import UsageError
from toolroll.testing import EmbeddedEngine, Fault, fault_at, load_engine
from toolroll.testing.language_model import LanguageModel
from toolroll.testing.language_model.batch import Batch, Scheduler, Sequence
from toolroll.testing.language_model.model import KVCache, Part
from toolroll.testing.language_model.sampling import Sampling, log_softmax

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
UPDATE = "/update_weights_from_disk"
LONG: dict[str, Any] = {**GREEDY, "max_new_tokens": 400, "stream_interval": 1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama network with the embedded tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(index) for index in np.random.default_rng(seed).integers(0, 4000, length)]


PROMPTS = [prompt(length, seed=length) for length in (1, 2, 30, 31, 90, 200, 3, 150)]


def scored(folder: Path, ids: list[int], temperature: float = 1.0) -> Any:
    """The logprob of each id but the first, from one forward pass."""
    model = LanguageModel.from_folder(folder)
    cache = KVCache(model.config, len(ids))
    hidden = model.prefill([Part(cache, 0, np.array(ids, np.int32))])
    rows = log_softmax(model.logits(hidden) / np.float32(temperature))
    return rows[np.arange(len(ids) - 1), ids[1:]]


def same(answer: Answer, expected: Answer) -> None:
    """Equal ids, and logprobs that differ by rounding only."""
    assert answer.output_ids == expected.output_ids
    np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)


async def greedy(wire: Wire, ids: list[int], count: int, **more: Any) -> Answer:
    return await wire.generate(ids, max_new_tokens=count, **GREEDY, **more)


# --- what is sampled ------------------------------------------------------------------------------


async def test_requests_at_once_have_the_answers_of_requests_alone(llama: Path) -> None:
    """Also if their prompts are computed in parts."""

    async def answers(*prompts: list[int]) -> list[Answer]:
        fields = {"logprob_start_len": 1}
        async with wired_model(llama) as (_, wire):
            return await asyncio.gather(*(greedy(wire, ids, 12, fields=fields) for ids in prompts))

    def prompt_logprobs(answer: Answer) -> list[float]:
        return [item[0] for item in answer.meta["input_token_logprobs"][1:]]

    alone = [answer for ids in PROMPTS for answer in await answers(ids)]
    together = await answers(*PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_PROMPT_TOKENS": 16, "_INPUT_ROWS": 5, "_FIRST_ROOM": 0}.items():
            patch.setattr(f"toolroll.testing.language_model.batch.{name}", value)
        in_parts = await answers(*PROMPTS)
    for expected, *others in zip(alone, together, in_parts, strict=True):
        for answer in others:
            same(answer, expected)
            logprobs = prompt_logprobs(expected)
            np.testing.assert_allclose(prompt_logprobs(answer), logprobs, atol=1e-4)
    assert len({tuple(each.output_ids) for each in together}) > 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_a_sample_does_not_depend_on_its_neighbors(llama: Path, temperature: float) -> None:
    params: dict[str, Any] = {"temperature": temperature, "top_p": 0.9, "sampling_seed": 3}
    async with wired_model(llama) as (_, wire):
        alone = await wire.generate(PROMPTS[4], max_new_tokens=20, **params)
        others = [wire.generate(ids, max_new_tokens=30) for ids in PROMPTS]
        again = wire.generate(PROMPTS[4], max_new_tokens=20, **params)
        same((await asyncio.gather(again, *others))[0], alone)


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0, 1.3])
async def test_logprobs_are_those_of_one_forward_pass(llama: Path, temperature: float) -> None:
    """The top ones contain a greedy token."""
    ids, fields = prompt(40), {"top_logprobs_num": 4}
    params: dict[str, Any] = {"top_p": 0.8, "top_k": 50, "max_new_tokens": 25, "ignore_eos": True}
    async with wired_model(llama) as (engine, wire):
        answer = await wire.generate(ids, fields=fields, temperature=temperature, **params)
    expected = scored(llama, ids + answer.output_ids, temperature or 1.0)[len(ids) - 1 :]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert engine.log[0].logprobs == answer.logprobs
    assert answer.meta["finish_reason"] == {"type": "length", "length": 25}
    tops = answer.meta["output_top_logprobs"]
    assert [len(top) for top in tops] == [4] * 25
    if temperature == 0:
        assert [top[0] for top in tops] == answer.meta["output_token_logprobs"]


async def test_a_prompt_is_scored_as_one_forward_pass_does(llama: Path) -> None:
    ids = prompt(40)
    fields = {"logprob_start_len": 10, "top_logprobs_num": 3}
    async with wired_model(llama) as (_, wire):
        await wire.generate(ids, max_new_tokens=1)  # what it computed is not used from 10 on
        answer = await wire.generate(ids, fields=fields, max_new_tokens=0)
    items, (no_top, *tops) = answer.meta["input_token_logprobs"], answer.meta["input_top_logprobs"]
    assert [item[1] for item in items] == ids[10:]
    np.testing.assert_allclose([item[0] for item in items[1:]], scored(llama, ids)[10:], atol=1e-4)
    assert (items[0][0], no_top, [len(top) for top in tops]) == (None, None, [3] * 29)
    assert all(top[0][0] >= item[0] for top, item in zip(tops, items[1:], strict=True))
    assert (answer.output_ids, answer.meta["cached_tokens"]) == ([], 10)
    assert answer.meta["finish_reason"] == {"type": "length", "length": 0}


async def test_a_seed_reproduces_a_run(llama: Path) -> None:
    async def run(**settings: Any) -> list[list[int]]:
        async with wired_model(llama, **settings) as (_, wire):
            answers = [
                await wire.generate([300], **session(key), max_new_tokens=8)
                for key in ("a", "a", "b")
            ]
            fixed = [await wire.generate([300], sampling_seed=5, max_new_tokens=8) for _ in "ab"]
        same(*fixed)
        return [each.output_ids for each in answers + fixed[:1]]

    first = await run(seed=1)
    assert first == await run(seed=1)
    assert len({tuple(ids) for ids in first}) == 4
    other = await run(seed=2)
    assert [a == b for a, b in zip(first, other, strict=True)] == [False, False, False, True]


@pytest.mark.parametrize("waiting", [False, True])
async def test_answers_of_one_request_differ(llama: Path, waiting: bool) -> None:
    """And share the computed prompt, though none of them has ended."""
    body = {"input_ids": prompt(100), "sampling_params": {"n": 4, "max_new_tokens": 8}}
    async with wired_model(llama, **({"max_running": 1} if waiting else {})) as (engine, wire):
        answers = (await wire.post("/generate", body)).body
        assert {entry.call for entry in engine.log} == {0, 1, 2, 3}
    assert len({tuple(each["output_ids"]) for each in answers}) == 4
    if not waiting:
        cached = sorted(each["meta_info"]["cached_tokens"] for each in answers)
        assert cached == [0, 99, 99, 99]


async def test_stops_end_an_answer(llama: Path) -> None:
    async with wired_model(llama) as (engine, wire):
        whole = await greedy(wire, prompt(20), 30)
        third = whole.output_ids[2]
        params: dict[str, Any] = {"temperature": 0, "stop_token_ids": [third]}
        by_id = await wire.generate(prompt(20), max_new_tokens=30, **params)
        stop = engine.tokenizer.decode(whole.output_ids[3:5])
        by_text = await greedy(wire, prompt(20), 30, stop=stop)
    end = whole.output_ids.index(third) + 1
    assert by_id.output_ids == whole.output_ids[:end]
    assert by_id.meta["finish_reason"] == {"type": "stop", "matched": third}
    assert by_text.meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert whole.output_ids[: len(by_text.output_ids)] == by_text.output_ids
    assert stop not in by_text.body["text"]
    assert by_id.meta["completion_tokens"] == len(by_id.logprobs) == end


async def test_the_models_own_stops_and_limits_are_used(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, eos_token_id=[4089, 7])
    async with wired_model(folder) as (engine, wire):
        assert engine.sampler.stops == {4089, 7}
        assert engine.context_length == 1024
        assert (await wire.generate(prompt(1020))).status == 400
        assert (await wire.generate([4128])).status == 500
        full = await wire.generate(prompt(1000), max_new_tokens=None, **GREEDY)
        assert len(full.output_ids) == 22  # the scheduler keeps two positions
        info = (await wire.get("/model_info")).body
    assert info["model_path"] == str(folder)


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")
PENALTIES = ("frequency_penalty", "presence_penalty", "min_p")
REFUSED: dict[str, Any] = {**dict.fromkeys(GRAMMARS, "a"), **dict.fromkeys(PENALTIES, 0.1)}
REFUSED |= {"repetition_penalty": 1.1, "min_new_tokens": 2, "logit_bias": {"5": 1.0}}
REFUSED |= {"custom_params": {"a": 1}, "beam_width": 2, "watermark": True, "choice": ["a"]}
REFUSED |= {"sampling_seed": "seven"}
NEUTRAL: dict[str, Any] = {"regex": None, "logit_bias": {}, "min_new_tokens": 0, "min_p": 0.0}
NEUTRAL |= {"frequency_penalty": 0, "repetition_penalty": 1.0}


async def test_parameters_that_are_not_implemented_are_refused_by_name(llama: Path) -> None:
    async with wired_model(llama) as (engine, wire):
        for name, value in REFUSED.items():
            answer = await wire.generate([300], **{name: value})
            assert (answer.status, name in answer.message) == (400, True), name
        assert (await wire.generate([300], max_new_tokens=1, **NEUTRAL)).status == 200
    assert {entry.status for entry in engine.log[:-1]} == {400}


async def test_a_turn_that_continues_one_computes_only_what_is_new(llama: Path) -> None:
    ids, cached = prompt(60), []
    async with wired_model(llama) as (_, wire):
        for turn in range(4):
            answer = await greedy(wire, ids, 10)
            async with wired_model(llama) as (_, other):
                same(answer, await greedy(other, ids, 10))
            cached.append(answer.meta["cached_tokens"])
            ids = [*ids, *answer.output_ids, *prompt(5, seed=turn)]
    # all but the last sampled token, and the five new ones
    assert cached == [0, 69, 84, 99]


def sequence_of(length: int, limit: int, sampled: Any, seed: int = 0) -> Sequence:
    ids = np.array(prompt(length, seed), np.int32)
    return Sequence(ids, Sampling("", greedy=True), limit=limit, sampled=sampled)


async def test_the_least_recently_used_prefix_is_dropped(llama: Path) -> None:
    model, reused = LanguageModel.from_folder(llama), []
    batch = Batch(model, kept_tokens=2 * 148)  # each has room for 20 + 128
    for seed in (1, 2, 1, 3, 1, 2):
        sequence = sequence_of(20, 128, lambda: True, seed)
        batch.sequences.append(sequence)
        for _, token in batch.step():
            sequence.append(token)
        batch.step()  # removes it
        reused.append(sequence.reused)
    assert reused == [0, 0, 19, 0, 19, 0]


# --- aborts ---------------------------------------------------------------------------------------


async def test_an_abort_keeps_what_was_sampled(llama: Path) -> None:
    """A client that goes away stops its request too."""
    parts: list[dict[str, Any]] = []
    async with wired_model(llama) as (engine, wire):
        whole = await wire.generate(prompt(20), **LONG)
        async for part in events(wire, prompt(20), rid="r", sampling_params=LONG):
            parts.append(part)
            if len(parts) == 3:
                await wire.post("/abort_request", {"rid": "r"})
        async for _ in events(wire, prompt(20), sampling_params=LONG):
            break
        await engine.until(lambda engine: engine.log[2].finished is not None)
        later = await greedy(wire, prompt(21, seed=1), 3)
    final = parts[-1]
    assert final["meta_info"]["finish_reason"]["type"] == "abort"
    assert 3 <= len(final["output_ids"]) < 400
    assert final["output_ids"] == whole.output_ids[: len(final["output_ids"])]
    assert len(final["meta_info"]["output_token_logprobs"]) == len(final["output_ids"])
    assert [len(part["output_ids"]) for part in parts[:3]] == [1, 2, 3]
    assert [entry.aborted for entry in engine.log] == [False, True, True, False]
    assert later.status == 200


async def test_a_late_token_is_dropped(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends during the second step."""
    scheduler = Scheduler(LanguageModel.from_folder(llama), 0)
    sequence: Sequence = sequence_of(20, 4, lambda: len(sequence.tokens) == 4)
    step = Batch.step

    def end_late(batch: Batch) -> Any:
        sampled = step(batch)
        sequence.ended = bool(sequence.tokens)
        return sampled

    monkeypatch.setattr(Batch, "step", end_late)
    scheduler.add(sequence)
    await scheduler.aclose()
    assert len(sequence.tokens) == 1


# --- weights --------------------------------------------------------------------------------------


async def test_new_weights_sample_from_the_next_token_on(llama: Path, tmp_path: Path) -> None:
    """Each token has the logprob of the weights that sampled it, given all tokens before it."""
    other = write_model(tmp_path, seed=1)
    body = {"model_path": str(other), "weight_version": "two"}
    ids, parts, updates = prompt(20), [], []
    async with wired_model(llama, weight_version="one") as (engine, wire):
        before = await greedy(wire, ids, 200)
        params = {**LONG, "max_new_tokens": 200}
        async for part in events(wire, ids, sampling_params=params):
            parts.append(part)
            if len(parts) == 3:
                updates.append(await wire.post(UPDATE, body))
        after = await greedy(wire, ids, 3)
        info = (await wire.get("/model_info")).body
    [updated] = updates
    assert updated.status == 200
    assert updated.body == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to two.",
        "num_paused_requests": 0,
    }
    final = Answer(200, parts[-1])
    first, second = final.meta["weight_versions"]
    assert (first["version"], first["start"], second["version"]) == ("one", 0, "two")
    at = first["end"]
    assert 3 <= at == second["start"] < second["end"] == 200
    assert final.output_ids[:at] == before.output_ids[:at]
    whole = [*ids, *final.output_ids]
    sampled = slice(len(ids) - 1, None)
    expected = [*scored(llama, whole)[sampled][:at], *scored(other, whole)[sampled][at:]]
    np.testing.assert_allclose(final.logprobs, expected, atol=1e-4)
    expected = scored(other, ids + after.output_ids)[sampled]
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-4)
    assert after.meta["weight_versions"] == [{"version": "two", "start": 0, "end": 3}]
    assert (info["weight_version"], info["model_path"]) == ("two", str(other))
    assert info["tokenizer_path"] == str(llama)
    assert engine.log[1].weight_versions == final.meta["weight_versions"]


async def test_weights_that_do_not_fit_change_nothing(llama: Path, tmp_path: Path) -> None:
    """A scripted engine has none."""
    wider = write_model(tmp_path / "wider", intermediate_size=128)
    async with wired_model(llama) as (_, wire):
        before = await greedy(wire, prompt(20), 5)
        for path, words in ((wider, "intermediate_size"), (tmp_path / "none", "config.json")):
            body = {"model_path": str(path), "weight_version": "two"}
            refused = await wire.post(UPDATE, body)
            assert (refused.status, refused.body["success"]) == (400, False)
            assert words in refused.body["message"]
        for bad in ({}, {"model_path": str(llama), "weight_version": 2}):
            assert (await wire.post(UPDATE, bad)).status == 400
        after = await greedy(wire, prompt(20), 5)
    same(after, before)
    assert after.meta["weight_version"] == "default"
    assert after.meta["cached_tokens"] == 19
    async with wired() as (_, wire):
        refused = await wire.post(UPDATE, {"model_path": str(llama)})
    assert (refused.status, refused.body["success"]) == (400, False)


async def test_weights_without_a_version_keep_it_and_can_abort(llama: Path, tmp_path: Path) -> None:
    body = {"model_path": str(write_model(tmp_path, seed=1)), "abort_all_requests": True}
    async with wired_model(llama) as (engine, wire):
        parts, updates = [], []
        async for part in events(wire, prompt(20), sampling_params=LONG):
            parts.append(part)
            if len(parts) == 1:
                updates.append(await wire.post(UPDATE, body))
    assert [each.body["message"] for each in updates] == ["Succeeded to update model weights."]
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.weight_version == "default"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_nothing_is_sampled_while_the_engine_is_paused(llama: Path, mode: str) -> None:
    async with wired_model(llama) as (engine, wire):
        stream = events(wire, prompt(20), sampling_params=LONG)
        first = await anext(stream)
        assert (await wire.post("/pause_generation", {"mode": mode})).status == 200
        late = asyncio.create_task(greedy(wire, prompt(20), 5))
        body = {"model_path": str(llama), "weight_version": "two"}
        assert (await wire.post(UPDATE, body)).body["success"]
        await engine.until(lambda engine: len(engine.log) == 2)
        assert not late.done()
        assert (await wire.post("/continue_generation", {})).status == 200
        answers = [first, *[answer async for answer in stream]]
        meta = answers[-1]["meta_info"]
        assert (await late).meta["weight_version"] == "two"
        assert (await wire.post("/pause_generation", {"mode": "now"})).status == 400
    assert (meta["finish_reason"]["type"] == "abort") == (mode == "abort")
    versions = [span["version"] for span in meta["weight_versions"]]
    assert versions == (["default"] if mode == "abort" else ["default", "two"])


# --- errors ---------------------------------------------------------------------------------------


async def test_an_error_fails_only_its_calls(llama: Path, tmp_path: Path) -> None:
    """Diverged weights are one."""
    tensors = tiny_tensors()
    tensors["model.norm.weight"][:] = np.nan
    diverged = write_model(tmp_path, tensors=tensors)
    async with wired_model(llama) as (engine, wire):
        with pytest.MonkeyPatch.context() as patch:
            broken = lambda self, hidden: (_ for _ in ()).throw(MemoryError("no room"))
            patch.setattr("toolroll.testing.language_model.LanguageModel.logits", broken)
            calls = [wire.generate(ids, max_new_tokens=3) for ids in PROMPTS[:3]]
            assert [each.status for each in await asyncio.gather(*calls)] == [500] * 3
        assert (await wire.generate(PROMPTS[3], max_new_tokens=3)).status == 200
        for folder, status in ((diverged, 500), (llama, 200)):
            await wire.post(UPDATE, {"model_path": str(folder)})
            assert (await wire.generate(prompt(9), max_new_tokens=2)).status == status
    assert [entry.status for entry in engine.log] == [500, 500, 500, 200, 500, 200]


async def test_faults_of_a_script_are_refused(llama: Path) -> None:
    faults = fault_at({0: Fault(abort_after=1), 1: Fault(weight_version="b"), 2: Fault(status=503)})
    async with wired_model(llama, faults=faults) as (_, wire):
        statuses = [(await wire.generate([300], max_new_tokens=2)).status for _ in range(4)]
    assert statuses == [500, 500, 503, 200]


def test_a_network_must_fit_its_tokenizer_and_settings(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the tokenizer has 4096 ids, but the network has 4000"):
        load_engine(write_tiny_llama(tmp_path, vocab_size=4000))
    with pytest.raises(ValueError, match="latency, token_latency and split cannot"):
        EmbeddedEngine(tokenizer, LanguageModel.from_folder(tmp_path), latency=1.0)
