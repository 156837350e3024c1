"""Traps of data preparation: each test breaks data the way users broke it, and is named after the trap's number."""

import json
import logging
from collections import Counter

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from posttrain import DataCollatorForLanguageModeling, DataCollatorForPreference, RepeatSampler
from posttrain.checks.rows import check_rows
from posttrain.data import chat, formats
from posttrain.data.chat import tokenize_prompts
from posttrain.data.forest import Layout, collate
from posttrain.data.packing import pack_dataset, truncate_dataset
from posttrain.data.preference import maybe_extract_prompt, prepare_reward_dataset, unpair_preference_dataset
from posttrain.data.sft import SupervisedOptions, check_prepared, document_rows, prepare_sft_dataset
from posttrain.data.templates import get_training_chat_template
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.extensions.trl_helpers.sequences import split_tensor_dict
from posttrain.extensions.trl_helpers.tensors import flush_left, pad
from posttrain.models.forward import forward, sequence_logps
from posttrain.models.tree_attention import forest_mask
from posttrain.types import Row
from tests.conftest import CHAT_TEMPLATE, build_model, build_tokenizer
from tests.wordings import raises

QUESTION = {"role": "user", "content": "What is 2?"}
ANSWER = {"role": "assistant", "content": "A number."}


def prepare(rows, tokenizer, formatting_func=None, **options):
    data = datasets.Dataset.from_list(rows)
    return prepare_sft_dataset(data, tokenizer, SupervisedOptions(**options), formatting_func=formatting_func)


def prepared(rows, tokenizer, formatting_func=None, **options):
    return prepare(rows, tokenizer, formatting_func, **options)[0]


def text_of(row, tokenizer):
    return tokenizer.decode(row["input_ids"])


def trained(row, tokenizer):
    return tokenizer.decode([token for token in row["labels"] if token != -100])


def ends_by_itself(tokenizer, bos=False, eos=False):
    """Make a tokenizer put its bos before, or its eos after, every text, as many checkpoints' do."""
    from tokenizers.processors import TemplateProcessing

    single = ["<|im_start|>"] * bos + ["$A"] + ["<|im_end|>"] * eos
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=" ".join(single), special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return tokenizer


# Wrong or missing training tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["wrapped", "bfd_split", "bfd"])
def test_trap_1_t1_packing_more_than_one_arrow_slice_keeps_every_token(strategy):
    """2500 documents, indices over a slice of the table: what comes out is what went in, as a multiset."""
    rows = [[10 * i + k for k in range(1 + i % 4)] for i in range(2500)]
    data = datasets.Dataset.from_dict({"input_ids": rows}).select(range(100, 2400))
    packed = pack_dataset(data, 64, strategy, {"batch_size": 1000})
    before = Counter(token for row in data["input_ids"] for token in row)
    after = Counter(token for row in packed["input_ids"] for token in row)
    assert before == after


def test_trap_1_t1_a_packer_that_loses_tokens_is_caught_by_counts_and_checksum(monkeypatch):
    from posttrain.data import packing

    kept = packing._best_fit
    monkeypatch.setattr(
        packing, "_best_fit", lambda columns, plan, row: {k: v[:1] for k, v in kept(columns, plan, row).items()}
    )
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]})
    with raises(DataError, "6", "3"):
        pack_dataset(data, 4, map_kwargs={"load_from_cache_file": False})


def test_trap_2_pairs_that_differ_inside_a_word_stay_different_as_tokens(tiny_tokenizer):
    row = maybe_extract_prompt({"chosen": "The sky is blue", "rejected": "The sky is black"})
    assert row == {"prompt": "The sky is", "chosen": " blue", "rejected": " black"}
    data = datasets.Dataset.from_list([row])
    (pair,) = prepare_reward_dataset(data, tiny_tokenizer)
    assert pair["chosen_ids"] != pair["rejected_ids"]
    assert tiny_tokenizer.decode(pair["chosen_ids"]) == "The sky is blue<|im_end|>"


