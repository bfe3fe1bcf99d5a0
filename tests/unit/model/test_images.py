"""Images in episodes: their tokens, what the engine gets, and what is refused. A placeholder token
that is sampled ends the turn before it and the episode, and is never sent back to the engine.
"""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.learn_images.cards import CARDS
from examples.learn_images.play import play_script
from openai import BadRequestError
from PIL import Image
from support.endpoints import endpoint
from support.episodes import agent, call, serving
from support.listed_environment import LOOK, ListedWorld
from support.vision import (
    PLACEHOLDER,
    WORLD,
    data_url,
    image_part,
    image_tokens,
    picture,
    play,
    processor,
    shown,
    vision_tokenizer,
)

from toolroll import Status, StopReason, Task, TrainableToolCallingAgent
from toolroll.endpoint.in_process import ManagedServer
from toolroll.rollout.errors import TemplateError, UsageError
from toolroll.rollout.media import collapsed
from toolroll.rollout.model.tokenizers import find_placeholders
from toolroll.rollout.template.images import MOST_IMAGES, ImageTokens
from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.template.verify import Verifier
from toolroll.testing import Reply, load_embedded_tokenizer
from toolroll.testing.reference_policy import play_references

pytestmark = pytest.mark.tokens
NO_PARTS = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def placeholder() -> int:
    return int(vision_tokenizer().convert_tokens_to_ids(PLACEHOLDER))


async def test_a_sequence_has_all_tokens_of_its_images() -> None:
    result, engine = await play(ListedWorld(**WORLD))
    [trajectory] = result.trajectories
    assert [turn.excluded for turn in trajectory.turns] == [None] * 3, result.info
    places = np.flatnonzero(trajectory.input_ids == placeholder())
    spans = [range(each.position, each.position + each.count) for each in trajectory.media]
    assert places.tolist() == [place for span in spans for place in span]
    assert not trajectory.loss_mask[places].any()
    # the processor reads the whole conversation
    text = vision_tokenizer().decode(collapsed(trajectory.input_ids, trajectory.media))
    files = [Image.open(io.BytesIO(picture(seed))) for seed in (1, 2, 3)]
    read = processor(vision_tokenizer())(text=[text], images=files, return_tensors="np")
    assert read["image_grid_thw"].prod(-1).tolist() == [4 * len(span) for span in spans]
    assert (read["input_ids"] == placeholder()).sum() == len(places)
    urls = [[each.url for each in request.images] for request in engine.requests]
    all_urls = [data_url(picture(seed)) for seed in (1, 2, 3)]
    assert urls == [all_urls[:2], all_urls, all_urls]
    for request in engine.requests:
        assert np.count_nonzero(collapsed(request.input_ids, request.images) == placeholder()) == (
            len(request.images)
        )


async def test_a_fork_has_the_images_of_its_prompt() -> None:
    """The template drops the thoughts of earlier turns when a user follows."""
    users = [shown("One.", 1), shown("Two.", 2), shown("Three.", 3)]
    source = vision_tokenizer().chat_template.replace(
        "{{- message.content }}", "{{- message.content.split('</think>')[-1] }}"
    )
    result, _ = await play(
        ListedWorld(user_texts=users),
        lambda request: f"<think>{request.call}</think>Yes.",
        chat_template=source,
    )
    assert [len(each.media) for each in result.trajectories] == [1, 2, 3]
    turns = [turn.excluded for each in result.trajectories for turn in each.turns]
    assert turns.count(None) == 3 and set(turns) <= {None, "context"}, result.info


async def test_what_the_engine_read_decides() -> None:
    result, _ = await play(ListedWorld(**WORLD), other_prompt="the engine read 3 tokens")
    [trajectory] = result.trajectories
    reasons = {turn.excluded for turn in trajectory.turns}
    assert reasons == {"verification: images: engine"} and not trajectory.trained_tokens


def changed_image(**fields: Any) -> Callable[[ServedSequence], ServedSequence]:
    return lambda s: replace(s, images=(replace(s.images[0], **fields), *s.images[1:]))


SPOILED: dict[str, Callable[[ServedSequence], ServedSequence]] = {
    "another count": changed_image(count=2),
    "another place": changed_image(position=9),
    "another file": changed_image(sha256=""),
    "one image less": lambda s: replace(s, images=s.images[:2]),
    "one token less": lambda s: replace(s, input_ids=np.delete(s.input_ids, s.images[0].position)),
    "the images exchanged": lambda s: replace(s, messages=_exchanged(s.messages)),
}


def _exchanged(messages: Any) -> Any:
    system, user, *others = messages
    one, two, text = user["content"]
    return [system, {**user, "content": [two, one, text]}, *others]


async def test_the_check_finds_other_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ServedSequence]] = []
    check = Verifier.check

    def kept(verifier: Verifier, sequence: ServedSequence) -> str | None:
        seen.append((verifier, sequence))
        return check(verifier, sequence)

    monkeypatch.setattr(Verifier, "check", kept)
    await play(ListedWorld(**WORLD))
    verifier, sequence = seen[-1]
    assert check(verifier, sequence) is None and len(sequence.images) == 3
    found = {name: check(verifier, spoil(sequence)) for name, spoil in SPOILED.items()}
    assert None not in found.values(), found


