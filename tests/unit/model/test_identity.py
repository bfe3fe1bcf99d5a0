"""The engine serves the model that the tokenizer belongs to, or the run does not begin."""

import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from support.episodes import opened_model
from support.http import http_server, says

from toolroll import ChatTemplate, Completion, GenerateRequest, Model, UsageError, get_parser
from toolroll.endpoint.endpoint import Endpoint
from toolroll.rollout.engine import EngineClient, ModelInfo, Progress
from toolroll.rollout.model.identity import probe_text
from toolroll.rollout.model.tokenizers import DESK_MODEL, desk_model_path, load_tokenizer
from toolroll.testing import EmbeddedEngine, embedded_tokenizer_path, load_engine, serve_in_thread
from toolroll.trainers.slime.player import Player
from toolroll.trainers.slime.settings import read_settings

ANOTHER = "whose tokenizer is not that of 'embedded' (--model)"
Command = Callable[..., tuple[int, str, str]]


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Any:
    """The embedded tokenizer with its file changed, saved in `folder`."""
    shutil.copytree(embedded_tokenizer_path(), folder)
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    return load_tokenizer(str(folder))


def fewer_merges(data: dict[str, Any]) -> None:
    data["model"]["merges"] = data["model"]["merges"][: len(data["model"]["merges"]) // 3]


def other_end(data: dict[str, Any]) -> None:
    """Two control tokens have each other's ids: text without them is encoded alike."""
    by_text = {token["content"]: token for token in data["added_tokens"]}
    one, two = by_text["<|end|>"], by_text["<|turn|>"]
    one["content"], two["content"] = two["content"], one["content"]
    vocab = data["model"]["vocab"]
    if "<|end|>" in vocab:
        vocab["<|end|>"], vocab["<|turn|>"] = vocab["<|turn|>"], vocab["<|end|>"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return changed(tmp_path_factory.mktemp("models") / "other-7b", fewer_merges)


@asynccontextmanager
async def serving(there: Any, tokenizer: Any, **model: Any) -> AsyncIterator[tuple[Any, Model]]:
    """An engine with the tokenizer `there`, and a model of it with another."""
    async with (
        EmbeddedEngine(there, stop_token_ids=[1]) as engine,
        opened_model(engine.url, tokenizer, **{"name": "embedded", **model}) as served,
    ):
        yield engine, served


@asynccontextmanager
async def served_by(routes: dict[str, Any], tokenizer: Any) -> AsyncIterator[tuple[str, Model]]:
    """A server of these routes alone, and a model of it."""
    async with http_server(routes) as url, opened_model(url, tokenizer, name="embedded") as served:
        yield url, served


@pytest.mark.parametrize(
    ("model", "warning"),
    [
        ({}, ""),
        ({"name": "org/Embedded"}, ""),
        ({"name": "models/embedded"}, ""),
        ({"name": "org/other"}, "the tokenizer is from 'org/other': both encode text in"),
        ({"parser": "llama3"}, "'llama3' (--parser) cannot read, but 'hermes' can"),
    ],
)
async def test_the_same_tokenizer_is_no_error(tokenizer: Any, model: Any, warning: str) -> None:
    async with serving(tokenizer, tokenizer, **model) as (engine, served):
        warnings = await served.check_identity()
    assert engine.log == [] and len(warnings) == bool(warning)
    assert all(warning in line for line in warnings)


@pytest.mark.parametrize("change", [fewer_merges, other_end])
async def test_another_tokenizer_is_an_error(tokenizer: Any, change: Any, here: Path) -> None:
    there = changed(here / "other-7b", change)
    async with serving(there, tokenizer) as (engine, served):
        with pytest.raises(UsageError) as raised:
            await served.check_identity()
        [warning] = await served.check_identity(allow_mismatch=True)
    assert f"{engine.url} serves '{here / 'other-7b'}', {ANOTHER}: token " in str(raised.value)
    assert "--allow-model-mismatch" in str(raised.value)
    assert str(raised.value).startswith(warning)
    assert engine.log == [] and engine.killed == 0


async def test_a_name_is_as_it_was_loaded(tokenizer: Any, here: Path, monkeypatch: Any) -> None:
    there = changed(here / "other-7b", lambda data: None)
    async with serving(there, tokenizer, name="") as (_, served):
        [line] = await served.check_identity()
        assert "the tokenizer is from 'embedded': " in line
        monkeypatch.setattr(tokenizer, "name_or_path", "")
        assert await served.check_identity() == []
    async with (
        load_engine(desk_model_path()) as engine,
        opened_model(engine.url, engine.tokenizer, name=DESK_MODEL) as served,
    ):
        assert await served.check_identity() == []


async def test_every_worker_behind_a_router_is_asked(tokenizer: Any, other: Any) -> None:
    async with EmbeddedEngine(tokenizer) as right, EmbeddedEngine(other) as wrong:
        workers = {"workers": [{"url": right.url}, {"url": wrong.url}]}
        async with served_by({"/workers": says(workers)}, tokenizer) as (_, served):
            with pytest.raises(UsageError, match=f"{wrong.url} serves .*other-7b"):
                await served.check_identity()


def test_no_two_tokenizers_agree_on_the_probe(tokenizer: Any, other: Any) -> None:
    text = probe_text(tokenizer, ChatTemplate(tokenizer).renderer.source)
    assert "<|end|>" in text and "<tool_call>" in text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token_id in ids
    assert tokenizer.decode(ids) == text
    assert other.encode(text, add_special_tokens=False) != ids


def generating(
    tokenizer: Any, spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
) -> tuple[list[Any], Any]:
    """A handler of `/generate` alone that encodes and decodes with `tokenizer`, and the bodies
    that it got.
    """
    seen: list[Any] = []

    async def handle(http: web.Request) -> web.StreamResponse:
        seen.append(orjson.loads(await http.read()))
        sampled = tokenizer.encode("Hello, you", add_special_tokens=False)
        items = [[None, index, None] for index in tokenizer.encode(seen[-1]["text"])]
        answer = {"text": tokenizer.decode(sampled), "output_ids": sampled}
        answer["meta_info"] = {"input_token_logprobs": items}
        return web.Response(body=orjson.dumps(spoil(answer)))

    return seen, handle


def no_prompt(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "meta_info": {}}


@pytest.mark.parametrize(
    "spoil", [lambda answer: answer, no_prompt], ids=["prompt ids", "text alone"]
)
async def test_a_short_generation_is_compared(tokenizer: Any, other: Any, spoil: Any) -> None:
    seen, right = generating(tokenizer, spoil)
    async with served_by({"/generate": right}, tokenizer) as (_, served):
        assert await served.check_identity() == []
    assert len(seen) == 1 and "input_ids" not in seen[0]
    assert seen[0]["sampling_params"]["temperature"] == 0.0
    _, wrong = generating(other, spoil if spoil is not no_prompt else shifted)
    async with served_by({"/generate": wrong}, tokenizer) as (_, served):
        words = "an unnamed model, whose tokenizer is not that of 'embedded'"
        with pytest.raises(UsageError, match=words):
            await served.check_identity()


def shifted(answer: dict[str, Any]) -> dict[str, Any]:
    return {**no_prompt(answer), "output_ids": [index + 1 for index in answer["output_ids"]]}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"/tokenize": says({"tokens": "x"}), "/generate": says({"text": "no ids"}, status=404)},
        {"/tokenize": says(b"<html>")},
        {"/generate": says({"meta_info": {"input_token_logprobs": [[-1.0, "an id"]]}})},
    ],
)
async def test_it_warns_if_nothing_can_be_compared(tokenizer: Any, answer: dict[str, Any]) -> None:
    async with served_by(answer, tokenizer) as (url, served):
        [line] = await served.check_identity()
    words = "does not report how it encodes text, so it was not checked that it serves 'embedded'"
    assert line == f"{url} {words}"