def test_trap_2_pairs_of_equal_tokens_are_dropped_with_their_count_and_an_error_of_the_check(tiny_tokenizer, caplog):
    rows = [{"prompt": "q ", "chosen": "a", "rejected": "a"}] * 2 + [
        {"prompt": "q ", "chosen": "a", "rejected": "b"}
    ] * 3
    with caplog.at_level(logging.WARNING):
        assert len(prepare_reward_dataset(datasets.Dataset.from_list(rows), tiny_tokenizer)) == 3
    assert "dropped 2 of 5 rows (2 with two equal answers" in caplog.text
    same = Row([1, 5], [[6, 2], [6, 2]], [[1, 1], [1, 1]])
    (finding,) = [f for f in check_rows([same], tiny_tokenizer) if f.code == "PT-D013"]
    assert finding.severity == "error"


def test_trap_3_a_word_that_merges_over_the_boundary_is_trained(tiny_tokenizer, caplog):
    """'the answ' + 'er': as one text the tokenizer writes ' answer', and a boundary at len(prompt) would mask it."""
    with caplog.at_level(logging.WARNING):
        (row,) = prepared([{"prompt": "What is the answ", "completion": "er"}], tiny_tokenizer)
    alone = tiny_tokenizer("What is the answ")["input_ids"]
    assert row["input_ids"][: len(alone)] != alone
    assert trained(row, tiny_tokenizer) == " answer<|im_end|>"
    assert "in 1 of 1 rows, the end of the prompt" in caplog.text


def test_trap_4_t2_text_of_any_column_ends_in_eos(tiny_tokenizer):
    (row,) = prepared([{"story": "once"}], tiny_tokenizer, dataset_text_field="story")
    assert row["labels"][-1] == tiny_tokenizer.eos_token_id


@pytest.mark.parametrize(
    "row", [{"messages": [QUESTION, ANSWER]}, {"prompt": "a", "completion": "b"}, {"story": "old"}]
)
def test_trap_5_t6_t7_formatted_text_is_what_is_trained_whatever_the_columns(tiny_tokenizer, row):
    (out,) = prepared([row], tiny_tokenizer, formatting_func=lambda row: "new", dataset_text_field="story")
    assert text_of(out, tiny_tokenizer) == "new<|im_end|>"
    assert out["labels"] == out["input_ids"]


def test_trap_6_t9_a_completion_mask_of_tokenised_rows_decides_what_is_trained(tiny_tokenizer):
    rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}]
    assert prepared(rows, tiny_tokenizer)[0]["labels"] == [-100, 6, 7]
    assert prepared(rows, tiny_tokenizer, completion_only_loss=False)[0]["labels"] == [5, 6, 7]


def test_trap_7_rows_that_are_packed_are_never_packed_or_cut_again(tiny_tokenizer):
    rows = [{"text": "one"}, {"text": "two"}]
    packed = prepared(rows, tiny_tokenizer, packing="bfd", max_length=32)
    again, _ = prepare_sft_dataset(packed, tiny_tokenizer, SupervisedOptions(packing="bfd", max_length=8))
    assert again.to_list() == packed.to_list()
    with raises(DataError):
        pack_dataset(packed, 8)
    with raises(DataError):
        truncate_dataset(packed, 8)


def test_trap_8_dropped_rows_are_counted_and_an_empty_rest_is_refused(tiny_tokenizer, caplog):
    rows = [
        {"prompt": "q", "chosen": "yes " * 30, "rejected": "no"},
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
    ]
    data = datasets.Dataset.from_list(rows)
    with caplog.at_level(logging.WARNING):
        assert len(prepare_reward_dataset(data, tiny_tokenizer, max_length=20)) == 1
    assert "dropped 1 of 2 rows (1 longer than max_length=20)" in caplog.text
    with raises(DataError, "2"):
        prepare_reward_dataset(data, tiny_tokenizer, max_length=2)


