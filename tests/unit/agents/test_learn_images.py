"""The environment of `examples/learn_images`, played by an engine without weights."""

from __future__ import annotations

from examples.learn_images.cards import CARDS
from examples.learn_images.play import play_script
from support.vision import vision_tokenizer

from toolroll.rollout.media import collapsed
from toolroll.testing.reference_policy import play_references

TASKS = [task for split in CARDS.splits for task in CARDS.tasks(split)[:4]]


async def test_every_reference_earns_everything() -> None:
    """Only the images tell the tasks apart: before the answer, all have the same text."""
    replies = play_references(CARDS, TASKS, samples=1)
    episodes = await play_script(replies, vision_tokenizer(), TASKS)
    assert [episode.result.reward for episode in episodes] == [1.0] * len(TASKS)
    trajectories = [episode.result.trajectories[0] for episode in episodes]
    assert len({tuple(image.sha256 for image in each.media) for each in trajectories}) == len(TASKS)
    before = {
        tuple(collapsed(each.input_ids[: each.turns[-1].start], each.media).tolist())
        for each in trajectories
    }
    assert len(before) == 1


async def test_the_reference_of_another_task_earns_nothing() -> None:
    replies = play_references(CARDS, TASKS, samples=1)
    others = dict(zip(replies, [*list(replies.values())[1:], ["It is 12."]], strict=True))
    episodes = await play_script(others, vision_tokenizer(), TASKS)
    assert [episode.result.reward for episode in episodes] == [0.0] * len(TASKS)


async def test_a_wrong_call_does_not_end_the_episode() -> None:
    [task] = tasks = TASKS[:1]
    [(key, right)] = play_references(CARDS, tasks, samples=1).items()
    wrong = ['"look", "arguments": {"card": 3}', '"turn", "arguments": {}']
    first = [f'<tool_call>{{"name": {call}}}</tool_call>' for call in wrong]
    [episode] = await play_script({key: [*first, *right]}, vision_tokenizer(), [task])
    assert episode.result.reward == 1.0


def test_the_splits_share_no_image() -> None:
    used = [
        {at for task in CARDS.tasks(split) for at in task.data["cards"]} for split in CARDS.splits
    ]
    assert sum(map(len, used)) == len(set.union(*used))
