"""Chat templates: what is rendered is what the conversation says, and boundaries lie where tokens part."""

import copy

import pytest

from posttrain.data import chat, formats
from posttrain.data.chat import (
    apply_chat_template,
    assistant_mask,
    maybe_apply_chat_template,
    render,
    terminal_token_ids,
    tool_call,
)
from posttrain.errors import DataError, ModelError
from tests.wordings import raises

U, A = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
B = {"role": "assistant", "content": "five"}
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}{{ m.get('think', '') }}"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_prompt_and_answers_join_to_the_whole_conversation(tiny_tokenizer):
    for template in (tiny_tokenizer.chat_template, THINKING):
        tiny_tokenizer.chat_template = template
        out = apply_chat_template({"prompt": [U], "chosen": [A], "rejected": [B]}, tiny_tokenizer)
        for name, answer in (("chosen", A), ("rejected", B)):
            assert out["prompt"] + out[name] == render(tiny_tokenizer, [U, answer])
    assert not out["prompt"].endswith("<think>")


def test_each_set_of_columns_renders_under_its_names(tiny_tokenizer):
    whole = render(tiny_tokenizer, [U, A])
    assert apply_chat_template({"messages": [U, A], "id": 3}, tiny_tokenizer) == {"text": whole}
    assert apply_chat_template({"chosen": [U, A], "rejected": [U, B]}, tiny_tokenizer)["chosen"] == whole
    assert apply_chat_template({"prompt": [U], "completion": [A], "label": True}, tiny_tokenizer)["label"] is True
    assert apply_chat_template({"prompt": [U]}, tiny_tokenizer)["prompt"].endswith("assistant\n")
    with raises(KeyError):
        apply_chat_template({"completion": [A]}, tiny_tokenizer)
    assert maybe_apply_chat_template({"messages": [U, A]}, tokenizer=tiny_tokenizer) == {"text": whole}
    with pytest.raises(TypeError, match="but not as both"):
        apply_chat_template({"messages": [U, A]})
    plain = {"prompt": "2+2?", "x": 1}
    assert maybe_apply_chat_template(plain, tokenizer=tiny_tokenizer) is plain


def test_an_unfinished_answer_is_continued_and_merged_only_when_asked(tiny_tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(formats, "_logged", set())
    start, end = {"role": "assistant", "content": "fo"}, {"role": "assistant", "content": "ur"}
    assert apply_chat_template({"prompt": [U, start]}, tiny_tokenizer)["prompt"].endswith("fo")
    row = {"prompt": [U, start], "completion": [end]}
    two = apply_chat_template(row, tiny_tokenizer)
    assert (two["prompt"] + two["completion"]).count("assistant") == 2
    assert "two assistant turns" in caplog.text
    one = apply_chat_template(row, tiny_tokenizer, merge_prefill=True)
    assert one["prompt"] + one["completion"] == render(tiny_tokenizer, [U, {"role": "assistant", "content": "four"}])
    assert one["completion"].startswith("ur")


def test_prompts_that_cannot_be_answered_are_refused(tiny_tokenizer):
    with raises(DataError):
        apply_chat_template({"prompt": []}, tiny_tokenizer)
    with raises(DataError, "'system'"):
        apply_chat_template({"prompt": [{"role": "system", "content": "s"}]}, tiny_tokenizer)
    with pytest.raises(TypeError, match="chat_template_kwargs"):
        apply_chat_template({"prompt": [U], "chat_template_kwargs": {"x": 1}}, tiny_tokenizer, x=2)


def test_a_template_that_raises_names_the_messages(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with raises(DataError, "2"):
        render(tiny_tokenizer, [U])
    tiny_tokenizer.chat_template = None
    with raises(ModelError):
        render(tiny_tokenizer, [U])


def test_every_token_that_ends_a_turn_is_known(tiny_tokenizer):
    ends = terminal_token_ids(tiny_tokenizer)
    assert tiny_tokenizer.eos_token_id in ends


def test_the_mask_starts_at_the_first_word_and_ends_with_the_end_of_turn(tiny_tokenizer):
    ids, mask = assistant_mask(tiny_tokenizer, [U, A, U, B])
    said = [t for t, m in zip(ids, mask, strict=True) if m]
    assert tiny_tokenizer.decode(said) == "4<|im_end|>five<|im_end|>"


def test_a_turn_that_ends_otherwise_than_answers_do_is_the_assistants_too(tiny_tokenizer):
    """As a tool call of FunctionGemma, behind which the result follows without an end of turn."""
    tiny_tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}()=>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [tool_call("add", {})]}
    messages = [
        {"role": "user", "content": "q"},
        call,
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ]
    ids, mask = assistant_mask(tiny_tokenizer, messages)
    said = tiny_tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
    assert said == "add()=>It is 3<|im_end|>"


@pytest.mark.parametrize("special", [True, False])
def test_texts_are_encoded_as_a_call_of_the_tokenizer_encodes_them(tiny_tokenizer, special):
    texts = ["", " a  b\n", "<|im_end|>x<|im_start|>", "äöü 漢字 🙂", "word " * 300]
    tokenizer = copy.deepcopy(tiny_tokenizer)

    def called():
        return tokenizer(texts, add_special_tokens=special)["input_ids"]

    assert chat._only_calls_backend(tokenizer)
    assert chat.encode(tokenizer, texts, special=special) == called()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert chat.encode(tokenizer, texts, special=special) == called()
    tokenizer.split_special_tokens = True
    assert chat.encode(tokenizer, texts, special=special) == called()

    class Own(type(tokenizer)):
        def __call__(self, texts, **kwargs):
            return {"input_ids": [[7] for _ in texts]}

    tokenizer.__class__ = Own
    assert chat.encode(tokenizer, texts, special=special) == [[7]] * 5