def test_trap_9_rows_whose_labels_are_all_ignored_after_the_cut_never_train(tiny_tokenizer, caplog):
    rows = [{"prompt": "long " * 30, "completion": "x"}, {"prompt": "a", "completion": "b"}]
    with caplog.at_level(logging.WARNING):
        data, report = prepare(rows, tiny_tokenizer, max_length=20)
    assert len(data) == 1
    assert report.dropped == {"truncated at max_length before their first trained token": 1}
    with raises(DataError):
        prepared(rows[:1], tiny_tokenizer, max_length=20)


def test_trap_9_rows_that_skip_preparation_and_train_nothing_are_refused():
    idle = datasets.Dataset.from_dict(
        {"input_ids": [[5, 6, 7]], "labels": [[5, -100, -100]]}
    )  # Nothing predicts a first.
    with raises(DataError, "1"):
        check_prepared(idle, "train", 100)
    check_prepared(datasets.Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[-100, 6]]}), "train", 100)


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['reasoning_content'] + '|' if m['reasoning_content'] }}{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] + c['function']['arguments'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def calls(*arguments):
    """Conversations whose one call has these arguments."""
    return [
        [QUESTION, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": a}}]}]
        for a in arguments
    ]


def test_trap_10_t21_the_none_that_arrow_writes_reaches_no_template_and_is_counted(tiny_tokenizer, caplog):
    tiny_tokenizer.chat_template = TOOLS_TEMPLATE
    rows = [{"messages": m} for m in calls({"city": "Rome"}, {"day": 3})]
    with caplog.at_level(logging.WARNING):
        data, report = prepare(rows, tiny_tokenizer)
    assert [text_of(row, tiny_tokenizer).count("null") for row in data] == [0, 0]
    assert 'f{"city": "Rome"}' in text_of(data[0], tiny_tokenizer)
    assert report.nested_none == 2
    assert "in 2 of 2 rows, tool schemas, tool calls or content blocks contained None" in caplog.text
    (prompt, _) = datasets.Dataset.from_list([{"prompt": m} for m in calls({"city": "Rome"}, {"day": 3})])
    prompt["prompt"].append({"role": "user", "content": "more", "tool_calls": None})
    assert "null" not in tiny_tokenizer.decode(tokenize_prompts([prompt], tiny_tokenizer)[0])


def test_trap_10_t21_content_none_beside_a_tool_call_is_no_finding(tiny_tokenizer):
    tiny_tokenizer.chat_template = TOOLS_TEMPLATE
    assert prepare([{"messages": m} for m in calls({"city": "Rome"})], tiny_tokenizer)[1].nested_none == 0


def test_trap_11_arguments_stored_as_json_are_not_encoded_twice(tiny_tokenizer, caplog):
    tiny_tokenizer.chat_template = TOOLS_TEMPLATE
    given = {"messages": calls(json.dumps({"city": "Rome"}))[0]}
    with caplog.at_level(logging.WARNING):
        (row,) = prepared([given], tiny_tokenizer)
    assert 'f{"city": "Rome"}' in text_of(row, tiny_tokenizer)
    assert "tool arguments are stored as JSON text" in caplog.text
    assert (
        given["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    )  # The caller's rows stay.


def test_trap_11_arguments_stay_text_where_the_template_writes_text(tiny_tokenizer):
    """A template that concatenates takes the JSON text as it is; decoded it would fail, or print Python's quotes."""
    tiny_tokenizer.chat_template = TOOLS_TEMPLATE.replace("| tojson }}{% endfor %}", "}}{% endfor %}")
    (row,) = prepared([{"messages": calls('{"city": "Rome"}')[0]}], tiny_tokenizer)
    assert 'f{"city": "Rome"}' in text_of(row, tiny_tokenizer)
    tiny_tokenizer.chat_template = TOOLS_TEMPLATE.replace("] + c[", "] }}{{ c[").replace("| tojson }}{% e", "}}{% e")
    (row,) = prepared([{"messages": calls('{"city": "Rome"}')[0]}], tiny_tokenizer)
    assert '{"city": "Rome"}' in text_of(row, tiny_tokenizer)


def test_trap_12_an_empty_list_of_tools_is_no_tools(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% if tools is not none %}TOOLS{% endif %}" + CHAT_TEMPLATE
    (row,) = prepared([{"messages": [QUESTION, ANSWER], "tools": "[]"}], tiny_tokenizer)
    assert "TOOLS" not in text_of(row, tiny_tokenizer)
    ids = tokenize_prompts([{"prompt": [QUESTION], "tools": []}], tiny_tokenizer)[0]
    assert "TOOLS" not in tiny_tokenizer.decode(ids)
    assert "TOOLS" not in chat.apply_chat_template({"messages": [QUESTION]}, tiny_tokenizer, tools=[])["text"]


def test_trap_13_unpaired_answers_alternate_so_that_batches_in_order_hold_both_labels():
    data = datasets.Dataset.from_dict({"prompt": ["p"] * 1500, "chosen": ["a"] * 1500, "rejected": ["b"] * 1500})
    labels = unpair_preference_dataset(data)["label"]
    assert all(set(labels[i : i + 4]) == {True, False} for i in range(0, 3000, 4))


def test_trap_14_unpairing_never_overwrites_a_column():
    data = datasets.Dataset.from_dict({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"], "label": [3]})
    with raises(DataError, "'label'"):
        unpair_preference_dataset(data)


def test_trap_15_a_prompt_that_the_answers_repeat_stands_once_and_is_told(tiny_tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(formats, "_logged", set())
    sides = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {**ANSWER, "content": "No."}]}
    data = datasets.Dataset.from_list([{"prompt": [QUESTION], **sides}] * 2)
    with caplog.at_level(logging.WARNING):
        repeated = prepare_reward_dataset(data, tiny_tokenizer)
    whole = prepare_reward_dataset(datasets.Dataset.from_list([sides] * 2), tiny_tokenizer)
    assert repeated.to_list() == whole.to_list()
    assert caplog.text.count("begin with the messages of the prompt") == 1


def test_trap_16_sharegpt_speakers_become_roles_and_are_told_once(tiny_tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(formats, "_logged", set())
    turns = [{"from": "human", "value": "What is 2?"}, {"from": "gpt", "value": "A number."}]
    with caplog.at_level(logging.WARNING):
        data = prepared([{"conversations": turns}] * 3, tiny_tokenizer, assistant_only_loss=True)
    assert trained(data[0], tiny_tokenizer) == "A number.<|im_end|>"
    assert "human" not in text_of(data[0], tiny_tokenizer)
    assert caplog.text.count("messages from 'human' are read as role 'user'") == 1


def test_trap_17_reasoning_that_the_template_leaves_out_is_refused(tiny_tokenizer):
    """The template of the fixture writes content alone: a thinking model would be taught to answer without thinking."""
    rows = [{"messages": [QUESTION, {**ANSWER, "reasoning_content": "two is even"}]}]
    with raises(ModelError, "PT-K116", "row 0"):
        prepared(rows, tiny_tokenizer)


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
def test_trap_17_reasoning_goes_under_the_name_that_the_template_reads(tiny_tokenizer, caplog, monkeypatch, name):
    monkeypatch.setattr(formats, "_logged", set())
    tiny_tokenizer.chat_template = TOOLS_TEMPLATE
    with caplog.at_level(logging.WARNING):
        (row,) = prepared([{"messages": [QUESTION, {**ANSWER, name: "two is even"}]}], tiny_tokenizer)
    assert "assistant\ntwo is even|A number." in text_of(row, tiny_tokenizer)
    assert ("renamed to 'reasoning_content'" in caplog.text) == (name != "reasoning_content")


QWEN3_LIKE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_trap_18_a_think_tag_that_the_prompt_opened_is_neither_doubled_nor_lost(tiny_tokenizer):
    """The prompt ends in '<think>', the model wrote 'because\\n</think>\\n\\ntwo': rendered again it is what it saw and wrote."""
    tiny_tokenizer.chat_template = QWEN3_LIKE
    said = "because\n</think>\n\ntwo"
    (prompt,) = tokenize_prompts([{"prompt": [QUESTION]}], tiny_tokenizer)
    rows = [{"prompt": [QUESTION], "completion": [{"role": "assistant", "content": "<think>\n" + said}]}]
    (row,) = prepared(rows, tiny_tokenizer)
    seen = tiny_tokenizer.decode(prompt)
    assert text_of(row, tiny_tokenizer).startswith(seen + said + "<|im_end|>")
    assert trained(row, tiny_tokenizer).strip() == said + "<|im_end|>"


def test_trap_18_the_training_template_of_a_thinking_family_renders_one_block(tiny_tokenizer):
    from posttrain.data.templates import FAMILIES, training_template

    family = next(f for f in FAMILIES if f.file == "qwen3")
    tiny_tokenizer.chat_template = training_template(family)
    assert get_training_chat_template(tiny_tokenizer) is None
    message = {"role": "assistant", "content": "<think>\nbecause\n</think>\n\ntwo"}
    text = tiny_tokenizer.apply_chat_template([QUESTION, message], tokenize=False)
    assert text.count("<think>") == text.count("</think>") == 1


def outside(template):
    """The same template with the end of turn outside of what is marked."""
    inner, outer = "+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{- '<|im_end|>' }}"
    assert inner in template
    return template.replace(inner, outer)


def test_trap_19_an_end_of_turn_outside_the_marks_is_refused_with_assistant_only_loss(tiny_tokenizer):
    tiny_tokenizer.chat_template = outside(CHAT_TEMPLATE)
    rows = [{"messages": [QUESTION, ANSWER]}]
    with raises(DataError):
        prepared(rows, tiny_tokenizer, assistant_only_loss=True)
    assert trained(prepared(rows, tiny_tokenizer)[0], tiny_tokenizer).endswith("A number.<|im_end|>\n")


@pytest.mark.parametrize("adds", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("text", ["once", "<|im_start|>once", "once<|im_end|>", "<|im_start|>once<|im_end|>\n"])
def test_trap_20_t3_a_text_has_one_eos_and_at_most_one_bos(adds, text):
    tokenizer = ends_by_itself(build_tokenizer(), *adds)
    (row,) = prepared([{"text": text}], tokenizer)
    bos = adds[0] or text.startswith("<|im_start|>")
    assert text_of(row, tokenizer) == "<|im_start|>" * bos + "once<|im_end|>"


def test_trap_20_t3_a_second_bos_is_told_with_the_row(caplog):
    tokenizer = ends_by_itself(build_tokenizer(), bos=True)
    with caplog.at_level(logging.WARNING):
        prepared([{"text": "plain"}, {"text": "<|im_start|>once"}], tokenizer)
    assert "already began with the bos token, so no second one was added. Row 1 is now '<|im_start|>once" in caplog.text


def test_trap_20_t3_a_rendered_conversation_gets_no_second_bos():
    tokenizer = ends_by_itself(build_tokenizer(), bos=True, eos=True)
    (row,) = prepared([{"messages": [QUESTION, ANSWER]}], tokenizer)
    assert text_of(row, tokenizer) == tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False)


def test_trap_20_t3_a_prompt_is_not_ended_by_a_tokenizer_that_ends_every_text(caplog):
    tokenizer = ends_by_itself(build_tokenizer(), eos=True)
    with caplog.at_level(logging.WARNING):
        (row,) = prepared([{"prompt": "Say: ", "completion": "hi"}], tokenizer)
    assert trained(row, tokenizer) == "hi<|im_end|>"
    assert not caplog.records
    assert tokenizer.decode(tokenize_prompts([{"prompt": "Say: "}], tokenizer)[0]) == "Say: "


def test_trap_21_the_end_is_trained_although_it_is_the_pad_token(tiny_tokenizer):
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id
    data = prepared([{"text": "a"}, {"text": "a longer text"}], tiny_tokenizer)
    collated = DataCollatorForLanguageModeling(tiny_tokenizer.pad_token_id)(data.to_list())
    length = len(data[0]["input_ids"])
    assert collated["labels"][0, length - 1] == tiny_tokenizer.eos_token_id
    assert (collated["labels"][0, length:] == -100).all()
    (batch,) = collate(document_rows(data), pad_token_id=2, layout=Layout("padded"))
    assert batch.num_loss_tokens == sum(len(row["input_ids"]) - 1 for row in data)


def test_trap_23_a_pair_is_cut_where_prompt_and_answer_end_together_and_never_to_nothing():
    collator = DataCollatorForPreference(0, max_length=4)
    row = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5, 6], "rejected_ids": [7]}
    batch = collator([row])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 7, 0]]
    assert batch["completion_mask"].sum(1).tolist() == [2, 1]
    with pytest.raises(DataError, match="row 0"):
        collator([{**row, "prompt_ids": [1, 2, 3, 4]}])


def test_trap_24_bfd_never_splits_a_document():
    rows = [[i] * n for i, n in enumerate([7, 3, 3, 2, 5, 1])]
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": rows}), 7)
    pieces = []
    for row in packed:
        start = 0
        for length in row["seq_lengths"]:
            pieces.append(row["input_ids"][start : start + length])
            start += length
    assert sorted(pieces) == sorted(rows)


def test_trap_25_plain_prompts_of_models_with_bos_begin_with_it_once():
    tokenizer = ends_by_itself(build_tokenizer(), bos=True)
    plain, given = tokenize_prompts([{"prompt": "What is"}, {"prompt": "<|im_start|>What is"}], tokenizer)
    assert plain == given == tokenizer("What is")["input_ids"]
    assert plain[0] == tokenizer.bos_token_id != plain[1]
    (row,) = prepared([{"prompt": "What is", "completion": " 2"}], tokenizer)  # Training and generation agree.
    assert row["input_ids"][: len(plain)] == plain


def test_trap_25_neighbours_that_render_differently_are_each_tokenised(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ mood }}" + CHAT_TEMPLATE
    rows = [{"prompt": [QUESTION], "chat_template_kwargs": {"mood": mood}} for mood in ("calm", "calm", "wild")]
    texts = [tiny_tokenizer.decode(ids) for ids in tokenize_prompts(rows, tiny_tokenizer)]
    assert [text[:4] for text in texts] == ["calm", "calm", "wild"]


def test_trap_25_an_argument_that_other_rows_have_is_not_given_by_this_one(tiny_tokenizer):
    """Arrow gives each row's arguments the keys of all: a None of its own would win over the run's."""
    tiny_tokenizer.chat_template = "{{ mood }}" + CHAT_TEMPLATE
    rows = [{"prompt": [QUESTION], "chat_template_kwargs": kwargs} for kwargs in ({"mood": "wild"}, {"tone": "sad"})]
    data = datasets.Dataset.from_list(rows)
    ids = tokenize_prompts(list(data), tiny_tokenizer, chat_template_kwargs={"mood": "calm"})
    assert [tiny_tokenizer.decode(one)[:4] for one in ids] == ["wild", "calm"]


# Wrong attention, batches, order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_trap_26_documents_of_one_row_do_not_see_each_other(tiny_tokenizer, implementation):
    model = build_model(len(tiny_tokenizer), attn_implementation=implementation)
    rows = [Row([], [[5, 6, 7, 8]], [[1] * 4]), Row([], [[9, 10, 11]], [[1] * 3])]
    (batch,) = collate(rows, pad_token_id=2, layout=Layout("tree", row_tokens=64))
    assert batch.input_ids.shape[0] == 1
    with torch.no_grad():
        together = forward(model, batch).logp[0]
    for number, alone in enumerate(sequence_logps(model, rows)):
        assert torch.allclose(together[batch.sequence[0] == number][1:], alone[1:], atol=1e-4)
    first, second = (batch.sequence[0] == 0).nonzero(), (batch.sequence[0] == 1).nonzero()
    assert not forest_mask(batch)[0, 0][second, first.T].any()


def test_trap_28_packed_rows_in_the_padded_collator_are_refused():
    with pytest.raises(DataError, match="seq_lengths"):
        DataCollatorForLanguageModeling(0)([{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}])


def test_trap_29_every_epoch_has_its_order_and_a_resumed_run_finds_it():
    whole = RepeatSampler(range(20), 1, batch_size=4, seed=1)
    orders = [list(whole), list(whole)]
    assert orders[0] != orders[1]
    resumed = RepeatSampler(range(20), 1, batch_size=4, seed=1)
    resumed.set_epoch(1)
    assert list(resumed) == orders[1]


def test_trap_30_fewer_prompts_than_one_generation_are_refused():
    with pytest.raises(DataError, match="3"):
        RepeatSampler(range(3), 2, batch_size=4)


def test_trap_31_splitting_a_batch_leaves_no_sample_out():
    parts = split_tensor_dict({"ids": torch.arange(6)[:, None]}, 3)
    assert [part["ids"].flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    with raises(DataError, "7", "3"):
        split_tensor_dict({"ids": torch.arange(7)[:, None]}, 3)


def test_trap_34_the_kl_term_never_pairs_a_prompt_with_an_answer_of_its_own(tmp_path):
    """Unpaired answers stand side by side, so the neighbour often has the same prompt; the last group may be a row alone."""
    from posttrain.methods.kto import KTOConfig, partners

    for prompts in ([1, 1, 2, 2], [1, 1, 1, 2], [1, 2, 3, 4, 5], [1, 1, 2, 2, 3]):
        rows = [Row([prompt], [[10 + i]], [[1]]) for i, prompt in enumerate(prompts)]
        found = partners(rows)
        assert all(prompts[p] != prompts[i] for i, p in enumerate(found)), (prompts, found)
    assert partners([Row([1], [[5]], [[1]])]) == [None]  # No partner rather than itself.
    assert partners([Row([1], [[5]], [[1]]), Row([1], [[6]], [[1]])]) == [None, None]
    with raises(ConfigError, "per_device_train_batch_size=1", "'kto'"):
        KTOConfig(str(tmp_path), per_device_train_batch_size=1)


def test_trap_35_a_gap_in_the_mask_loses_no_token():
    mask, ids = flush_left(torch.tensor([[0, 1, 0, 1, 1]]), torch.tensor([[9, 1, 9, 2, 3]]))
    assert ids[mask.bool()].tolist() == [1, 2, 3]


def test_trap_36_an_empty_first_row_does_not_turn_ids_to_float():
    with pytest.raises(DataError, match="row 0"):
        DataCollatorForLanguageModeling(0)([{"input_ids": []}, {"input_ids": [1]}])
    with raises(DataError, "1", "torch.int64", "0", "torch.float32"):
        pad([torch.tensor([]), torch.tensor([1, 2])])


# Of the supervised layer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [{"text": "all of it"}, {"messages": [QUESTION, ANSWER]}])
def test_t5_completion_only_loss_without_a_completion_is_refused(tiny_tokenizer, row):
    with raises(DataError):
        prepared([row], tiny_tokenizer, completion_only_loss=True)


def test_t10_documents_without_a_trained_token_are_not_packed_and_the_share_is_reported(tiny_tokenizer):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}, {"input_ids": [8, 9, 10], "labels": [8, -100, 10]}]
    data, report = prepare(rows, tiny_tokenizer, packing="bfd", max_length=8)
    assert data.to_list() == [{"input_ids": [8, 9, 10], "labels": [8, -100, 10], "seq_lengths": [3]}]
    assert (report.trained_tokens, report.tokens) == (1, 3)  # The first token of a row has nothing that predicts it.


