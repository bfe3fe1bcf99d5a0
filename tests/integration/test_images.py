"""Episodes with images on the real SGLang server, which needs the real torchvision:
TOOLROLL_TORCHVISION names its folder (`make test-images`). TOOLROLL_IMAGE_EPISODES sets how many
episodes Qwen2-VL plays. The others play a quarter."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.test_episodes import CALL, NO_END_OF_TEXT, play
from support.episodes import opened_model
from support.listed_environment import ListedWorld
from support.processes import Server
from support.servers import sglang_environment, sglang_server
from support.vision import FAMILIES, image_tokens, picture, shown, tiny_vision_model

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.media import collapsed
from toolroll.rollout.model.model import Model
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Status, Trajectory

TORCHVISION = os.environ.get("TOOLROLL_TORCHVISION", "")
EPISODES = int(os.environ.get("TOOLROLL_IMAGE_EPISODES", "8"))
READ = """
import sys
from forked_sglang import define_operators
define_operators()
import torch
from PIL import Image
from transformers import AutoImageProcessor
folder, out, *files = sys.argv[1:]
read = AutoImageProcessor.from_pretrained(folder)(list(map(Image.open, files)), return_tensors="pt")
torch.save(dict(read), out)
"""
"""Reads images with the server's own processor, which needs the server's packages."""

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.peers,  # no other target installs torchvision
    pytest.mark.skipif(not TORCHVISION, reason="TOOLROLL_TORCHVISION is not set"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, log_folder: Path) -> Iterator[tuple[str, Server]]:
    """A family of models, and the server of one."""
    with vision_server(log_folder, request.param) as started:
        yield request.param, started


def vision_server(log_folder: Path, family: str, **environment: str) -> Any:
    return sglang_server(
        log_folder,
        model=tiny_vision_model(family),
        torchvision=Path(TORCHVISION),
        environment=environment,
        name="-".join([family, *environment]),
    )


@cache
def tokenizer(family: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_vision_model(family))


def serving(url: str, family: str) -> AbstractAsyncContextManager[Model]:
    own = tokenizer(family)
    template = ChatTemplate(own, images=image_tokens(own, family))
    return opened_model(url, own, "qwen25", template=template)


async def show(model: Model, number: int, *, images: bool = True) -> InteractionResult:
    """A user shows three images; if `number` is odd, a grammar forces calls, which show others."""
    seeds = range(3 * number, 3 * number + 3) if images else ()
    texts = ["One <|im_end|>?", "Two?", "Three?"]
    contents = [shown(text, *seeds[place : place + 1]) for place, text in enumerate(texts)]
    params: dict[str, Any] = {"max_new_tokens": 6}
    if by_tools := number % 2:
        params = {"max_new_tokens": 120, "regex": CALL, "logit_bias": NO_END_OF_TEXT}
    world = ListedWorld(user_texts=contents, tool_texts=contents[::-1] if by_tools else ())
    return await play(model, f"images-{number}", world=world, steps=6, **params)


async def played(model: Model, numbers: Any, *, images: bool = True) -> list[InteractionResult]:
    """The episodes `numbers`, eight at once, which the server samples together."""
    room = asyncio.Semaphore(8)

    async def one(number: int) -> InteractionResult:
        async with room:
            return await show(model, number, images=images)

    return await asyncio.gather(*map(one, numbers))


def logprobs_of(trajectory: Trajectory, seeds: Sequence[int], family: str, folder: Path) -> Any:
    """The logprob of each token but the first, by transformers. `folder` gets the files."""
    import torch
    import transformers

    files = [folder / f"{seed}.png" for seed in seeds]
    for file, seed in zip(files, seeds, strict=True):
        file.write_bytes(picture(seed))
    model, out = tiny_vision_model(family), folder / "read.pt"
    subprocess.run(
        [sys.executable, "-c", READ, model, out, *files],
        env=sglang_environment(packages=Path(TORCHVISION)),
        check=True,
    )
    kind: Any = getattr(transformers, f"{family}ForConditionalGeneration")
    ids = torch.tensor(trajectory.input_ids[None].astype(np.int64))
    types = (ids == 151_655).int()
    with torch.inference_mode():
        logits = kind.from_pretrained(model).eval()(
            input_ids=ids, mm_token_type_ids=types, **torch.load(out)
        )
    of_all = torch.log_softmax(logits.logits[0, :-1], dim=-1)
    return of_all.gather(1, ids[0, 1:, None])[:, 0].numpy()


async def test_the_engine_reads_the_recorded_ids(served: tuple[str, Server]) -> None:
    family, server = served
    async with serving(server.url, family) as model:
        count = EPISODES if family == "Qwen2VL" else EPISODES // 4
        for result in await played(model, range(count)):
            assert result.status is not Status.ABORTED, result.info
            [trajectory] = result.trajectories
            assert len(trajectory.media) >= 3 and len(trajectory.turns) >= 3
            assert {turn.excluded for turn in trajectory.turns} == {None}
            sampled = [np.arange(turn.start, turn.stop) for turn in trajectory.turns]
            assert np.array_equal(np.flatnonzero(trajectory.loss_mask), np.concatenate(sampled))


async def test_the_logprobs_are_those_of_transformers(served: Any, tmp_path: Path) -> None:
    family, server = served
    async with serving(server.url, family) as model:
        [trajectory] = (await show(model, 0)).trajectories  # a grammar changes those of odd numbers
    expected = logprobs_of(trajectory, range(3), family, tmp_path)
    trained = np.flatnonzero(trajectory.loss_mask)
    assert np.abs(expected[trained - 1] - trajectory.logprobs[trained]).max() < 1e-4


async def test_an_episode_whose_ids_the_engine_changed_is_excluded(log_folder: Path) -> None:
    """This server encodes the text of a prompt with images again."""
    family, changed = "Qwen2VL", 0
    with vision_server(log_folder, family, SGLANG_MM_AVOID_RETOKENIZE="0") as server:
        async with serving(server.url, family) as model:
            for images in (True, False):
                for result in await played(model, range(EPISODES // 4), images=images):
                    [trajectory] = result.trajectories
                    same = same_when_encoded_again(trajectory)
                    reasons = {turn.excluded for turn in trajectory.turns}
                    expected = None if same or not images else "verification: images: engine"
                    assert reasons == {expected}, result.info
                    changed += images and not same
    assert changed


def same_when_encoded_again(trajectory: Trajectory) -> bool:
    """Whether the last prompt, which contains the others, has the ids of its text."""
    own = tokenizer("Qwen2VL")
    cut = len(trajectory) - len(collapsed(trajectory.input_ids, trajectory.media))
    prompt = collapsed(trajectory.input_ids, trajectory.media)[: trajectory.turns[-1].start - cut]
    again = own.encode(own.decode(prompt), add_special_tokens=False)
    return np.array_equal(prompt, again)
