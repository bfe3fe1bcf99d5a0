"""The old name of `toolroll.rollout.model.model`."""

from toolroll.rollout.model.model import *  # noqa: F403

ServedModel = Model  # noqa: F405