class Rows(list):
    """A list with the one attribute of a dataset that tells its columns; Arrow would refuse the mixture by itself."""

    column_names = ("prompt", "completion")


def test_t27_mixed_rows_are_refused_by_number(tiny_tokenizer):
    plain, conversational = {"prompt": "q", "completion": "a"}, {"prompt": [QUESTION], "completion": [ANSWER]}
    with raises(DataError, "row 3", "row 0"):
        formats.describe_dataset(Rows([plain, plain, plain, conversational]))
    # Looked at in a fixed order, never a set's: see also the test that runs other hash seeds.
    with raises(DataError, "'chosen'", "'rejected'", "'prompt'"):
        formats.is_conversational({"prompt": "q", "chosen": [ANSWER], "rejected": [ANSWER]})
    assert isinstance(formats.MESSAGE_COLUMNS, tuple)


def test_t28_each_split_has_its_own_type(tiny_tokenizer):
    """Unset, the option follows the rows of each split; set, it must fit every one of them."""
    plain, parted = [{"text": "whole"}], [{"prompt": "a ", "completion": "b"}]
    assert trained(prepared(parted, tiny_tokenizer)[0], tiny_tokenizer) == "b<|im_end|>"
    assert trained(prepared(plain, tiny_tokenizer)[0], tiny_tokenizer) == "whole<|im_end|>"
    with raises(DataError):
        prepare_sft_dataset(
            datasets.Dataset.from_list(plain), tiny_tokenizer, SupervisedOptions(completion_only_loss=True), name="eval"
        )


