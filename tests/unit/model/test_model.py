"""`Model`: engine, template, parser and executor, made from arguments in any form."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from support.episodes import serving
from transformers import dynamic_module_utils

from toolroll import ChatTemplate, GenerateRequest, Message, load_tokenizer
from toolroll.cli.check_template import report as report_on
from toolroll.rollout.errors import ContextOverflowError, TemplateError, UsageError
from toolroll.rollout.model.model import Model, read_template
from toolroll.rollout.model.rollout_args import read_args
from toolroll.testing import Fault, embedded_tokenizer_path, fault_at

ASK: list[Message] = [{"role": "user", "content": "Hi."}]
ASKED = GenerateRequest(np.array([5, 6, 7], dtype=np.int32), {"max_new_tokens": 20}, "s")


@pytest.mark.parametrize(
    "kind", [dict, lambda **given: Namespace(**given, rollout_batch_size=8, hf_model=None)]
)
async def test_it_is_made_from_arguments_in_any_form(kind: Any) -> None:
    given = kind(
        sglang_router_ip="10.1.2.3",
        sglang_router_port=3001,
        hf_checkpoint="embedded",
        context_length=77,
    )
    async with Model.from_args(read_args(given)) as served:
        assert served.url == "http://10.1.2.3:3001"
        assert served.name == "embedded"
        assert served.engine.config.context_length == 77  # type: ignore[attr-defined]
        assert served.engine.config.vocab_size == len(served.template.tokenizer)  # type: ignore[attr-defined]


def test_a_tokenizer_is_found_here_or_on_the_hub(here: Path, monkeypatch: Any, caplog: Any) -> None:
    assert len(load_tokenizer("embedded")) == len(load_tokenizer(str(embedded_tokenizer_path())))
    with pytest.raises(UsageError, match="no tokenizer is named"):
        load_tokenizer("")
    with pytest.raises(UsageError, match="no tokenizer can be loaded from") as raised:
        load_tokenizer(str(here))
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="no tokenizer can be loaded from 'nobody/nothing'"):
        load_tokenizer("nobody/nothing")
    [said] = caplog.messages
    assert said.startswith("'nobody/nothing' is not on this machine: looking for it on the hub")
    with pytest.raises(UsageError, match="no tokenizer can be loaded from"):
        load_tokenizer(str(here))
    assert len(caplog.messages) == 1


def test_a_template_is_a_file_or_jinja_and_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_template(str(file)) == "{{ 'é' }}" == read_template("{{ 'é' }}")
    assert read_template("{% if x %}{% endif %}") and read_template(None) is None
    with pytest.raises(UsageError, match="neither a file nor Jinja text"):
        read_template(str(tmp_path / "none.jinja"))
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="has no chat template: give one with chat_template="):
        Model.from_args(read_args({}), tokenizer=tokenizer)


CODE = """
from transformers import PreTrainedTokenizerFast

def render(messages, *, tools, add_generation_prompt, system=""):
    text = system + "".join("<|turn|>%s\\n%s<|end|>" % (m["role"], m["content"]) for m in messages)
    return text + "<|turn|>assistant\\n" * add_generation_prompt

class CodeTokenizer(PreTrainedTokenizerFast):
    def apply_chat_template(self, messages, tools=None, tokenize=True, **variables):
        return render(messages, tools=tools, **variables)
"""


def test_a_model_that_renders_in_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has a tokenizer class but no template; or a file has a function."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    own = {"AutoTokenizer": [None, "code.CodeTokenizer"]}
    with_class = config | {"auto_map": own, "tokenizer_class": "CodeTokenizer"}
    (tmp_path / "code.py").write_text(CODE)
    given = {"model": str(tmp_path), "parser": "hermes", "pace_gc": False}
    given |= {"chat_template_kwargs": {"system": "s"}}
    file = {"chat_template": f"{tmp_path / 'code.py'}:render"}
    prompts = [Model.from_args(read_args(given | file)).template.prompt(ASK)]
    with pytest.raises(TemplateError, match="has no chat template"):
        Model.from_args(read_args(given))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(with_class))
    with pytest.raises(UsageError, match="trust_remote_code"):
        Model.from_args(read_args(given))
    trusted = Model.from_args(read_args(given | {"trust_remote_code": True}))
    prompts.append(trusted.template.prompt(ASK))
    text = "s<|turn|>user\nHi.<|end|><|turn|>assistant\n"
    assert prompts == [tokenizer.encode(text)] * 2
    report = report_on(str(tmp_path), None, None, trust_remote_code=True)
    assert report.stop_tokens == {"<|end|>": tokenizer.convert_tokens_to_ids("<|end|>")}


async def test_effective_parameters_have_stop_tokens_and_the_room_left(tokenizer: Any) -> None:
    async with serving(tokenizer, lambda r: "x", context_length=100) as (_, served):
        given = {"stop_token_ids": [9, 3], "temperature": 0.7}
        params = await served.effective_params(given, 90, served.template)
        stops = sorted({3, 9, tokenizer.eos_token_id})
        assert params == {"temperature": 0.7, "stop_token_ids": stops, "max_new_tokens": 10}
        assert given == {"stop_token_ids": [9, 3], "temperature": 0.7}
        with pytest.raises(ContextOverflowError):
            await served.effective_params({}, 100, served.template)


@pytest.mark.parametrize(("resumes", "requests", "finish"), [(0, 1, "abort"), (1, 2, "stop")])
async def test_resumed_aborts(tokenizer: Any, resumes: int, requests: int, finish: str) -> None:
    faults = fault_at({0: Fault(abort_after=2)})
    async with serving(
        tokenizer, lambda r: "one two three", faults=faults, max_resumes=resumes
    ) as (engine, served):
        answer = await served.generate(ASKED)
    assert answer.finish_reason == finish
    assert served.sampled == (1, len(answer.output_ids)), "a resumed turn is one"
    assert len(engine.log) == requests


def test_a_hooked_template_is_made_once_a_hook(tokenizer: Any) -> None:
    def louder(text: str) -> str:
        return text.replace("Be brief.", "BE BRIEF.")

    template = ChatTemplate(tokenizer)
    first = template.reformulated(louder)
    assert template.reformulated(louder) is first is not template
    messages = [{"role": role, "content": "Be brief."} for role in ("system", "user")]
    text = first.encoder.decode(first.prompt(messages))
    assert (text.count("BE BRIEF."), text.count("Be brief.")) == (1, 1), "only the head is changed"
