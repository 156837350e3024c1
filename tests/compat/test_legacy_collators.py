"""Collators of conversations and of columns by name."""

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.compat.collators import DataCollatorForChatML, DPODataCollatorWithPadding
from posttrain.errors import ConfigError, DataError
from tests.conftest import CHAT_TEMPLATE


def chat(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


CHATS = [
    chat("What is 1 + 2?", "3"),
    chat("Hé 🎉", "naïve 日本", "and?", "The sum é 🎉 of two numbers."),
]


def expected(tokenizer, row, completion_text=None):
    """Prompt ids, completion ids and both texts, from the template alone."""
    prompt = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert text.startswith(prompt)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    split = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(ids[split:]) == text[len(prompt) :]
    return ids[:split], ids[split:], prompt, text[len(prompt) :]


def test_chat_rows_are_left_padded_and_only_the_last_message_is_trained(tiny_tokenizer):
    batch = DataCollatorForChatML(tiny_tokenizer)(CHATS)
    pad = tiny_tokenizer.pad_token_id
    width, prompt_width = batch["input_ids"].shape[1], batch["prompts"].shape[1]
    for i, row in enumerate(CHATS):
        prompt, completion, _, _ = expected(tiny_tokenizer, row)
        real = len(prompt) + len(completion)
        assert batch["input_ids"][i].tolist() == [pad] * (width - real) + prompt + completion
        assert batch["attention_mask"][i].tolist() == [0] * (width - real) + [1] * real
        assert batch["labels"][i].tolist() == [-100] * (width - len(completion)) + completion
        assert batch["prompts"][i].tolist() == [pad] * (prompt_width - len(prompt)) + prompt
        assert batch["prompt_attention_mask"][i].sum() == len(prompt)
        assert batch["prompt_attention_mask"][i, -1] == 1
    assert all(value.dtype == torch.long for value in batch.values())


def test_end_token_is_trained_although_it_is_the_pad_token(tiny_tokenizer):
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id
    batch = DataCollatorForChatML(tiny_tokenizer)(CHATS)
    assert (batch["labels"] == tiny_tokenizer.eos_token_id).sum(1).tolist() == [1, 1]


def test_byte_offsets_are_zero_on_the_prompt_and_cover_the_completion(tiny_tokenizer):
    batch = DataCollatorForChatML(tiny_tokenizer)(CHATS)
    assert batch["byte_offsets"].shape == (*batch["input_ids"].shape, 2)
    for i, row in enumerate(CHATS):
        _, completion, _, text = expected(tiny_tokenizer, row)
        spans = batch["byte_offsets"][i]
        assert (spans[: -len(completion)] == 0).all()
        raw = text.encode()
        assert b"".join(raw[a:b] for a, b in spans[-len(completion) :].tolist()) == raw


def test_token_that_straddles_the_boundary_belongs_to_the_prompt(tiny_tokenizer):
    """The prompt ends inside the token 'What'; the completion begins with the first token behind its bytes."""
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    row = chat("0 Wh", "at is")
    ids = tiny_tokenizer("0 What is", add_special_tokens=False)["input_ids"]
    alone = tiny_tokenizer("0 Wh", add_special_tokens=False)["input_ids"]
    assert ids[: len(alone)] != alone
    batch = DataCollatorForChatML(tiny_tokenizer)([row])
    assert tiny_tokenizer.decode(batch["prompts"][0]) == "0 What"
    trained = batch["labels"][0][batch["labels"][0] != -100]
    assert tiny_tokenizer.decode(trained) == " is"
    assert batch["byte_offsets"][0][-len(trained)].tolist()[0] == 2


def test_boundary_is_where_prompt_and_conversation_part_when_the_template_rewrites_the_prompt(tiny_tokenizer):
    """A generation prompt that opens a thought which the finished conversation does not have."""
    tiny_tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'"
    )
    batch = DataCollatorForChatML(tiny_tokenizer)(CHATS[:1])
    trained = batch["labels"][0][batch["labels"][0] != -100]
    assert tiny_tokenizer.decode(trained) == "3<|im_end|>\n"


def test_last_tokens_are_kept_and_the_start_of_the_prompt_is_lost_first(tiny_tokenizer):
    whole = DataCollatorForChatML(tiny_tokenizer)(CHATS[:1])
    n = int((whole["labels"] != -100).sum())
    batch = DataCollatorForChatML(tiny_tokenizer, max_length=n + 2)(CHATS[:1])
    assert torch.equal(batch["input_ids"], whole["input_ids"][:, -n - 2 :])
    assert torch.equal(batch["labels"], whole["labels"][:, -n - 2 :])
    assert torch.equal(batch["byte_offsets"], whole["byte_offsets"][:, -n - 2 :])
    assert batch["prompts"].shape == (1, 2)


