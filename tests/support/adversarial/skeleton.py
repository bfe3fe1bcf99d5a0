"""The skeleton of a chat template, and its slots."""

SLOTS = {
    "top": "",
    "head": "{% if tools %}<|turn|>system\n{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% "
    "endfor %}<|end|>\n{% endif %}",
    "loop": "{% for m in messages %}",
    "each": "",
    "think": "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif "
    "%}",
    "said": "{{ m.content or '' }}",
    "calls": "{% for c in m.tool_calls or [] %}{CALL}{% endfor %}",
    "call": '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | '
    "tojson }}}</tool_call>",
    "tool": "<tool_response>{{ m.content }}</tool_response>",
    "user": "{{ m.content }}",
    "after": "",
    "end": "{% endfor %}",
    "prompt": "",
    "opening": "",
}

_SKELETON = (
    "{TOP}{HEAD}{LOOP}{EACH}{% if m.role == 'assistant' %}<|turn|>assistant\n"
    "{THINK}{SAID}{CALLS}<|end|>\n{% elif m.role == 'tool' %}<|turn|>tool\n{TOOL}<|end|>\n"
    "{% else %}<|turn|>{{ m.role }}\n{USER}<|end|>\n{% endif %}"
    "{AFTER}{END}{% if add_generation_prompt %}{PROMPT}<|turn|>assistant\n{OPENING}{% endif %}"
)


def filled(**slots: str) -> str:
    """The skeleton with `slots` in the place of its own. The slot `call` is filled into `calls`."""
    text = _SKELETON
    for name, default in SLOTS.items():
        text = text.replace("{" + name.upper() + "}", slots.get(name, default))
    return text
