"""Play episodes as slime's tau-bench example does, for `toolroll audit` (docs/audit.md): with the
example's own function for the tokens of a message, and scripted replies in place of SGLang.

    python examples/audit_slime.py SLIME MODEL OUT

SLIME: a checkout. MODEL: a tokenizer. It writes OUT/samples.jsonl, and OUT/requests.log as SGLang
writes its log.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EPISODES = 40
CALL = '<tool_call>\n{"name": "find_order", "arguments": {"id": "W1"}}\n</tool_call>'
ORDER = {"role": "tool", "name": "find_order", "content": "shipped"}
USER = {"role": "user", "content": "Yes, please."}
Delta = Callable[..., tuple[list[int], list[int]]]


def token_delta(slime: Path) -> Delta:
    """Return the example's function: of a module since slime's #2213, a method before."""
    for path in sorted((slime / "examples" / "tau-bench").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("get_token_delta"):
                names: dict[str, Any] = {}
                exec("from __future__ import annotations\n" + ast.unparse(node), names)
                of_method = node.args.args[0].arg == "self"
                return _without_self(names[node.name]) if of_method else names[node.name]
    raise SystemExit(f"{slime} has no get_token_delta in examples/tau-bench")


def _without_self(method: Callable[..., Any]) -> Delta:
    return lambda *arguments, **_: method(None, *arguments)


def play(
    tokenizer: Any, said: Sequence[str], answers: Sequence[dict[str, str]], delta: Delta
) -> tuple[dict[str, Any], list[str]]:
    """Return an episode as slime's sample, and the log. The answers follow the turns."""
    messages = [{"role": "user", "content": "I want to return it."}]
    tokens, mask, log = list[int](), list[int](), list[str]()
    for text, answer in zip(said, answers, strict=True):
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokens or tokenizer.encode(prompt, add_special_tokens=False)
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        sizes = {"prompt_tokens": len(tokenizer.encode(prompt)), "completion_tokens": len(ids)}
        line = {"event": "request.finished", "rid": "x", "obj": {"input_ids": None, "text": prompt}}
        log.append(json.dumps(line | {"out": {"output_ids": ids, "meta_info": sizes}}))
        for message in ({"role": "assistant", "content": text}, answer):
            messages.append(message)
            opens = {"include_generation_prompt": True} if mask and answer is not message else {}
            added, bits = delta(tokenizer, messages, **opens)
            tokens, mask = tokens + added, mask + bits
    return {"tokens": tokens, "loss_mask": mask, "response_length": len(mask)}, log


def main(slime: str, model: str, out: str) -> None:
    from transformers import AutoTokenizer

    tokenizer, delta = AutoTokenizer.from_pretrained(model), token_delta(Path(slime))
    steps, rng = [(CALL, ORDER), ("Is that all?", USER)], random.Random(0)
    samples, log = list[str](), list[str]()
    for _ in range(EPISODES):
        chosen = [steps[0], *rng.choices(steps, k=rng.randint(1, 5)), ("Done.", USER)]
        said = [f"<think>\nI look, {rng.random()}.\n</think>\n\n{text}" for text, _ in chosen]
        sample, lines = play(tokenizer, said, [answer for _, answer in chosen], delta)
        samples.append(json.dumps(sample) + "\n")
        log += [line + "\n" for line in lines]
    Path(out).mkdir(parents=True)
    Path(out, "samples.jsonl").write_text("".join(samples), encoding="utf-8")
    Path(out, "requests.log").write_text("".join(log), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
