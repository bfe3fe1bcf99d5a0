"""The trainer of `examples/learn_images`: its logprobs are the model's, each with its images."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.learn_images import __main__ as trainer
from examples.learn_images.cards import CARDS
from examples.learn_images.model import Seen, load, logprobs
from examples.learn_images.play import play_script
from support.vision import image_tokens

from toolroll.testing.reference_policy import play_references

TASKS = CARDS.tasks("train")[:4]
torch.set_num_threads(1)  # with more, it waits for the other processes of the tests


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after a few steps of imitation."""
    folder = tmp_path_factory.mktemp("images") / "start"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"REFERENCES": 8, "IMITATION": 40, "UNSURE": 10, "BATCH": 4}.items():
            patch.setattr(trainer, name, value)
        trainer.imitate(folder)
    return folder


async def samples(tokenizer: Any, *endings: list[str]) -> list[Seen]:
    """Return a sample of each task: the reference's, or replies of its own."""
    replies = play_references(CARDS, TASKS, samples=1)
    replies |= dict(zip(replies, endings, strict=False))
    episodes = await play_script(replies, tokenizer, TASKS)
    images = image_tokens(tokenizer)
    return [sample for episode in episodes for sample in trainer.seen(episode, images)]


def by_transformers(model: Any, seen: Seen) -> list[float]:
    """Return the logprobs of one sample's trained tokens, without batch and padding."""
    ids = torch.tensor(seen.sample.ids[None]).long()
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            **seen.images,
        ).logits[0]
    chosen = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    mask = torch.tensor(seen.sample.loss_mask[1:]).bool()
    return chosen[mask].tolist()


async def test_logprobs_of_a_batch_are_those_of_each_sample(start: Path) -> None:
    """The samples have two images, one and none, so their lengths differ."""
    tokenizer, model = load(start)
    look = '<tool_call>{"name": "look", "arguments": {"card": 1}}</tool_call>'
    batch = await samples(tokenizer, ["I do not know."], [look, "I give up."])
    assert len({len(one.sample.ids) for one in batch}) == 3
    values, _, owner = logprobs(model, batch)
    alone = [by_transformers(model, one) for one in batch]
    assert values.tolist() == pytest.approx([value for each in alone for value in each], abs=1e-4)
    assert owner.tolist() == [place for place, each in enumerate(alone) for _ in each]


async def test_exchanged_images_change_only_samples_with_images(start: Path) -> None:
    tokenizer, model = load(start)
    batch = await samples(tokenizer, ["I do not know."])
    right, _, owner = logprobs(model, batch)
    exchanged, _, _ = logprobs(model, batch, random.Random(1))
    differences = (right - exchanged).abs().detach()
    assert differences[owner == 0].max() < 1e-6
    assert differences[owner != 0].max() > 1e-4
