"""What the adapter reads of a server in Atropos' `ServerManager` (atroposlib 0.4.0)."""

import asyncio
from types import SimpleNamespace


def atropos_server(engine: str, *, slots: int = 16) -> SimpleNamespace:
    """A server whose engine is at this address, with so many requests at once."""
    config = SimpleNamespace(
        base_url=f"{engine}/v1", api_key="x", timeout=60, server_type="sglang",
        model_name="embedded", tokenizer_name="none",
    )  # fmt: skip
    return SimpleNamespace(
        config=config,
        sem=asyncio.Semaphore(slots),
        eval_sem=asyncio.Semaphore(slots),
        server_healthy=True,
    )
