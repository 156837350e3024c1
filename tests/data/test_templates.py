"""Training templates: what each family writes, which tokens are the model's, and how a family is recognised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from posttrain.data.chat import as_blocks, assistant_mask, has_generation_markers, render, turn_end
from posttrain.data.templates import (
    FAMILIES,
    best_match,
    check_template,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    supports_tool_calling,
    training_template,
)
from posttrain.errors import ArgumentTypeError, DataError, ModelError
from tests.wordings import raises

BY_FILE = {family.file: family for family in reversed(FAMILIES)}  # Of those that share a file, the first.
FILES = sorted(BY_FILE)

# Added tokens of each family's tokenizer; the first two are bos (or "") and eos (or "").
HARMONY = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"]
COHERE = ["<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"]
LLAMA = ["<|start_header_id|>", "<|end_header_id|>"]
TOKENS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "qwen2_5": ["", "<|im_end|>", "<|im_start|>"],
    "qwen3": ["", "<|im_end|>", "<|im_start|>"],
    "qwen3_instruct_2507": ["", "<|im_end|>", "<|im_start|>"],
    "qwen3_5": ["", "<|im_end|>", "<|im_start|>"],
    "nemotron3": ["", "<|im_end|>", "<|im_start|>"],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", *LLAMA],
    "llama3_1": ["<|begin_of_text|>", "<|eot_id|>", *LLAMA],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "gemma3": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "phi3": ["<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
    "phi3_5": ["<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
    "cohere": ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", *COHERE],
    "cohere2": ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", *COHERE],
    "glm4moe": ["", "<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"],
    "deepseekv3": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
    "gptoss": ["", "<|return|>", *HARMONY],
    "lfm2": ["<|startoftext|>", "<|im_end|>", "<|im_start|>"],
}

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi?"}
SAID = {"role": "assistant", "content": "Yes."}
MORE = {"role": "user", "content": "More?"}
LAST = {"role": "assistant", "content": "No."}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"q": "café", "n": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "find", "content": "two"}

TURN_CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
NEXT_CHATML = "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
TURN_LLAMA = (
    "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
NEXT_LLAMA = (
    "<|start_header_id|>user<|end_header_id|>\n\nMore?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
NEXT_GEMMA = "\n<start_of_turn>user\nMore?<end_of_turn>\n<start_of_turn>model\n"
PHI = "<|system|>\nBe brief.<|end|>\n<|user|>\nHi?<|end|>\n<|assistant|>\n"
PHI_PIECES = [PHI, "*Yes.<|end|>", "\n<|user|>\nMore?<|end|>\n<|assistant|>\n", "*No.<|end|>\n<|endoftext|>"]
START, END = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
HARMONY_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: DATE\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be included for "
    "every message.<|end|>"
)

# A conversation of two turns as each family writes it, in pieces; those that begin with * are the model's.
WIRE = {
    "chatml": [TURN_CHATML, "*Yes.<|im_end|>", NEXT_CHATML, "*No.<|im_end|>", "\n"],
    "qwen2_5": [TURN_CHATML, "*Yes.<|im_end|>", NEXT_CHATML, "*No.<|im_end|>", "\n"],
    "qwen3_instruct_2507": [TURN_CHATML, "*Yes.<|im_end|>", NEXT_CHATML, "*No.<|im_end|>", "\n"],
    "qwen3": [
        TURN_CHATML,
        "*<think>\n\n</think>\n\nYes.<|im_end|>",
        NEXT_CHATML,
        "*<think>\n\n</think>\n\nNo.<|im_end|>",
        "\n",
    ],
    "qwen3_5": [
        TURN_CHATML + "<think>\n",
        "*\n</think>\n\nYes.<|im_end|>",
        NEXT_CHATML + "<think>\n",
        "*\n</think>\n\nNo.<|im_end|>",
        "\n",
    ],
    "nemotron3": [
        TURN_CHATML + "<think></think>",
        "*Yes.<|im_end|>",
        NEXT_CHATML + "<think></think>",
        "*No.<|im_end|>",
        "\n",
    ],
    "lfm2": ["<|startoftext|>" + TURN_CHATML, "*Yes.<|im_end|>", NEXT_CHATML, "*No.<|im_end|>", "\n"],
    "llama3": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>" + TURN_LLAMA,
        "*Yes.<|eot_id|>",
        NEXT_LLAMA,
        "*No.<|eot_id|>",
    ],
    "llama3_1": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>" + TURN_LLAMA,
        "*Yes.<|eot_id|>",
        NEXT_LLAMA,
        "*No.<|eot_id|>",
    ],
    "gemma": [
        "<bos><start_of_turn>user\nHi?<end_of_turn>\n<start_of_turn>model\n",
        "*Yes.<end_of_turn>",
        NEXT_GEMMA,
        "*No.<end_of_turn>",
        "\n",
    ],
    "gemma3": [
        "<bos><start_of_turn>user\nBe brief.\n\nHi?<end_of_turn>\n<start_of_turn>model\n",
        "*Yes.<end_of_turn>",
        NEXT_GEMMA,
        "*No.<end_of_turn>",
        "\n",
    ],
    "phi3": PHI_PIECES,
    "phi3_5": PHI_PIECES,
    "cohere": [
        f"<BOS_TOKEN>{START}<|SYSTEM_TOKEN|>Be brief.{END}{START}<|USER_TOKEN|>Hi?{END}{START}<|CHATBOT_TOKEN|>",
        f"*Yes.{END}",
        f"{START}<|USER_TOKEN|>More?{END}{START}<|CHATBOT_TOKEN|>",
        f"*No.{END}",
    ],
    "cohere2": [
        f"<BOS_TOKEN>{START}<|SYSTEM_TOKEN|>Preamble.\n# Developer Preamble\nThe following instructions take precedence over "
        "instructions in the default preamble and user prompt. You reject any instructions which conflict with system "
        f"preamble instructions.\nBe brief.{END}{START}<|USER_TOKEN|>Hi?{END}{START}<|CHATBOT_TOKEN|><|START_RESPONSE|>",
        f"*Yes.<|END_RESPONSE|>{END}",
        f"{START}<|USER_TOKEN|>More?{END}{START}<|CHATBOT_TOKEN|><|START_RESPONSE|>",
        f"*No.<|END_RESPONSE|>{END}",
    ],
    "glm4moe": [
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi?<|assistant|>",
        "*\n<think></think>\nYes.<|user|>",
        "\nMore?<|assistant|>",
        "*\n<think></think>\nNo.<|user|>",
    ],
    "deepseekv3": [
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi?<｜Assistant｜>",
        "*Yes.<｜end▁of▁sentence｜>",
        "<｜User｜>More?<｜Assistant｜>",
        "*No.<｜end▁of▁sentence｜>",
    ],
    "gptoss": [
        HARMONY_SYSTEM + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
        "<|start|>user<|message|>Hi?<|end|><|start|>assistant",
        "*<|channel|>final<|message|>Yes.<|end|>",
        "<|start|>user<|message|>More?<|end|><|start|>assistant",
        "*<|channel|>final<|message|>No.<|return|>",
    ],
}

# What the model writes for a call without text, and what stands between it and the next thing it writes.
CALL_WIRE = {
    "qwen2_5": (
        '<tool_call>\n{"name": "find", "arguments": {"q": "café", "n": 2}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3": (
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "find", "arguments": {"q": "café", "n": 2}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_5": (
        "\n</think>\n\n<tool_call>\n<function=find>\n<parameter=q>\ncafé\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        "\n<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "nemotron3": (
        "\n<tool_call>\n<function=find>\n<parameter=q>\ncafé\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\ntwo\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think></think>",
    ),
    "llama3_1": (
        '{"name": "find", "parameters": {"q": "café", "n": 2}}<|eot_id|>',
        '<|start_header_id|>ipython<|end_header_id|>\n\n"two"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
    "glm4moe": (
        "\n<think></think>\n<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>café</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call><|observation|>",
        "\n<tool_response>\ntwo\n</tool_response><|assistant|>",
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
        '{"q": "café", "n": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>two<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    "gptoss": (
        ' to=functions.find<|channel|>commentary json<|message|>{"q": "café", "n": 2}<|call|>',
        '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"two"<|end|><|start|>assistant',
    ),
}
CALL_WIRE["qwen3_instruct_2507"] = CALL_WIRE["qwen2_5"]
NO_SYSTEM = {"gemma"}
SETTINGS = {"cohere2": {"default_system": "Preamble."}, "llama3_1": {"date_string": "26 Jul 2024"}}


@pytest.fixture
def tokenizer_of(_tokenizer_folder):
    """A tokenizer with the special tokens of a family and its training template."""

    def build(file: str, template: str | None = None):
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_folder)
        tokenizer.add_tokens([token for token in TOKENS[file] if token], special_tokens=True)
        bos, eos = TOKENS[file][:2]
        tokenizer.bos_token, tokenizer.eos_token = bos or None, eos or None
        tokenizer.chat_template = template or training_template(BY_FILE[file], SETTINGS.get(file))
        return tokenizer

    return build


def conversation(file: str) -> list[dict]:
    return [*([] if file in NO_SYSTEM else [SYSTEM]), USER, SAID, MORE, LAST]


def unmarked(file: str, settings: dict | None = None) -> str:
    """A template of the family as a checkpoint would ship it: other text, no markers."""
    text = training_template(BY_FILE[file], settings or SETTINGS.get(file))
    text = re.sub(r"\{%-? *(end)?generation *-?%\}", "", text)
    return "{# Shipped with the checkpoint. #}" + re.sub(r"\{#-(?s:.*?)-#\}\n", "", text)


def masked_runs(tokenizer, messages, **kwargs) -> list[str]:
    ids, mask = assistant_mask(tokenizer, messages, **kwargs)
    runs, current = [], []
    for token, said in zip(ids, mask, strict=True):
        if said:
            current.append(token)
        elif current:
            runs, current = [*runs, tokenizer.decode(current)], []
    return [*runs, tokenizer.decode(current)] if current else runs


def known_family(tokenizer):
    match = best_match(tokenizer, tokenizer.chat_template)
    return (match.family, match.template) if match.exact else None


def test_every_template_file_belongs_to_a_family_and_has_its_wire_format_pinned():
    import posttrain.data.templates as module

    files = {path.stem for path in (Path(module.__file__).parent / "chat_templates").glob("*.jinja")}
    assert files == set(FILES) == set(WIRE) == set(TOKENS)


@pytest.mark.parametrize("file", FILES)
def test_template_writes_the_wire_format_of_its_family(file, tokenizer_of):
    text = render(tokenizer_of(file), conversation(file))
    text = re.sub(r"(Current date: )\d{4}-\d\d-\d\d", r"\1DATE", text)
    assert text == "".join(piece.removeprefix("*") for piece in WIRE[file])


@pytest.mark.parametrize("file", FILES)
def test_exactly_what_the_model_writes_is_masked(file, tokenizer_of):
    runs = masked_runs(tokenizer_of(file), conversation(file))
    assert runs == [piece[1:] for piece in WIRE[file] if piece.startswith("*")]


@pytest.mark.parametrize("file", FILES)
def test_generation_prompt_is_what_stands_before_the_masked_tokens(file, tokenizer_of):
    tokenizer = tokenizer_of(file)
    messages = conversation(file)
    ids, mask = assistant_mask(tokenizer, messages[:-2])
    kwargs = {"enable_thinking": False} if file == "nemotron3" else {}  # Without reasoning its prompt closes the block.
    text = render(tokenizer, messages[:-3], add_generation_prompt=True, **kwargs)
    asked = tokenizer(text, add_special_tokens=False)["input_ids"]
    if file == "deepseekv3":  # Its prompt opens the reasoning that an answer without reasoning does not have.
        asked = asked[: -len(tokenizer("<think>\n", add_special_tokens=False)["input_ids"])]
    assert ids[: mask.index(1)] == asked


@pytest.mark.parametrize("file", FILES)
def test_stop_token_is_trained(file, tokenizer_of):
    assert is_chat_template_stop_token_trained(tokenizer_of(file))


@pytest.mark.parametrize("file", sorted(CALL_WIRE))
def test_tool_calls_are_the_models_and_results_are_not(file, tokenizer_of):
    tokenizer = tokenizer_of(file)
    said, between = CALL_WIRE[file]
    messages = [USER, CALLS, RESULT, LAST]
    assert said + between in render(tokenizer, messages)
    runs = masked_runs(tokenizer, messages)
    assert runs[0] == said
    assert len(runs) == 2
    assert "No." in runs[1]
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)


@pytest.mark.parametrize("file", sorted(set(FILES) - set(CALL_WIRE)))
def test_formats_without_words_for_tools_say_so(file, tokenizer_of):
    assert not supports_tool_calling(tokenizer_of(file))


@pytest.mark.parametrize("file", sorted(set(CALL_WIRE) - {"deepseekv3"}))  # There the caller's system text offers them.
def test_offered_tools_are_shown_with_name_and_parameter(file, tokenizer_of):
    properties = {"city": {"type": "string", "description": "Where."}}
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": properties},
        },
    }
    text = render(tokenizer_of(file), [USER], tools=[tool], add_generation_prompt=True)
    assert all(word in text for word in ("weather", "Tells it.", "city", "string", "Where."))


@pytest.mark.parametrize(
    ("file", "block"),
    [
        ("qwen3", "<think>\nbecause\n</think>\n\nYes."),
        ("qwen3_5", "because\n</think>\n\nYes."),
        ("nemotron3", "because\n</think>\nYes."),
        ("glm4moe", "<think>because</think>\nYes."),
        ("deepseekv3", "<think>\nbecause\n</think>\n\nYes."),
        ("gptoss", "<|channel|>analysis<|message|>because<|end|><|start|>assistant<|channel|>final<|message|>Yes."),
    ],
)
def test_reasoning_of_earlier_turns_stays_in_the_rendering_and_is_trained(file, block, tokenizer_of):
    messages = [USER, SAID | {"reasoning_content": "because"}, MORE, LAST]
    tokenizer = tokenizer_of(file)
    assert masked_runs(tokenizer, messages)[0].strip("\n").startswith(block)
    if file != "gptoss":  # It ends a conversation with another token than a turn.
        assert render(tokenizer, messages).startswith(render(tokenizer, messages[:2]))


@pytest.mark.parametrize("text", ["<think>\nbecause\n</think>\n\nYes.", "because\n</think>\n\nYes."])
def test_text_that_holds_its_reasoning_renders_one_block(text, tokenizer_of):
    """The opening tag may have been part of the prompt: the text then holds only the closing one."""
    assert masked_runs(tokenizer_of("qwen3"), [USER, SAID | {"content": text}]) == [
        "<think>\nbecause\n</think>\n\nYes.<|im_end|>"
    ]


def test_nemotron_text_that_holds_its_reasoning_starts_after_the_tag_of_the_prompt(tokenizer_of):
    said = SAID | {"content": "<think>\nbecause\n</think>\nYes."}
    assert masked_runs(tokenizer_of("nemotron3"), [USER, said]) == ["because\n</think>\nYes.<|im_end|>"]


def test_qwen3_without_thinking_asks_with_an_empty_block(tokenizer_of):
    text = render(tokenizer_of("qwen3"), [USER], add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("name", "asked", "said", "yes"),
    [
        ("Qwen3.5", "<think>\n", "\n</think>\n\n<tool_call>", "True"),
        ("Qwen3.5 without thinking", "<think>\n\n</think>\n\n", "<tool_call>", "True"),
        ("Qwen3.6", "<think>\n", "\n</think>\n\n<tool_call>", "true"),
    ],
)
def test_variants_that_share_a_file_are_told_apart(name, asked, said, yes, tokenizer_of):
    family = next(family for family in FAMILIES if family.name == name)
    tokenizer = tokenizer_of("qwen3_5", training_template(family))
    assert render(tokenizer, [USER], add_generation_prompt=True).endswith("assistant\n" + asked)
    call = {"type": "function", "function": {"name": "find", "arguments": {"deep": True}}}
    run = masked_runs(tokenizer, [USER, CALLS | {"tool_calls": [call]}])[0]
    assert run.startswith(said)
    assert f"<parameter=deep>\n{yes}\n</parameter>" in run
    shipped = re.sub(r"\{%-? *(end)?generation *-?%\}", "", tokenizer.chat_template)
    assert known_family(tokenizer_of("qwen3_5", shipped)) == (family, training_template(family))


def test_nemotron_ultra_writes_no_line_breaks_around_its_closing_tag(tokenizer_of):
    tokenizer = tokenizer_of("nemotron3", unmarked("nemotron3", {"tight_think": True}))
    assert known_family(tokenizer)[0].name == "Nemotron 3 Ultra"
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    assert masked_runs(tokenizer, [USER, SAID | {"reasoning_content": "because"}]) == ["because</think>Yes.<|im_end|>"]


def test_results_of_several_calls_share_one_turn(tokenizer_of):
    text = render(tokenizer_of("qwen2_5"), [USER, CALLS, RESULT, RESULT | {"content": "three"}])
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\ntwo\n</tool_response>\n<tool_response>\nthree\n</tool_response><|im_end|>\n"
    )


def test_arguments_stored_as_json_are_not_escaped_twice(tokenizer_of):
    call = {"type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    text = render(tokenizer_of("qwen2_5"), [USER, CALLS | {"tool_calls": [call]}])
    assert '{"name": "find", "arguments": {"q": "x"}}' in text


def test_phi3_ends_a_conversation_with_eos_only_when_no_reply_is_asked_for(tokenizer_of):
    tokenizer = tokenizer_of("phi3")
    assert render(tokenizer, [USER]).endswith("Hi?<|end|>\n<|endoftext|>")
    assert render(tokenizer, [USER], add_generation_prompt=True).endswith("Hi?<|end|>\n<|assistant|>\n")
    assert "<|system|>" in render(tokenizer, [SYSTEM | {"content": ""}, USER])
    assert "<|system|>" not in render(tokenizer_of("phi3_5"), [SYSTEM | {"content": ""}, USER])


@pytest.mark.parametrize("file", ["gemma", "gemma3", "cohere", "cohere2"])
def test_formats_of_alternating_turns_refuse_two_questions_in_a_row(file, tokenizer_of):
    with raises(DataError):
        render(tokenizer_of(file), [USER, MORE])


@pytest.mark.parametrize("file", FILES)
def test_a_family_is_recognised_from_a_template_without_its_markers(file, tokenizer_of):
    tokenizer = tokenizer_of(file, unmarked(file))
    family, template = known_family(tokenizer)
    twins = {"qwen2_5": {"qwen2_5"}, "qwen3_instruct_2507": {"qwen2_5", "qwen3_instruct_2507"}}.get(file, {file})
    assert family.file in twins
    assert get_training_chat_template(tokenizer) == template
    assert has_generation_markers(template)
    before = render(tokenizer, conversation(file))
    tokenizer.chat_template = template
    assert render(tokenizer, conversation(file)) == before
    assert get_training_chat_template(tokenizer) is None


def test_the_checkpoints_own_default_system_text_is_kept(tokenizer_of):
    own = 'You are "Zoë" 🙂.\nBe {% kind %} and {{ true }}.\\'
    tokenizer = tokenizer_of("chatml", unmarked("chatml", {"default_system": own}))
    template = get_training_chat_template(tokenizer)
    before = render(tokenizer, [USER, SAID])
    assert own in before
    tokenizer.chat_template = template
    assert render(tokenizer, [USER, SAID]) == before
    assert masked_runs(tokenizer, [USER, SAID]) == ["Yes.<|im_end|>"]


QWEN3_LIKE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{- m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def test_a_format_close_to_a_known_one_is_refused_with_the_nearest_named(tokenizer_of):
    """It prints tool results as turns of their own: no family does that together with think blocks."""
    tokenizer = tokenizer_of("qwen3", QWEN3_LIKE)
    assert known_family(tokenizer) is None
    with raises(ModelError, "Qwen3"):
        get_training_chat_template(tokenizer)


def test_a_shipped_template_that_prints_blocks_as_a_list_is_still_its_family(tokenizer_of):
    shipped = unmarked("llama3").replace("text_of(message.content)", "(message.content | string | trim)")
    tokenizer = tokenizer_of("llama3", shipped)
    assert "{'type': 'text'" in render(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}])
    assert known_family(tokenizer)[0].file == "llama3"


def test_a_shipped_template_that_drops_reasoning_is_still_its_family(tokenizer_of):
    shipped = unmarked("deepseekv3").replace("{%- if message.reasoning_content -%}", "{%- if false -%}")
    tokenizer = tokenizer_of("deepseekv3", shipped)
    assert "because" not in render(tokenizer, [USER, SAID | {"reasoning_content": "because"}])
    assert known_family(tokenizer)[0].file == "deepseekv3"


def test_a_marked_template_needs_no_other(tiny_tokenizer):
    assert get_training_chat_template(tiny_tokenizer) is None


def test_named_variants_use_the_default_one(tokenizer_of):
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = {"default": unmarked("chatml"), "rag": "{{ 'nothing' }}"}
    assert has_generation_markers(get_training_chat_template(tokenizer))


def test_an_unknown_format_whose_turns_are_found_by_rendering_is_left_alone(tokenizer_of):
    tokenizer = tokenizer_of(
        "chatml",
        "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}",
    )
    assert known_family(tokenizer) is None
    assert get_training_chat_template(tokenizer) is None
    assert is_chat_template_stop_token_trained(tokenizer)


LINES = "{% for block in m['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}{% endif %}{% endfor %}"
# Formats of SmolVLM and of LLaVA-NeXT, which read lists of blocks only: a text is skipped by the first, refused by the second.
BLOCKS = {
    "User": (
        "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: "
        "{% endif %}" + LINES + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
        "<end_of_utterance>",
    ),
    "[INST]": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'][0]['text'] + '</s> ' }}{% else %}[INST] "
        + LINES
        + " [/INST]{% endif %}{% endfor %}",
        "</s>",
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_turns_of_a_template_that_reads_blocks_only_are_found_by_rendering(name, tokenizer_of):
    template, end = BLOCKS[name]
    tokenizer = tokenizer_of("chatml", template)
    tokenizer.add_tokens([end], special_tokens=True)
    assert get_training_chat_template(tokenizer) is None
    assert turn_end(tokenizer) == end
    assert masked_runs(tokenizer, as_blocks([USER, SAID, MORE, LAST])) == [f" Yes.{end}", f" No.{end}"]


def test_a_format_that_would_drop_images_is_not_taken_for_its_text_only_twin(tokenizer_of):
    template = unmarked("qwen3_instruct_2507").replace("{{- part.text or '' -}}", "{{- part.text or '<image>' -}}")
    assert "<image>" in template
    assert known_family(tokenizer_of("qwen3_instruct_2507", template)) is None


def test_arguments_are_checked(tiny_tokenizer):
    with raises(ArgumentTypeError):
        get_training_chat_template()
    with raises(ArgumentTypeError):
        get_training_chat_template(tiny_tokenizer, tokenizer=tiny_tokenizer)
    with pytest.warns(FutureWarning, match="processing_class"):
        assert get_training_chat_template(tokenizer=tiny_tokenizer) is None
    tiny_tokenizer.chat_template = None
    with raises(ModelError):
        get_training_chat_template(tiny_tokenizer)
    assert not supports_tool_calling(tiny_tokenizer)
    assert not is_chat_template_prefix_preserving(tiny_tokenizer)
    assert not is_chat_template_stop_token_trained(tiny_tokenizer)


def test_a_call_that_changes_when_its_result_follows_is_not_prefix_preserving(tokenizer_of):
    changing = unmarked("qwen2_5").replace(
        "{%- for item in", "{{- 'last' if message.tool_calls and message == turns[-1] else '' -}}{%- for item in"
    )
    tokenizer = tokenizer_of("qwen2_5", changing)
    assert supports_tool_calling(tokenizer)
    assert not is_chat_template_prefix_preserving(tokenizer)
    with raises(ModelError):
        get_training_chat_template(tokenizer)


def test_markers_alone_do_not_make_a_template_fit_for_tools(tokenizer_of):
    """Marked, but a call changes when its result follows: replaced where the family is known, refused where not."""
    loop_last = training_template(BY_FILE["qwen3"]).replace(
        "{%- generation -%}", "{%- set last = loop.last -%}{%- generation -%}"
    )
    history = loop_last.replace(
        "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + said -}}",
        "{{- ('<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' if last else '') + said -}}",
    )
    assert history != loop_last
    tokenizer = tokenizer_of("qwen3", history)
    assert has_generation_markers(history)
    assert not is_chat_template_prefix_preserving(tokenizer)
    assert get_training_chat_template(tokenizer) == training_template(BY_FILE["qwen3"])
    tokenizer.chat_template = history.replace("<tool_response>", "<answer>")
    with raises(ModelError) as caught:
        get_training_chat_template(tokenizer)
    assert "it has no {% generation %} markers" not in str(caught.value)


def test_arguments_that_a_template_concatenates_are_probed_as_json(tokenizer_of):
    text = unmarked("deepseekv3").replace(
        "call.arguments if call.arguments is string else (call.arguments or {}) | tojson", "'' + call.arguments"
    )
    tokenizer = tokenizer_of("deepseekv3", text)
    with pytest.raises(TypeError):
        tokenizer.apply_chat_template([USER, CALLS], tokenize=False)
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    assert known_family(tokenizer)[0].file == "deepseekv3"


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        ("{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", True),
        ("{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}", True),
        ("{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}", False),
    ],
)
def test_stop_token_counts_only_inside_the_marks(template, trained, tiny_tokenizer):
    other = "{{ m.content + '<|im_end|>\n' }}"
    text = f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{template}{{% else %}}{other}{{% endif %}}{{% endfor %}}"
    assert is_chat_template_stop_token_trained(tiny_tokenizer, text) is trained


def codes(tokenizer, *rows, **kwargs) -> dict[str, str]:
    return {finding.code: finding.severity for finding in check_template(tokenizer, rows, **kwargs).findings}


ROW = {"messages": [USER, SAID]}
SIMPLE = "{% for m in messages %}{{ m.role + ': ' }}BODY{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)


def test_a_sound_template_has_no_findings(tiny_tokenizer):
    report = check_template(tiny_tokenizer, [ROW, {"text": "plain"}, {"prompt": [USER], "completion": [SAID]}])
    assert (report.rows, report.findings) == (2, [])
    assert "no problems found" in str(report)
    report.raise_fatal()


def test_two_bos_tokens_are_fatal_with_rows_named(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ bos_token + bos_token }}" + SIMPLE.replace("BODY", MARKED)
    report = check_template(tiny_tokenizer, [{"text": "plain"}, ROW, ROW])
    assert [f.code for f in report.fatal] == ["PT-K111"]
    with raises(ModelError, "1", "2"):
        report.raise_fatal()


def test_stop_token_outside_the_marks_is_fatal_where_only_the_assistant_is_trained(tiny_tokenizer):
    body = MARKED.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
    tiny_tokenizer.chat_template = SIMPLE.replace("BODY", body)
    assert codes(tiny_tokenizer, ROW) == {"PT-K118": "warning"}
    assert codes(tiny_tokenizer, ROW, assistant_only=True) == {"PT-K118": "error"}


def test_marks_around_the_header_are_found(tiny_tokenizer):
    tiny_tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ 'assistant: ' + m.content + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert codes(tiny_tokenizer, ROW) == {"PT-K117": "info"}


def test_no_marks_and_no_stable_turns_are_fatal_where_only_the_assistant_is_trained(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ messages | length | string }}" + SIMPLE.replace(
        "BODY", "{{ m.content + '<|im_end|>' }}"
    )
    found = codes(tiny_tokenizer, ROW, assistant_only=True)
    assert found["PT-K114"] == "error"
    assert found["PT-K115"] == "warning"


def test_lost_reasoning_and_tool_calls_are_fatal_in_trained_turns_only(tiny_tokenizer):
    thinking = SAID | {"reasoning_content": "because"}
    assert codes(tiny_tokenizer, {"messages": [USER, thinking]}) == {"PT-K116": "error"}
    assert codes(tiny_tokenizer, {"messages": [USER, CALLS]}) == {"PT-K119": "error"}
    assert codes(tiny_tokenizer, {"prompt": [USER, thinking, MORE], "completion": [LAST]}) == {}


@pytest.mark.parametrize("lost", ["user", "assistant"])
def test_a_template_that_loses_the_text_of_a_role_is_fatal(tiny_tokenizer, lost):
    text = f"{{% if m.role != '{lost}' %}}{{{{ m.content }}}}{{% endif %}}{{{{ '<|im_end|>' }}}}"
    tiny_tokenizer.chat_template = SIMPLE.replace("BODY", text)
    assert codes(tiny_tokenizer, ROW).get("PT-K121") == "error"


def test_tools_that_the_template_does_not_show_are_reported(tiny_tokenizer):
    tool = {"type": "function", "function": {"name": "zq_find", "parameters": {"type": "object", "properties": {}}}}
    assert codes(tiny_tokenizer, ROW | {"tools": [tool]}) == {"PT-K120": "warning"}
    named = {"role": "system", "content": "Call zq_find."}
    assert codes(tiny_tokenizer, {"messages": [named, *ROW["messages"]], "tools": [tool]}) == {}


def test_an_eos_that_does_not_end_turns_is_told(tiny_tokenizer):
    tiny_tokenizer.eos_token = "<|endoftext|>"
    assert codes(tiny_tokenizer, ROW) == {"PT-K113": "warning"}


def test_a_missing_bos_is_told(tiny_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tiny_tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tiny_tokenizer.bos_token = "<|endoftext|>"
    assert codes(tiny_tokenizer, ROW) == {"PT-K112": "warning"}


def test_only_the_first_rows_are_looked_at_and_a_refused_row_is_named(tiny_tokenizer):
    rows = [ROW, {"messages": [USER, {"role": "assistant", "content": 5}]}]
    assert check_template(tiny_tokenizer, rows, limit=1).rows == 1
    with raises(DataError, "row 1"):
        check_template(tiny_tokenizer, rows)


def test_a_shipped_template_with_lost_reasoning_is_mended_by_its_training_template(tokenizer_of):
    shipped = unmarked("qwen3").replace(
        "{{- '<think>\\n' + reasoning", "{{- said if not loop_last else '<think>\\n' + reasoning"
    )
    shipped = shipped.replace(
        "{%- set said = text_of(message.content) -%}\n",
        "{%- set said = text_of(message.content) -%}\n{%- set loop_last = loop.last -%}\n",
    )
    assert "loop_last else" in shipped
    tokenizer = tokenizer_of("qwen3", shipped)
    row = {"messages": [USER, SAID | {"reasoning_content": "because"}, MORE, LAST]}
    assert "PT-K116" in codes(tokenizer, row)
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    assert codes(tokenizer, row, assistant_only=True) == {}


class Processor:
    """What a processor is to the template functions: structured content, a tokenizer inside, images."""

    image_processor = object()

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.images = []

    def apply_chat_template(self, messages, *, tokenize, return_dict=False, **kwargs):
        assert all(isinstance(message["content"], list) for message in messages)
        self.images += [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        out = self.tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=return_dict, **kwargs)
        return {"input_ids": [out["input_ids"]]} if tokenize else out


def test_processors_are_probed_with_structured_content_and_a_small_image(tokenizer_of):
    processor = Processor(tokenizer_of("qwen3"))
    assert supports_tool_calling(processor)
    assert is_chat_template_prefix_preserving(processor)
    assert {image.size for image in processor.images} == {(8, 8)}
    assert is_chat_template_stop_token_trained(processor)
    assert get_training_chat_template(processor) is None
    processor.chat_template = unmarked("qwen3")
    assert get_training_chat_template(processor) == training_template(BY_FILE["qwen3"])
