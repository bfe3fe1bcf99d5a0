"""Images in requests to the endpoint: three dialects, the disk, and what is refused."""

from __future__ import annotations

import re
import shutil
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.memory import forget_peak, peak_resident
from support.vision import (
    ExpandedEngine,
    data_url,
    image_part,
    image_tokens,
    picture,
    shown,
    vision_tokenizer,
)

from toolroll.rollout.template.images import ImageTokens

pytestmark = pytest.mark.tokens

LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
DIGESTS = [sha256(picture(seed)).hexdigest() for seed in (1, 2)]


def looks(request: Any) -> str:
    """A policy that calls a tool in each first reply of a session."""
    return call("look") if request.call == 0 else "Done."


@asynccontextmanager
async def bench(
    *, out: Path | None = None, images: bool = True, **options: Any
) -> AsyncIterator[Bench]:
    tokenizer = vision_tokenizer()
    options |= {"images": image_tokens(tokenizer) if images else None, "client": ExpandedEngine}
    async with endpoint(tokenizer, looks, out=out, **options) as opened:
        yield opened


async def chat(opened: Bench) -> None:
    """A user's image, then a tool's, with the OpenAI SDK."""
    client = opened.client()
    tools: Any = [{"type": "function", "function": LOOK}]
    messages: list[Any] = [{"role": "user", "content": shown("Read it.", 1)}]
    first = (
        await client.chat.completions.create(model="m", messages=messages, tools=tools)
    ).choices
    reply = first[0].message
    assert reply.tool_calls
    messages += [reply.model_dump(exclude_none=True), {
        "role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": shown("Here.", 2),
    }]  # fmt: skip
    await client.chat.completions.create(model="m", messages=messages, tools=tools)


async def responses(opened: Bench) -> None:
    client = opened.client()
    tools: Any = [{"type": "function", "strict": False, **LOOK}]
    image = {"type": "input_image", "detail": "auto", "image_url": data_url(picture(1))}
    parts = [image, {"type": "input_text", "text": "Read it."}]
    items: list[Any] = [{"role": "user", "content": parts}]
    first = await client.responses.create(model="m", input=items, tools=tools)
    [made] = first.output
    output = [{"type": "input_image", "detail": "auto", "image_url": data_url(picture(2))}]
    items = [{"type": "function_call_output", "call_id": made.call_id, "output": output}]  # type: ignore[union-attr]
    await client.responses.create(
        model="m", input=items, tools=tools, previous_response_id=first.id
    )


def block(seed: int) -> dict[str, Any]:
    """An image of Anthropic's Messages."""
    data = data_url(picture(seed)).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


