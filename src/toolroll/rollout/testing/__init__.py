"""An embedded engine with SGLang's `/generate` endpoint, and a small tokenizer. The engine's
replies are scripted, or sampled by a small language model.
"""

from toolroll.rollout.model.tokenizers import (
    embedded_tokenizer_path,
    load_embedded_tokenizer,
)
from toolroll.rollout.testing.engine import EmbeddedEngine, serve_in_thread
from toolroll.rollout.testing.faults import (
    Fault,
    FaultPlan,
    fault_at,
)
from toolroll.rollout.testing.policy import (
    LoggedRequest,
    Policy,
    PolicyRequest,
    Reply,
    echo,
    script,
)
from toolroll.rollout.testing.reference_policy import (
    play_episode,
    play_references,
    reference_policy,
)
from toolroll.rollout.testing.sampler import TokenSplitter
from toolroll.rollout.testing.scripted_source import reference_logprob, reference_logprobs
from toolroll.rollout.testing.serve import load_engine

__all__ = [
    "EmbeddedEngine",
    "Fault",
    "FaultPlan",
    "LoggedRequest",
    "Policy",
    "PolicyRequest",
    "Reply",
    "TokenSplitter",
    "echo",
    "embedded_tokenizer_path",
    "fault_at",
    "load_embedded_tokenizer",
    "load_engine",
    "play_episode",
    "play_references",
    "reference_logprob",
    "reference_logprobs",
    "reference_policy",
    "script",
    "serve_in_thread",
]