async def test_text_alone_reads_no_image_also_of_a_placeholder() -> None:
    def load() -> Any:
        raise AssertionError("the processor was loaded")

    images = ImageTokens(load, placeholder())
    with_images, _ = await play(ListedWorld(tool_texts=["It."]), images=images)
    without, _ = await play(ListedWorld(tool_texts=["It."]), images=None)
    assert with_images.tokens == without.tokens and not with_images.trajectories[0].media
    texts = [[{"type": "text", "text": PLACEHOLDER}, image_part(1)], f"Say {PLACEHOLDER}."]
    result, _ = await play(ListedWorld(user_texts=texts), lambda request: "Yes.")
    [trajectory] = result.trajectories
    assert {turn.excluded for turn in trajectory.turns} == {None}, result.info
    [image] = trajectory.media
    assert np.count_nonzero(trajectory.input_ids == placeholder()) == image.count


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


REFUSED: dict[str, tuple[Any, str]] = {
    "another URL": (part("https://a.b/c.png"), "must be a data URL"),
    "a local file": (part("/etc/passwd.png"), "must be a data URL"),
    "truncated": (part(data_url(picture(1)[:-400])), "cannot be read"),
    "too narrow": (part(data_url(picture(1, 1000, 2))), "aspect ratio"),
    "a video": ({"type": "video_url", "video_url": {"url": "data:"}}, "type 'video_url'"),
    "too many": ([image_part(1, width=28, height=28)] * (MOST_IMAGES + 1), "at most 256"),
}


@pytest.mark.parametrize(("content", "problem"), REFUSED.values(), ids=REFUSED)
async def test_an_image_is_refused_before_the_first_token(content: Any, problem: str) -> None:
    parts = content if isinstance(content, list) else [content]
    result, engine = await play(ListedWorld(user_texts=[parts]))
    assert result.stop_reason is StopReason.TEMPLATE_ERROR
    assert problem in result.info["error"]["message"] and not engine.requests


def test_a_long_file_is_refused() -> None:
    url = "data:image/png;base64," + "A" * (16 << 20)
    with pytest.raises(TemplateError, match="at most 16,777,216"):
        image_tokens(vision_tokenizer()).read(url)


class Uncounted:
    """A processor without counts."""


class Posting(TrainableToolCallingAgent):
    """Would send all tokens of an image, without the image, and wait for ever."""

    async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("a request was sent")


def _dropping() -> str:
    source: str = vision_tokenizer().chat_template
    return source.replace("<|vision_start|><|image_pad|><|vision_end|>", "(an image)")


UNABLE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a text model": (lambda: {"images": None}, "only text parts can be rendered"),
    "an engine": (lambda: {"takes_images": False}, "takes no images: use tasks without"),
    "an overridden request": (lambda: {"kind": Posting}, "takes no images"),
    "no counts": (
        lambda: {"images": ImageTokens(Uncounted, placeholder())},
        "Uncounted does not count the tokens of images",
    ),
    "a template that drops it": (lambda: {"chat_template": _dropping()}, "0 placeholder tokens"),
    "no parts": (lambda: {"chat_template": NO_PARTS}, "shows no images in messages of this role"),
}


@pytest.mark.parametrize(("options", "problem"), UNABLE.values(), ids=UNABLE)
async def test_who_takes_no_images_says_so_before_a_token(options: Any, problem: str) -> None:
    result, engine = await play(ListedWorld(**WORLD), **options())
    assert result.stop_reason is StopReason.TEMPLATE_ERROR
    assert problem in result.info["error"]["message"] and not engine.requests


# --- sampled placeholders -------------------------------------------------------------------------

TEXT = [40, 41, 42]
"""Ids of ordinary text."""
PAD = load_embedded_tokenizer().convert_tokens_to_ids("<|pad|>")


class Looks(ListedWorld):
    """Gives 0.25 for an episode that it did not end."""

    def truncated_reward(self) -> float | None:
        return 0.25


def looks() -> Looks:
    return Looks(tool_texts=["seen"], tools=(LOOK,))


@pytest.fixture
def vision(tmp_path: Path) -> Any:
    """The embedded tokenizer as that of a multimodal model, whose placeholder is `<|pad|>`."""
    tokenizer = load_embedded_tokenizer()
    config = {"text_config": {}, "image_token_id": PAD}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.name_or_path = str(tmp_path)
    return tokenizer


def test_the_config_or_the_tokenizer_names_placeholders(tmp_path: Path) -> None:
    tokenizer = load_embedded_tokenizer()
    assert find_placeholders(tokenizer) == set()
    tokenizer.name_or_path = str(tmp_path)
    assert find_placeholders(tokenizer) == set()
    nested = {"thinker_config": {"video_token_id": 7, "image_token_index": 8}}
    config = {"image_token_id": None, "vocab_size": 9, **nested}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert find_placeholders(tokenizer) == {7, 8}
    tokenizer.audio_token_id = 6
    assert find_placeholders(tokenizer) == {6, 7, 8}