class OwnEngine(EngineClient):
    """An engine without HTTP routes: only what is abstract."""

    url = "own://"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        return Completion(np.zeros(0, dtype=np.int32), None, "abort")

    async def model_info(self) -> ModelInfo:
        return ModelInfo(context_length=100)

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing is posted to an engine without workers")

    async def aclose(self) -> None:
        pass


async def test_an_engine_without_routes_has_all_answers(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    parser = get_parser("hermes", template.encoder.control)
    async with Model(OwnEngine(), template, parser, name="embedded") as model:
        [line] = await model.check_identity()
        assert line.startswith("own:// does not report") and "was not checked" in line
        assert (await model.engine.health()).ok and await model.engine.get("own:///x") is None
        async with Endpoint(model) as endpoint:
            assert endpoint.model_info == ModelInfo(context_length=100)
            assert endpoint.dropped == frozenset()


@pytest.fixture(scope="module")
def wrong_engine(other: Any) -> Iterator[EmbeddedEngine]:
    with serve_in_thread(EmbeddedEngine(other, lambda request: "Goodbye.")) as engine:
        yield engine


def options(engine: EmbeddedEngine) -> list[str]:
    return ["--engine", engine.url, "--model", "embedded", "--parser", "hermes"]


@pytest.mark.parametrize("first", [["run", "desk", "--tasks", "0"], ["serve", "--port", "PORT"]])
def test_a_command_with_another_model_ends(wrong_engine: Any, first: Any, command: Command) -> None:
    before = len(wrong_engine.log)
    # The engine's own port: an endpoint that is not stopped by the check cannot listen there.
    first = [wrong_engine.url.rpartition(":")[2] if part == "PORT" else part for part in first]
    code, _, errors = command(*first, *options(wrong_engine))
    assert (code, errors.count("\n")) == (2, 1)
    assert "other-7b'" in errors and ANOTHER in errors and "--allow-model-mismatch" in errors
    assert len(wrong_engine.log) == before


def test_a_run_may_be_told_to_go_on(wrong_engine: EmbeddedEngine, command: Command) -> None:
    before = len(wrong_engine.log)
    allowed = [*options(wrong_engine), "--allow-model-mismatch"]
    code, out, _ = command("run", "desk", "--tasks", "0", *allowed)
    assert f"WARNING: {wrong_engine.url} serves " in out and ANOTHER in out
    assert code == 0 and len(wrong_engine.log) > before


async def test_slime_is_not_played_with_another_model(wrong_engine: Any, caplog: Any) -> None:
    host, _, port = wrong_engine.url.removeprefix("http://").partition(":")

    async def opened(**more: Any) -> None:
        args = SimpleNamespace(
            sglang_router_ip=host, sglang_router_port=int(port), hf_checkpoint="embedded", **more
        )
        async with aclosing(Player(args, read_settings(args))) as player:
            await player._episodes._open()

    with pytest.raises(UsageError, match="whose tokenizer is not that of 'embedded'"):
        await opened()
    with caplog.at_level(logging.WARNING):
        await opened(toolroll_allow_model_mismatch=True)
    assert ANOTHER in caplog.text