def test_row_without_a_prompt_token_left_is_refused(tiny_tokenizer):
    whole = DataCollatorForChatML(tiny_tokenizer)(CHATS[:1])
    n = int((whole["labels"] != -100).sum())
    with pytest.raises(DataError, match=rf"row 0 .*max_length={n} hold no prompt token. Raise max_length"):
        DataCollatorForChatML(tiny_tokenizer, max_length=n)(CHATS[:1])


def test_max_length_defaults_to_the_tokenizers_limit_but_at_most_1024(tiny_tokenizer):
    assert DataCollatorForChatML(tiny_tokenizer).max_length == 512
    tiny_tokenizer.model_max_length = int(1e30)
    assert DataCollatorForChatML(tiny_tokenizer).max_length == 1024


def test_tokenizer_without_a_pad_token_is_refused(tiny_tokenizer):
    tiny_tokenizer.pad_token = None
    with pytest.raises(ConfigError, match="no pad token"):
        DataCollatorForChatML(tiny_tokenizer)


def test_tokenised_rows_use_their_completion_mask(tiny_tokenizer):
    examples = [
        {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]},
        {"input_ids": [8, 9], "completion_mask": [0, 1]},
    ]
    batch = DataCollatorForChatML(tiny_tokenizer)(examples)
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, 9]]
    assert batch["prompts"].tolist() == [[5], [8]]
    assert "byte_offsets" not in batch
    with pytest.raises(DataError, match="completion_mask of 2 entries for 3 input_ids"):
        DataCollatorForChatML(tiny_tokenizer)([{"input_ids": [5, 6, 7], "completion_mask": [0, 1]}])
    with pytest.raises(DataError, match=r"row 0 .*no completion token: all 2 tokens are prompt"):
        DataCollatorForChatML(tiny_tokenizer)([{"input_ids": [5, 6], "completion_mask": [0, 0]}])


def test_tokenised_rows_without_a_mask_find_the_boundary_from_their_messages(tiny_tokenizer):
    prompt, completion, _, _ = expected(tiny_tokenizer, CHATS[1])
    batch = DataCollatorForChatML(tiny_tokenizer)([CHATS[1] | {"input_ids": prompt + completion}])
    assert batch["prompts"][0].tolist() == prompt


def test_prompt_column_replaces_the_rendered_prompt(tiny_tokenizer):
    _, _, prompt, _ = expected(tiny_tokenizer, CHATS[1])
    column = DataCollatorForChatML(tiny_tokenizer)([CHATS[1] | {"prompt": prompt}])
    messages = DataCollatorForChatML(tiny_tokenizer)([CHATS[1] | {"prompt": CHATS[1]["messages"][:-1]}])
    plain = DataCollatorForChatML(tiny_tokenizer)([CHATS[1]])
    for name in plain:
        assert torch.equal(column[name], plain[name])
        assert torch.equal(messages[name], plain[name])


def test_source_texts_are_passed_on_when_every_row_has_them(tiny_tokenizer):
    texts = {"original_prompt_text": "p", "original_completion_text": "c"}
    batch = DataCollatorForChatML(tiny_tokenizer)([row | texts for row in CHATS])
    assert batch["original_prompt_text"] == ["p", "p"]
    assert batch["original_completion_text"] == ["c", "c"]
    with pytest.raises(DataError, match="no 'original_prompt_text'"):
        DataCollatorForChatML(tiny_tokenizer)([CHATS[0] | texts, CHATS[1]])


def test_rows_without_messages_or_prompt_are_refused(tiny_tokenizer):
    with pytest.raises(DataError, match=r"row 0 .*no 'messages'.*\['text'\]"):
        DataCollatorForChatML(tiny_tokenizer)([{"text": "a"}])
    with pytest.raises(DataError, match=r"row 1 .*no prompt"):
        DataCollatorForChatML(tiny_tokenizer)([CHATS[0], {"messages": [{"role": "assistant", "content": "a"}]}])


def test_tokenizer_that_is_not_byte_level_parts_where_the_tokens_part():
    words = ["[UNK]", "[PAD]", "user", ":", "assistant", "a", "b", "c"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    )
    batch = DataCollatorForChatML(tokenizer)([chat("a", "b c")])
    assert batch["input_ids"].tolist() == [[2, 3, 5, 4, 3, 6, 7]]
    assert batch["labels"].tolist() == [[-100] * 5 + [6, 7]]
    assert "byte_offsets" not in batch


def test_boundary_counts_bytes_as_the_tokenizer_normalises_them(tiny_tokenizer):
    """Composed letters have fewer bytes, so a prompt counted before normalising would end too late."""
    tiny_tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    batch = DataCollatorForChatML(tiny_tokenizer)([chat("e\u0301" * 6, "a 3")])
    trained = batch["labels"][0][batch["labels"][0] != -100]
    assert tiny_tokenizer.decode(trained) == "a 3<|im_end|>\n"


