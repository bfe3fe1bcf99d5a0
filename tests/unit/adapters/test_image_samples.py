"""Images of episodes for trainers: slime and miles get them, and the others refuse them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.listed_environment import ListedWorld
from support.vision import WORLD, image_tokens, play, shown, vision_tokenizer

from toolroll.rollout.errors import TokenError, UsageError
from toolroll.rollout.types import Completion, GenerateRequest, InteractionResult
from toolroll.trainers.parking import ParkableEpisode
from toolroll.trainers.sequences import select_sequences
from toolroll.trainers.slime import to_samples


async def episode() -> InteractionResult:
    return (await play(ListedWorld(**WORLD)))[0]


async def test_a_sample_has_the_inputs_of_its_images(sample_type: Any) -> None:
    pytest.importorskip("torch")
    result = await episode()
    images = image_tokens(vision_tokenizer())
    [made] = to_samples(sample_type(index=0), result, images=images)
    media, inputs = result.trajectories[0].media, made.multimodal_train_inputs
    patches = [4 * image.count for image in media]
    assert inputs["image_grid_thw"].prod(-1).tolist() == patches
    assert len(inputs["pixel_values"]) == sum(patches)
    assert made.tokens.count(images.placeholder) == sum(image.count for image in media)


async def test_each_sample_of_a_fork_has_the_images_of_its_own_prompt(sample_type: Any) -> None:
    pytest.importorskip("torch")
    source = vision_tokenizer().chat_template.replace(
        "{{- message.content }}", "{{- message.content.split('</think>')[-1] }}"
    )
    users = [shown("One.", 1), shown("Two.", 2)]
    result, _ = await play(
        ListedWorld(user_texts=users), lambda request: "<think>I</think>A.", chat_template=source
    )
    images = image_tokens(vision_tokenizer())
    samples = to_samples(sample_type(index=0), result, images=images)
    assert [len(one.multimodal_train_inputs["image_grid_thw"]) for one in samples] == [1, 2]


async def test_text_alone_leaves_no_inputs(sample_type: Any) -> None:
    result, _ = await play(ListedWorld(), lambda request: "Yes.")
    before = sample_type(index=0)
    before.multimodal_train_inputs = {"pixel_values": 1}  # of an earlier attempt
    [made] = to_samples(before, result, images=image_tokens(vision_tokenizer()))
    assert made.multimodal_train_inputs is None


async def test_other_images_are_refused(sample_type: Any) -> None:
    pytest.importorskip("torch")
    result = await episode()
    images, [trajectory] = image_tokens(vision_tokenizer()), result.trajectories
    for changes, error in (({"url": ""}, UsageError), ({"count": 1}, TokenError)):
        media = tuple(replace(image, **changes) for image in trajectory.media)
        other = replace(result, trajectories=(replace(trajectory, media=media),))
        with pytest.raises(error):
            to_samples(sample_type(index=0), other, images=images)
    for convert in (lambda: to_samples(sample_type(index=0), result),
                    lambda: select_sequences(result, several=True)):  # fmt: skip
        with pytest.raises(UsageError, match="this trainer takes none"):
            convert()


async def test_a_parked_episode_has_its_images() -> None:
    [trajectory] = (await episode()).trajectories
    turn = trajectory.turns[0]
    request = GenerateRequest(trajectory.input_ids[: turn.start], {}, "s", images=trajectory.media)
    parked = ParkableEpisode("s", lambda: False)
    aborted = Completion(trajectory.input_ids[turn.start : turn.stop], None, "abort")
    parked._aborted = request, aborted
    assert parked.so_far(lambda ids: "").trajectories[0].media == trajectory.media
