"""The report on a chat template: what each family is known for, and that `wrong` is found."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.adversarial.skeleton import filled
from support.adversarial.zoo import tokenizer_of_kind
from support.commands import toolroll
from support.qwen import tokenizer_for, tool_templates, trl_template
from support.tiers import by_tier

from toolroll.evaluation.certify import TemplateReport, certify
from toolroll.rollout.errors import UsageError
from toolroll.rollout.template import ChatTemplate, Cursor
from toolroll.rollout.template.encode import Encoder
from toolroll.trainers.episodes import check_template

pytestmark = pytest.mark.tokens

TEMPLATES = tool_templates()
# Templates of which somebody who trains must know that tool results are not appended, and why.
NOT_EXACT = ("deepseek_r1_distill", "deepseekv3", "cohere2")
NOTHINK = {"enable_thinking": False}


def report_on(name: str, **settings: Any) -> TemplateReport:
    return certify(ChatTemplate(tokenizer_for(TEMPLATES[name]), **settings))


def probes_of(report: TemplateReport) -> dict[str, Any]:
    return {probe.name: probe for probe in report.probes}


def outcomes(report: TemplateReport) -> dict[str, str]:
    return {name: probe.outcome for name, probe in probes_of(report).items()}


@pytest.mark.parametrize(
    "name", by_tier(name for name in TEMPLATES if not name.endswith("_training"))
)
def test_only_the_known_templates_are_not_exact(name: str) -> None:
    report = report_on(name)
    assert "wrong" not in outcomes(report).values()
    known = any(name.split("/")[-1].startswith(family) for family in NOT_EXACT)
    assert report.exact is not known
    assert bool(report.remarks()) == (set(outcomes(report).values()) != {"append"})
    assert report.stop_tokens


def test_qwen3s_report() -> None:
    report = report_on("qwen3")
    names = ("plain_user", "tool", "user", "text_tool", "parallel", "check")
    # it takes thoughts out of history
    assert outcomes(report) == {name: "fork" if name == "user" else "append" for name in names}
    assert "<|im_end|>" in report.stop_tokens
    assert report.generation_prompt == "<|im_start|>assistant\n"
    assert report.opens_reasoning == {"user message": False, "tool result": False}
    assert not report.dated
    assert report.tools_change.startswith("fork")
    assert [probe.preserved for probe in report.probes] == [None, None, True, None, None, None]
    assert all("a second training sequence begins there" in line for line in report.remarks())


def test_a_step_that_a_template_refuses_does_not_end_the_replay() -> None:
    report = report_on("llama3_1")
    parallel = probes_of(report)["parallel"]
    assert (parallel.outcome, parallel.preserved) == ("refuse", None)
    assert parallel.detail == "This model only supports single tool-calls at once!"
    assert report.exact and report.sequences
    assert any("stop_reason template_error" in line for line in report.remarks())
    assert report.dated == ("strftime_now" in TEMPLATES["llama3_1"])


def test_a_preserved_sequence_that_cannot_be_continued_is_told() -> None:
    report = report_on("gemma4")
    found = {probe.name: probe.preserved for probe in report.probes if probe.outcome == "fork"}
    assert found == {"user": True, "text_tool": False}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cohere2", "Conversation roles must alternate"), ("gemma", "System role not supported")],
)
def test_a_template_that_refuses_results_or_the_first_prompt(name: str, reason: str) -> None:
    report = certify(ChatTemplate(tokenizer_for(trl_template(name))))
    assert not report.exact and not report.exact_with("scaffold")
    assert outcomes(report) == {"tool": "refuse", "check": "append"}
    assert report.probes[0].detail.startswith(reason)
    assert report.sequences == {} and report.forks("fork") is None


@pytest.mark.parametrize(
    ("name", "kwargs", "sequences", "advice"),
    [
        ("qwen3", {}, (4, 4, 1), "use history=preserve: its prompts keep text"),
        ("qwen3", NOTHINK, (12, 1, 1), "use history=scaffold, which gives one sequence"),
        ("qwen3_5_nothink", {}, (4, 1, 1), "use history=scaffold, which gives one sequence"),
        ("glm4moe", {}, (4, 4, 1), "use history=preserve: its prompts keep text"),
        ("glm4moe", NOTHINK, (1, 1, 1), None),
        ("qwen2_5", {}, (1, 1, 1), None),
    ],
)
def test_the_sequences_of_an_episode(name: str, kwargs: Any, sequences: Any, advice: Any) -> None:
    report = report_on(name, kwargs=kwargs)
    assert tuple(map(len, report.sequences.values())) == sequences
    assert list(report.sequences) == ["fork", "scaffold", "preserve"]
    told = report.forks("fork")
    if advice is None:
        assert told is None
        return
    assert told is not None and advice in told
    share = max(report.sequences["fork"]) / sum(report.sequences["fork"])
    assert f"{sequences[0]} sequences, of which the largest has {share:.0%}" in told
    assert report.forks("preserve") is None
    assert report.exact_with("scaffold") or sequences[1] > 1


def test_a_template_is_probed_once_for_the_same_switches() -> None:
    tokenizer = tokenizer_for(TEMPLATES["qwen3"])
    quiet, plain = ChatTemplate(tokenizer, kwargs=NOTHINK), ChatTemplate(tokenizer)
    assert certify(plain) is report_on("qwen3")
    assert quiet.fingerprint != plain.fingerprint
    assert certify(quiet) is not certify(plain)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "deepseekv3"])
def test_a_wrong_delta_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after = Cursor.after

    def careless(*arguments: Any) -> tuple[Any, Cursor]:
        """Leave out the last token of each delta."""
        delta, cursor = after(*arguments)
        return delta[:-1], cursor

    template = ChatTemplate(tokenizer_for(TEMPLATES[name]), kwargs={"careless": True})
    with monkeypatch.context() as patched:
        patched.setattr(Cursor, "after", careless)
        report = certify(template)
    assert not report.exact
    [wrong] = [probe for probe in report.probes if probe.outcome == "wrong"]
    assert wrong.name == "check" and "history=preserve: delta" in wrong.detail
    assert any("please report this template" in line for line in report.remarks())
    with pytest.raises(UsageError, match=r"its tokens would be wrong.*delta"):
        check_template(template)


def test_the_missing_tokens_of_another_models_template_are_named() -> None:
    report = report_on("qwen3", chat_template=TEMPLATES["llama3_1"])
    assert not report.exact
    assert report.missing_tokens == ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    [remark] = report.remarks()
    assert "do not belong together" in remark
    assert "<|eot_id|>" in remark
    assert "report" not in remark


def test_markers_in_plain_text_are_not_missing_tokens() -> None:
    zephyr = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    plain = "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
    for template in (zephyr, plain):
        tokenizer = tokenizer_for(TEMPLATES["qwen3"])
        assert certify(ChatTemplate(tokenizer, chat_template=template)).missing_tokens == ()


class Beginning(Encoder):
    """Encodes each piece as if it began a text."""

    def _encode_piece(self, piece: str, place: Any) -> list[int]:
        return super()._encode_piece(piece, place if place == "text" else "start")


def test_pieces_that_are_encoded_otherwise_are_not_exact() -> None:
    tokenizer = tokenizer_of_kind("metaspace_first", ["<|turn|>", "<|end|>"], "<|end|>")
    tokenizer.chat_template = filled()
    report = certify(ChatTemplate(tokenizer))
    assert report.exact and report.remarks() == []
    beginning = {"kwargs": {"beginning": True}, "encoder": Beginning(tokenizer)}
    report = certify(ChatTemplate(tokenizer, **beginning))  # type: ignore[arg-type]
    assert not report.exact
    [remark] = report.remarks()
    assert "history=fork: prompt" in remark


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer_for(TEMPLATES["qwen2_5"]).save_pretrained(folder)
    return folder


def test_the_command_exits_0_if_exact(model: Path, here: Path) -> None:
    words = ["becomes 4 sequences, of which the largest has 25%", "history=scaffold"]
    words += ["Tool calling is exact, except for the forks above", "<|im_end|> ("]
    Path("other.jinja").write_text(TEMPLATES["qwen3_5_nothink"])
    shown = toolroll("check-template", model, "--chat-template", "other.jinja")
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert [each for each in words if each not in text] == []


def test_the_command_prints_json_and_exits_1_where_it_cannot_be(model: Path, here: Path) -> None:
    text = TEMPLATES["qwen2_5"]
    for old in ("<tool_response>\\n'", "messages[0]['content']"):
        assert old in text
        text = text.replace(old, f"{old} + messages|length|string")
    Path("other.jinja").write_text(text)
    shown = toolroll("check-template", model, "--chat-template", "other.jinja", "--json")
    assert shown.exit_code == 1, shown.output
    report = json.loads(shown.output)
    assert report["exact"] is False
    assert {probe["outcome"] for probe in report["probes"]} & {"fork", "refuse"}