async def messages(opened: Bench) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=f"{opened.url}/sessions/s", api_key="x") as client:
        tools: Any = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
        talk: list[Any] = [
            {"role": "user", "content": [block(1), {"type": "text", "text": "Read it."}]}
        ]
        options: dict[str, Any] = {"model": "m", "max_tokens": 64, "tools": tools}
        first = await client.messages.create(messages=talk, **options)
        use: Any = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [block(2)]}
        talk += [
            {"role": "assistant", "content": [each.model_dump() for each in first.content]},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(messages=talk, **options)


@pytest.mark.parametrize("client", [chat, responses, messages])
async def test_a_client_sends_images(client: Any) -> None:
    async with bench(settings={"max_text": 1024}) as opened:  # an image is longer
        await client(opened)
        [trajectory] = await opened.trajectories()
        engine: Any = opened.served.engine
        assert [len(request.images) for request in engine.requests] == [1, 2]
    assert [each["sha256"] for each in trajectory["media"]] == DIGESTS
    placeholder = image_tokens(vision_tokenizer()).placeholder
    places = np.flatnonzero(np.array(trajectory["input_ids"]) == placeholder).tolist()
    assert places == [
        each["position"] + offset for each in trajectory["media"] for offset in range(each["count"])
    ]


async def test_images_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may have many pixels."""
    read, threads = ImageTokens.read, set[int]()

    def watched(self: ImageTokens, url: Any) -> Any:
        threads.add(get_ident())
        return read(self, url)

    monkeypatch.setattr(ImageTokens, "read", watched)
    async with bench() as opened:
        await chat(opened)
    assert threads and get_ident() not in threads


async def test_a_changed_image_forks() -> None:
    async with bench() as opened:
        client = opened.client()
        for seed in (1, 2):  # of one size, so that only the image differs
            content = [image_part(seed, width=56, height=56)]
            talk: Any = [{"role": "user", "content": content}]
            reply = await client.chat.completions.create(model="m", messages=talk)
            talk += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
        one, two = await opened.trajectories()
    assert one["input_ids"][: one["prompt_length"]] == two["input_ids"][: two["prompt_length"]]
    assert one["media"] != two["media"]


async def test_a_killed_session_has_its_images_once(tmp_path: Path) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"
    async with bench(out=out) as opened:
        await chat(opened)
        before = await opened.trajectories()
        shutil.copytree(out, killed)
    journal = b"".join(path.read_bytes() for path in killed.glob("*.jsonl"))
    assert [journal.count(data_url(picture(seed)).encode()) for seed in (1, 2)] == [1, 1]
    async with bench(out=killed) as again:
        found = (await again.get("/sessions/s/trajectories"))["trajectories"]
        assert found == before
        live = again.endpoint.sessions.find("s")
        images = live.session.path_images(live.session.node(live.session.nodes - 1))
        assert [image.url for image in images] == [data_url(picture(seed)) for seed in (1, 2)]


async def test_what_the_engine_read_decides() -> None:
    async with bench() as opened:
        engine: Any = opened.served.engine
        engine.other_prompt = "the engine read 3 tokens"
        await chat(opened)
        [trajectory] = (await opened.get("/sessions/s/trajectories"))["trajectories"]
    assert {turn["excluded"] for turn in trajectory["turns"]} == {"verification: images: engine"}


def png(side: int, pixels: bytes) -> str:
    """The data URL of a square PNG with one bit for each of its pixels, which are compressed."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    ]
    return data_url(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


SIDE = 9_400
BLACK = png(SIDE, zlib.compress(bytes((SIDE // 8 + 1) * SIDE)))
"""An image whose file has 11 kB, and which takes 88 MB once it is decoded."""
REFUSED: dict[str, tuple[Any, str]] = {
    "another URL": ("https://a.b/c.png", "must be a data URL"),
    "truncated": (data_url(picture(1)[:-400]), "cannot be read"),
    "another type": (data_url(picture(1), "image/jpeg"), "its file is not JPEG"),
    "a text": (data_url(b"Hello."), "its file is not PNG"),
    "a GIF": (data_url(picture(1, file_format="GIF")), "its file is not PNG"),
    "an SVG": (data_url(b"<svg/>", "image/svg+xml"), "must be a data URL"),
    "not base64": ("data:image/png;base64,AAA\u00e9%", "cannot be read"),
    "black": (BLACK, "may have 33,554,432 pixels"),
    "declared": (png(50_000, b""), "could be decompression bomb"),
    "no text": (7, "must be a data URL"),
}


def requests(url: Any) -> dict[str, dict[str, Any]]:
    """A request of each dialect with an image, by its path."""
    image = {"type": "image_url", "image_url": {"url": url}}
    item = {"type": "input_image", "image_url": url}
    kind, _, data = str(url).removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data}
    return {
        "chat/completions": {"messages": [{"role": "user", "content": [image]}]},
        "responses": {"input": [{"role": "user", "content": [item]}]},
        "messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 9,
        },
    }


@pytest.mark.parametrize(("url", "problem"), REFUSED.values(), ids=REFUSED)
async def test_an_image_that_cannot_be_read_is_a_400(url: Any, problem: str) -> None:
    async with bench() as opened:
        images = opened.served.template.images
        assert images and images.read(data_url(picture(1)))  # loads the processor
        for path, body in requests(url).items():
            forget_peak()
            before = peak_resident()
            status, answer = await opened.post(f"/sessions/s/v1/{path}", {"model": "m", **body})
            assert status == 400 and re.search(f"{problem}|must be text", str(answer)), answer
            assert peak_resident() - before < 64 << 20
        assert not opened.engine.log


async def test_ten_thousand_images_are_a_400() -> None:
    async with bench() as opened:
        content = [image_part(1, width=1, height=1)] * 10_000
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        forget_peak()
        before = peak_resident()
        status, answer = await opened.post("/sessions/s/v1/chat/completions", body)
        assert status == 400 and "at most 256" in answer["error"]["message"]
        assert peak_resident() - before < 64 << 20


async def test_a_text_model_refuses_each_dialect() -> None:
    async with bench(images=False) as opened:
        for client in (chat, responses, messages):
            with pytest.raises(Exception, match="400"):
                await client(opened)


async def test_tokens_are_counted_with_images() -> None:
    async with bench() as opened:
        talk = [{"role": "user", "content": shown("Read it.", 1)}]
        _, answer = await opened.post("/tokenize", {"model": "m", "messages": talk})
        _, counted = await opened.post(
            "/v1/messages/count_tokens",
            {"model": "m", "messages": [{"role": "user", "content": [block(1)]}]},
        )
        image = image_tokens(vision_tokenizer()).read(data_url(picture(1)))
        placeholder = image_tokens(vision_tokenizer()).placeholder
    assert answer["tokens"].count(placeholder) == image.count
    assert counted["input_tokens"] > image.count