def test_t29_what_the_limit_cuts_is_told_in_rows_and_trained_tokens(tiny_tokenizer, caplog):
    rows = [{"input_ids": [5] * 10, "labels": [5] * 10}, {"input_ids": [5] * 4, "labels": [5] * 4}]
    with caplog.at_level(logging.WARNING):
        prepared(rows, tiny_tokenizer, max_length=6)
    # Of 9 + 3 tokens that have a predecessor, 4 lie behind the limit.
    assert "1 of 2 rows were truncated to max_length=6. They lost 4 trained tokens (33.3 % of all)" in caplog.text


def test_t40_a_batch_is_tokenised_in_one_call_and_a_second_preparation_is_read_from_the_cache(tiny_tokenizer, tmp_path):
    rows = [{"text": f"row {i}"} for i in range(50)]
    seen = []

    class Counting(type(tiny_tokenizer)):
        def __call__(self, *args, **kwargs):
            seen.append(1)
            return super().__call__(*args, **kwargs)

    tiny_tokenizer.__class__ = Counting
    prepared(rows, tiny_tokenizer)
    assert len(seen) <= 4  # One for the batch, a few to learn what ends a turn; not one a row.
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "rows")
    prints = set()
    for _ in range(2):
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        for _ in range(2):  # The second time the tokenizer was used already, which changes what it holds.
            loaded = datasets.load_from_disk(tmp_path / "rows")
            prints.add(prepare_sft_dataset(loaded, tokenizer, SupervisedOptions())[0]._fingerprint)
    assert len(prints) == 1


