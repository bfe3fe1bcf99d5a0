"""Run SGLang's own parsers in a separate process, because their imports need stubs that other tests
must not see.

As a script it reads JSON from stdin, `{"theirs": [[name, text, tools], ...], "ours": [...]}`, and
writes the results of SGLang's parser of that name, and of `sglang:NAME`, for each text.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from support.processes import printed

Case = tuple[str, str, list[dict[str, Any]]]


def ask(theirs: list[Case], ours: list[Case] | None = None) -> dict[str, list[Any]]:
    """`theirs`: `{text, calls: [[name, arguments or null]]}` for each case, calls null where it
    raised; `ours`: `{content, calls: [[name, status, error]]}`; `names`: SGLang's names of parsers.
    """
    source = str(Path(__file__).parents[2] / "src")
    stubs = str(Path(__file__).with_name("stubs"))
    path = os.pathsep.join((stubs, source, os.environ.get("PYTHONPATH", "")))
    env = {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_LOG_LEVEL": "critical"}
    cases = json.dumps({"theirs": theirs, "ours": ours or []})
    # as a script it would import this folder's http.py instead of Python's
    module, tests = "support.sglang_side", Path(__file__).parents[1]
    out = printed("-m", module, cwd=tests, input=cases, env=os.environ | env)
    found: dict[str, list[Any]] = json.loads(out.splitlines()[-1])
    return found


def _main() -> None:
    import logging

    logging.disable(logging.CRITICAL)
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    from toolroll.parsers.registry import get_parser

    cases = json.load(sys.stdin)
    theirs: list[dict[str, Any]] = []
    for name, text, tools in cases["theirs"]:
        try:
            parser = FunctionCallParser([Tool(**tool) for tool in tools], name)
            content, items = parser.parse_non_stream(text)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            theirs.append({"text": repr(error), "calls": None})
            continue
        found = [[item.name, _arguments(item.parameters)] for item in items]
        theirs.append({"text": content, "calls": found})
    ours = []
    for name, text, tools in cases["ours"]:
        reply = get_parser(f"sglang:{name}").parse(text, tools=tools, in_reasoning=False)
        calls = [[call.name, call.status.value, call.error] for call in reply.tool_calls]
        ours.append({"content": reply.content, "calls": calls})
    names = list(FunctionCallParser.ToolCallParserEnum)
    sys.stdout.write(f"\n{json.dumps({'theirs': theirs, 'ours': ours, 'names': names})}\n")


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


if __name__ == "__main__":
    _main()
