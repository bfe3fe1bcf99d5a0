"""verifiers itself (0.4.0): the parts that the adapter's tests use, in this process."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from support.bare import borrowed

import toolroll.trainers.verifiers.client

_NEEDED = ("verifiers", "anthropic", "docstring_parser", "tomli_w", "renderers", "pydantic_config")
_NAMES = {
    "clients": "Client ModelContext TrainClientConfig",
    "dialects.anthropic": "AnthropicDialect",
    "dialects.chat": "ChatDialect",
    "errors": "ProviderError",
    "graph": "prepare_turn",
    "interception.server": "InterceptionServer",
    "session": "RolloutSession",
    "trace": "Trace",
    "types": "SamplingConfig",
}


def need_verifiers() -> None:
    """Skip the test if verifiers or a dependency is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(
            "pip install --no-deps verifiers==0.4.0 anthropic docstring-parser tomli-w "
            f"(no {missing[0]})"
        )


@contextmanager
def verifiers_parts() -> Iterator[SimpleNamespace]:
    """verifiers' classes and functions, and the adapter's for them."""
    need_verifiers()
    with borrowed("verifiers verifiers.v1", without="prime_sandboxes"):
        ours = importlib.reload(toolroll.trainers.verifiers.client)
        parts = SimpleNamespace(EndpointClient=ours.EndpointClient, register=ours.register)
        for module, names in _NAMES.items():
            theirs = importlib.import_module(f"verifiers.v1.{module}")
            for name in names.split():
                setattr(parts, name, getattr(theirs, name))
        parts.new_trace = lambda name: parts.Trace.model_construct(
            id=name, nodes=[], calls=[], tools=[]
        )
        yield parts