def test_rows_that_another_release_tokenised_are_not_taken_from_the_cache(tiny_tokenizer, tmp_path, monkeypatch):
    datasets.Dataset.from_list([{"text": "a row"}] * 2).save_to_disk(tmp_path)

    def name(**options):
        rows = datasets.load_from_disk(tmp_path)
        return prepare_sft_dataset(rows, tiny_tokenizer, SupervisedOptions(**options))[0]._fingerprint

    before, shorter = name(), name(max_length=2)
    monkeypatch.setattr("posttrain.__version__", "another")
    assert len({before, shorter, name()}) == 3


def test_t41_rows_are_packed_in_windows_of_ten_thousand_and_a_bad_fill_is_told(caplog):
    """Documents of 6 and of 4 tokens fill rows of 10 only if they meet: in windows of 1000 rows they would not."""
    rows = [[1] * 6] * 4000 + [[2] * 4] * 4000
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": rows}), 10)
    assert len(packed) == 4000
    with caplog.at_level(logging.WARNING):
        pack_dataset(datasets.Dataset.from_dict({"input_ids": [[1] * 6] * 10}), 10)
    assert "60.00 % full" in caplog.text


def test_t52_padding_free_batches_carry_the_bounds_of_their_documents():
    rows = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}, {"input_ids": [6], "seq_lengths": [1]}]
    batch = DataCollatorForLanguageModeling(0, padding_free=True)(rows)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 2, 5, 6]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"]) == (3, 3)
    assert batch["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2]]
