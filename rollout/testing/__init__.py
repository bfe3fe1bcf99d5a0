"""Public test doubles: an embedded engine that speaks SGLang's `/generate`, and a small tokenizer."""

from toolroll.rollout.testing.engine import EmbeddedEngine, LoggedRequest
from toolroll.rollout.testing.logprob import reference_logprob, reference_logprobs
from toolroll.rollout.testing.player import play_references, reference_policy
from toolroll.rollout.testing.policy import Fault, Policy, PolicyRequest, Reply, echo, script
from toolroll.rollout.testing.splits import random_split
from toolroll.rollout.testing.tokenizer_files import load_embedded_tokenizer

__all__ = [
    "EmbeddedEngine",
    "Fault",
    "LoggedRequest",
    "Policy",
    "PolicyRequest",
    "Reply",
    "echo",
    "load_embedded_tokenizer",
    "play_references",
    "random_split",
    "reference_logprob",
    "reference_logprobs",
    "reference_policy",
    "script",
]