@pytest.mark.parametrize("before", [TEXT, []])
async def test_an_episode_ends_at_its_first_placeholder(vision: Any, before: list[int]) -> None:
    def policy(request: Any) -> Any:
        ids = [*before, PAD, *TEXT]
        return call() if request.call == 0 else Reply(output_ids=ids)

    async with serving(vision, policy) as (engine, model):
        result = await agent(model).asolve(looks(), task=Task("t", 0), session_id="s")
    assert (result.stop_reason, result.status) == (StopReason.PLACEHOLDER, Status.TRUNCATED)
    assert result.reward == 0.25 and "error" not in result.info
    assert not any(name.startswith("token_mismatches") for name in result.metrics)
    first, last = engine.log
    assert last.output_ids == [*before, PAD]  # the engine stops there
    [trajectory] = result.trajectories
    turns = [trajectory.input_ids[turn.start : turn.stop].tolist() for turn in trajectory.turns]
    assert turns == [first.output_ids, before][: 1 + bool(before)]
    assert PAD not in trajectory.input_ids
    assert trajectory.turns[-1].matched == (PAD if before else first.output_ids[-1])
    logprobs = np.array([*first.logprobs, *last.logprobs[: len(before)]], dtype=np.float32)
    assert np.array_equal(trajectory.logprobs[trajectory.loss_mask == 1], logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_endpoint_cuts_answers_before_the_token(vision: Any, stream: bool) -> None:
    def policy(request: Any) -> Any:
        return Reply(output_ids=[*TEXT, PAD, *TEXT]) if request.call == 0 else "Fine."

    asked: list[Any] = [{"role": "user", "content": "Go."}]
    async with endpoint(vision, policy, settings={"verify": "always"}) as bench:
        client: Any = bench.client()
        ignored = {"extra_body": {"ignore_eos": True}}
        options: dict[str, Any] = {"model": "m", "max_tokens": 20, **ignored}
        if stream:
            sent = await client.chat.completions.create(messages=asked, stream=True, **options)
            chunks = [chunk async for chunk in sent]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            finish = chunks[-1].choices[0].finish_reason
        else:
            answer = await client.chat.completions.create(messages=asked, **options)
            choice = answer.choices[0]
            text, finish = choice.message.content, choice.finish_reason
            assert choice.model_extra is not None
            assert choice.model_extra["stop_reason"] == PAD
        assert (text, finish) == (vision.decode(TEXT), "length")
        asked += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        await client.chat.completions.create(messages=asked, **options)
        trajectories = (await bench.get("/sessions/s/trajectories"))["trajectories"]
    assert len(bench.engine.log) == 2
    assert all(PAD not in entry.input_ids for entry in bench.engine.log)
    assert all(PAD not in trajectory["input_ids"] for trajectory in trajectories)


async def test_a_clients_prompt_with_a_placeholder_is_refused(vision: Any) -> None:
    """A text is encoded with its control tokens."""
    ids = [*TEXT, PAD]
    async with (
        endpoint(vision, lambda request: "Fine.") as bench,
        ManagedServer(bench.engine.url, vision) as m,
    ):
        for prompt in ("See <|pad|>.", ids):
            with pytest.raises(BadRequestError, match=rf"<\|pad\|> \(id {ids[-1]}\).*an image"):
                await bench.client().completions.create(model="m", prompt=prompt)
        with pytest.raises(UsageError, match=r"<\|pad\|>, which stands for an image"):
            await m.get_logprobs(input_ids=ids)
    assert bench.engine.log == []


# --- the environment of examples/learn_images, played by an engine without weights ----------------

TASKS = [task for split in CARDS.splits for task in CARDS.tasks(split)[:4]]


async def test_only_the_own_reference_of_a_card_earns_everything() -> None:
    """Only the images tell the tasks apart: before the answer, all have the same text."""
    replies = play_references(CARDS, TASKS, samples=1)
    others = dict(zip(replies, [*list(replies.values())[1:], ["It is 12."]], strict=True))
    for script, reward in ((others, 0.0), (replies, 1.0)):
        episodes = await play_script(script, vision_tokenizer(), TASKS)
        assert [episode.result.reward for episode in episodes] == [reward] * len(TASKS)
    trajectories = [episode.result.trajectories[0] for episode in episodes]
    assert len({tuple(image.sha256 for image in each.media) for each in trajectories}) == len(TASKS)
    before = {
        tuple(collapsed(each.input_ids[: each.turns[-1].start], each.media).tolist())
        for each in trajectories
    }
    assert len(before) == 1


def test_the_splits_share_no_image() -> None:
    used = [
        {at for task in CARDS.tasks(split) for at in task.data["cards"]} for split in CARDS.splits
    ]
    assert sum(map(len, used)) == len(set.union(*used))
