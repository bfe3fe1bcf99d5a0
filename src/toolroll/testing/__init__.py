"""An embedded engine with SGLang's `/generate` endpoint, and a small tokenizer. The engine's
replies are scripted, or sampled by a small language model.
"""

from toolroll.rollout.model.tokenizers import (
    embedded_tokenizer_path,
    load_embedded_tokenizer,
)
from toolroll.testing.engine import EmbeddedEngine, serve_in_thread
from toolroll.testing.faults import (
    Fault,
    FaultPlan,
    fault_at,
)
from toolroll.testing.policy import (
    LoggedRequest,
    Policy,
    PolicyRequest,
    Reply,
    echo,
    script,
)
from toolroll.testing.reference_policy import (
    play_episode,
    play_references,
    reference_policy,
)
from toolroll.testing.sampler import TokenSplitter
from toolroll.testing.scripted_source import reference_logprob, reference_logprobs
from toolroll.testing.serve import load_engine

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