def test_tokenizer_that_adds_special_tokens_by_itself_adds_none_to_rendered_chats(tiny_tokenizer):
    from tokenizers.processors import TemplateProcessing

    plain = DataCollatorForChatML(tiny_tokenizer)(CHATS)
    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert tiny_tokenizer("a")["input_ids"][0] == 1
    assert torch.equal(DataCollatorForChatML(tiny_tokenizer)(CHATS)["input_ids"], plain["input_ids"])


def test_empty_answer_still_trains_the_end_of_the_turn(tiny_tokenizer):
    batch = DataCollatorForChatML(tiny_tokenizer)([chat("a", "")])
    trained = batch["labels"][0][batch["labels"][0] != -100]
    assert tiny_tokenizer.decode(trained) == "<|im_end|>\n"


# By name


def test_columns_are_padded_by_the_ending_of_their_name():
    examples = [
        {
            "prompt_input_ids": [1],
            "prompt_attention_mask": [1],
            "chosen_input_ids": [2, 3],
            "chosen_labels": [-100, 3],
            "chosen_attention_mask": [1, 1],
            "ref_chosen_logps": -1.5,
            "prompt": "a",
        },
        {
            "prompt_input_ids": [4, 5],
            "prompt_attention_mask": [1, 1],
            "chosen_input_ids": [6],
            "chosen_labels": [6],
            "chosen_attention_mask": [1],
            "ref_chosen_logps": -2,
            "prompt": "b",
        },
    ]
    batch = DPODataCollatorWithPadding(pad_token_id=9)(examples)
    assert batch["prompt_input_ids"].tolist() == [[9, 1], [4, 5]]
    assert batch["prompt_attention_mask"].tolist() == [[0, 1], [1, 1]]
    assert batch["chosen_input_ids"].tolist() == [[2, 3], [6, 9]]
    assert batch["chosen_labels"].tolist() == [[-100, 3], [6, -100]]
    assert batch["chosen_attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["ref_chosen_logps"].tolist() == [-1.5, -2.0]
    assert batch["prompt"] == ["a", "b"]


def test_pixel_values_are_float32_padded_with_zero():
    examples = [
        {"prompt_pixel_values": torch.ones(1, 2, 2, dtype=torch.float64)},
        {"prompt_pixel_values": torch.ones(2, 2, 2)},
    ]
    values = DPODataCollatorWithPadding()(examples)["prompt_pixel_values"]
    assert values.dtype == torch.float32
    assert values.shape == (2, 2, 2, 2)
    assert float(values.sum()) == 12


def test_encoder_decoder_answers_are_filled_with_the_ignored_label_and_prompts_with_the_pad_id():
    examples = [
        {
            "prompt_input_ids": [1],
            "prompt_attention_mask": [1],
            "chosen_input_ids": [2, 3],
            "chosen_labels": [2, 3],
            "chosen_decoder_input_ids": [2],
        },
        {
            "prompt_input_ids": [4, 5],
            "prompt_attention_mask": [1, 1],
            "chosen_input_ids": [6],
            "chosen_labels": [6],
            "chosen_decoder_input_ids": [6, 7],
        },
    ]
    batch = DPODataCollatorWithPadding(pad_token_id=9, is_encoder_decoder=True)(examples)
    assert batch["prompt_input_ids"].tolist() == [[1, 9], [4, 5]]
    assert batch["prompt_attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["chosen_input_ids"].tolist() == batch["chosen_labels"].tolist() == [[2, 3], [6, -100]]
    assert batch["chosen_decoder_input_ids"].tolist() == [[2, -100], [6, 7]]


def test_encoder_decoder_without_a_pad_token_is_refused():
    with pytest.raises(ConfigError, match="pad_token_id=None"):
        DPODataCollatorWithPadding(pad_token_id=None, is_encoder_decoder=True)


def test_column_that_only_some_rows_have_is_refused():
    for key, value in (("chosen_input_ids", [1]), ("source", "x"), ("ref_chosen_logps", 1.0)):
        with pytest.raises(DataError, match=f"row 1 .*no '{key}'"):
            DPODataCollatorWithPadding()([{"a": 1, key: value}, {"a": 2}])
    with pytest.raises(DataError, match=r"row 1 .*no 'chosen_input_ids'"):
        DPODataCollatorWithPadding()([{"chosen_input_ids": [1]}, {"chosen_input_ids": None}])


def test_column_without_a_value_in_any_row_is_left_out_or_stays_a_list():
    batch = DPODataCollatorWithPadding()([{"ref_chosen_logps": None, "note": None}] * 2)
    assert batch == {"note": [None, None]}
