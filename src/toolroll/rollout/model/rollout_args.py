"""`read_args`: reads `RolloutArgs` from a mapping or a trainer's Namespace, which may have the
names of slime's published tau-bench example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolroll.rollout.settings import RolloutArgs

PUBLISHED = {
    "hf_checkpoint": "model",
    "apply_chat_template_kwargs": "chat_template_kwargs",
    "tool_call_parser": "parser",
}
"""Maps published names of settings to the names here. The example also has `sglang_router_ip` and
`sglang_router_port`, which become `engine`, and `use_http2`, which has no effect: HTTP/1.1 with one
connection pool is faster with SGLang.
"""
_ROUTER = ("sglang_router_ip", "sglang_router_port")


def read_args(value: Any) -> RolloutArgs:
    """Return `value` as `RolloutArgs`.

    `value` is None, a mapping, a `RolloutArgs`, or a Namespace (or another object with attributes).
    All keys of a mapping must be settings. A Namespace may have other attributes, which are
    ignored. Raise `UsageError` if a value is not valid.
    """
    if isinstance(value, RolloutArgs):
        return value
    if value is None:
        return RolloutArgs()
    names = {*RolloutArgs.model_fields, *PUBLISHED, *_ROUTER}
    values = (
        dict(value)
        if isinstance(value, Mapping)
        else {
            name: item for name, item in vars(value).items() if name in names and item is not None
        }
    )
    values.pop("use_http2", None)
    if any(name in values for name in _ROUTER):
        host, port = values.pop(_ROUTER[0], "127.0.0.1"), values.pop(_ROUTER[1], 30000)
        values["engine"] = f"http://{host}:{port}"
    published = {PUBLISHED[name]: values.pop(name) for name in PUBLISHED if name in values}
    return RolloutArgs.read(values | published, where="rollout_args")
