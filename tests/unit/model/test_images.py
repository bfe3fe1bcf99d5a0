"""Images in episodes: their tokens, what the engine gets, and what is refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.listed_environment import ListedWorld
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

from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.media import collapsed
from toolroll.rollout.template.images import MOST_IMAGES, ImageTokens
from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.template.verify import Verifier
from toolroll.rollout.types import StopReason

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


async def test_the_text_of_a_placeholder_is_text() -> None:
    texts = [[{"type": "text", "text": PLACEHOLDER}, image_part(1)], f"Say {PLACEHOLDER}."]
    result, _ = await play(ListedWorld(user_texts=texts), lambda request: "Yes.")
    [trajectory] = result.trajectories
    assert {turn.excluded for turn in trajectory.turns} == {None}, result.info
    [image] = trajectory.media
    assert np.count_nonzero(trajectory.input_ids == placeholder()) == image.count


async def test_text_alone_reads_no_image() -> None:
    def load() -> Any:
        raise AssertionError("the processor was loaded")

    images = ImageTokens(load, placeholder())
    with_images, _ = await play(ListedWorld(tool_texts=["It."]), images=images)
    without, _ = await play(ListedWorld(tool_texts=["It."]), images=None)
    assert with_images.tokens == without.tokens and not with_images.trajectories[0].media


def png(width: int, height: int) -> bytes:
    """A PNG whose header declares a size, without its pixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


REFUSED: dict[str, tuple[Any, str]] = {
    "another URL": (part("https://a.b/c.png"), "must be a data URL"),
    "no URL": (part(None), "must be a data URL"),
    "a local file": (part("/etc/passwd.png"), "must be a data URL"),
    "not base64": (part("data:image/png;base64,%%%"), "cannot be read"),
    "truncated": (part(data_url(picture(1)[:-400])), "cannot be read"),
    "no image": (part(data_url(b"Hello.")), "cannot be read"),
    "another type": (part(data_url(picture(1), "image/jpeg")), "cannot be read"),
    "no type of ours": (part(data_url(picture(1), "image/tiff")), "must be a data URL"),
    "large": (part(data_url(png(8000, 8000))), "33,554,432 pixels"),
    "far too large": (part(data_url(png(50_000, 50_000))), "cannot be read"),
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


def _dropping() -> str:
    source: str = vision_tokenizer().chat_template
    return source.replace("<|vision_start|><|image_pad|><|vision_end|>", "(an image)")


UNABLE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a text model": (lambda: {"images": None}, "only text parts can be rendered"),
    "an engine": (lambda: {"takes_images": False}, "takes no images: use tasks without"),
    "no counts": (
        lambda: {"images": ImageTokens(Uncounted, placeholder())},
        "Uncounted does not count the tokens of images",
    ),
    "a template that drops it": (lambda: {"chat_template": _dropping()}, "0 placeholder tokens"),
    "no parts": (lambda: {"chat_template": NO_PARTS}, "shows no images in messages of this role"),
}


@pytest.mark.parametrize(("options", "problem"), UNABLE.values(), ids=UNABLE)
async def test_who_takes_no_images_says_so_before_the_first_token(
    options: Callable[[], dict[str, Any]], problem: str
) -> None:
    result, engine = await play(ListedWorld(**WORLD), **options())
    assert result.stop_reason is StopReason.TEMPLATE_ERROR
    assert problem in result.info["error"]["message"] and not engine.requests


async def test_an_overridden_request_takes_no_images() -> None:
    """It would send all tokens of an image, without the image, and wait for ever."""

    class Posting(TrainableToolCallingAgent):
        async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
            raise AssertionError("a request was sent")

    result, engine = await play(ListedWorld(**WORLD), kind=Posting)
    assert "takes no images" in result.info["error"]["message"] and not engine.requests
