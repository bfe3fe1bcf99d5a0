"""Images in requests to the endpoint: three dialects, the disk, and what is refused."""

import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest
from support import anthropic_wire, responses_wire
from support.episodes import call
from support.listed_environment import TOOL
from support.memory import forget_peak, peak_resident
from support.served import CHAT, MESSAGES, RESPONSES, ServedBench, in_session, serve, tool_results
from support.vision import (
    ExpandedEngine,
    data_url,
    image_part,
    image_tokens,
    picture,
    vision_tokenizer,
)
from support.wires import ask, continued

from toolroll.rollout.template.images import ImageTokens

pytestmark = pytest.mark.tokens

DIGESTS = [sha256(picture(seed)).hexdigest() for seed in (1, 2)]
LOOK = call(at="x")


def parts(url: Any) -> dict[str, dict[str, Any]]:
    """An image in each dialect."""
    kind, _, data = str(url).removeprefix("data:").partition(";base64,")
    return {
        CHAT: {"type": "image_url", "image_url": {"url": url}},
        MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}},
        RESPONSES: {"type": "input_image", "detail": "auto", "image_url": url},
    }


def asking(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def bodies(url: Any) -> dict[str, dict[str, Any]]:
    """A request with an image and a text in each dialect."""
    part, text = parts(url), {"type": "text", "text": "Read it."}
    return {
        CHAT: {"messages": asking(part[CHAT], text), "tools": [TOOL]},
        MESSAGES: {
            **anthropic_wire.HELLO,
            "messages": asking(part[MESSAGES], text),
            "tools": [anthropic_wire.LOOK],
        },
        RESPONSES: {"input": asking(part[RESPONSES], text), "tools": [responses_wire.LOOK]},
    }


FIRST, SECOND = (data_url(picture(seed)) for seed in (1, 2))
BODIES = bodies(FIRST)


def serve_images(
    *, images: bool = True, **options: Any
) -> AbstractAsyncContextManager[ServedBench]:
    """An endpoint whose model calls a tool in the first reply of a session."""
    looks = lambda request: "Done." if request.call else LOOK
    tokenizer = vision_tokenizer()
    counted = image_tokens(tokenizer) if images else None
    return serve(looks, tokenizer=tokenizer, images=counted, client=ExpandedEngine, **options)


async def play(bench: ServedBench, path: str = CHAT) -> None:
    """A user's image, then a tool's."""
    body, part = BODIES[path], parts(SECOND)[path]
    if path == CHAT:
        [message] = body["messages"]
        reply = await bench.chat(message)
        results: Any = tool_results(reply, [part])  # type: ignore[arg-type]
        await bench.chat(message, reply, *results)
        return
    answer = await ask(bench, body)
    later = continued(body, answer)
    if path == MESSAGES:
        later["messages"][-1]["content"][0]["content"] = [part]
    else:
        output = {**later["input"][-1], "output": [part]}
        later = {**body, "input": [output], "previous_response_id": answer["id"]}
    await ask(bench, later)


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_sends_images(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in a thread: a small file may have many pixels."""
    read, threads = ImageTokens.read, set[int]()

    def watched(self: ImageTokens, url: Any) -> Any:
        threads.add(get_ident())
        return read(self, url)

    monkeypatch.setattr(ImageTokens, "read", watched)
    async with serve_images(settings={"max_text": 1024}) as bench:  # an image is longer
        await play(bench, path)
        trajectory = await bench.one_trajectory(turns=2)
        engine: Any = bench.served.engine
        assert [len(request.images) for request in engine.requests] == [1, 2]
    assert threads and get_ident() not in threads
    media = trajectory["media"]
    assert [each["sha256"] for each in media] == DIGESTS
    placeholder = image_tokens(vision_tokenizer()).placeholder
    places = np.flatnonzero(np.array(trajectory["input_ids"]) == placeholder).tolist()
    assert places == [each["position"] + n for each in media for n in range(each["count"])]


async def test_a_changed_image_forks() -> None:
    async with serve_images() as bench:
        for seed in (1, 2):  # of one size, so that only the image differs
            [message] = asking(image_part(seed, width=56, height=56))
            await bench.chat(message)
        first, second = await bench.trajectories()
    size = first["prompt_length"]
    assert first["input_ids"][:size] == second["input_ids"][: second["prompt_length"]]
    assert first["media"] != second["media"]


async def test_a_killed_session_has_its_images_once(tmp_path: Path) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"
    async with serve_images(out=out) as bench:
        await play(bench)
        before = await bench.trajectories()
        shutil.copytree(out, killed)
    urls = [FIRST, SECOND]
    journal = b"".join(path.read_bytes() for path in killed.glob("*.jsonl"))
    assert [journal.count(url.encode()) for url in urls] == [1, 1]
    async with serve_images(out=killed) as again:
        assert (await again.get("/sessions/s/trajectories"))["trajectories"] == before
        session = again.endpoint.sessions.find("s").session
        images = session.path_images(session.node(session.nodes - 1))
        assert [image.url for image in images] == urls


async def test_what_the_engine_read_decides() -> None:
    async with serve_images() as bench:
        engine: Any = bench.served.engine
        engine.other_prompt = "the engine read 3 tokens"
        await play(bench)
        [trajectory] = (await bench.get("/sessions/s/trajectories"))["trajectories"]
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
    "not base64": ("data:image/png;base64,AAA\u00e9%", "cannot be read"),
    "black": (BLACK, "may have 33,554,432 pixels"),
    "declared": (png(50_000, b""), "could be decompression bomb"),
    "no text": (7, "must be a data URL|must be text"),
    "a text model": (FIRST, ""),
}


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail if the process grows by 64 MB."""
    forget_peak()
    before = peak_resident()
    yield
    assert peak_resident() - before < 64 << 20


@pytest.mark.parametrize("name", REFUSED)
async def test_an_image_that_cannot_be_read_is_a_400(name: str) -> None:
    url, problem = REFUSED[name]
    async with serve_images(images=name != "a text model") as bench:
        images = bench.served.template.images
        assert images is None or images.read(FIRST)  # loads the processor
        for path, body in bodies(url).items():
            with little_memory():
                status, answer = await bench.post(in_session(path), {"model": "m", **body})
            assert status == 400 and re.search(problem, str(answer)), answer
        assert not bench.engine.log


async def test_tokens_are_counted_with_images() -> None:
    async with serve_images() as bench:
        answer = await bench.send("/tokenize", {"messages": BODIES[CHAT]["messages"]})
        body = {"model": "m", "messages": asking(parts(FIRST)[MESSAGES])}
        counted = await bench.send(f"{MESSAGES}/count_tokens", body)
        images = image_tokens(vision_tokenizer())
        count = images.read(FIRST).count
    assert answer["tokens"].count(images.placeholder) == count
    assert counted["input_tokens"] > count


async def test_ten_thousand_images_are_a_400() -> None:
    content = [image_part(1, width=1, height=1)] * 10_000
    async with serve_images() as bench:
        with little_memory():
            status, answer = await bench.post(in_session(CHAT), {"messages": asking(*content)})
    assert status == 400 and "at most 256" in answer["error"]["message"]
