"""Collators of token rows: the vectors of the specification, and what must not happen silently."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.extensions.trl_helpers.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForPreference,
    DataCollatorForReward,
    DataCollatorForUnpairedPreference,
    identity,
)
from tests.conftest import build_model
from tests.wordings import raises

PAD = 9
positions_of = DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths


def rows(*ids, **columns):
    return [{"input_ids": i} | {k: v[n] for k, v in columns.items()} for n, i in enumerate(ids)]


PAIRS = [
    {"prompt_ids": [21], "chosen_ids": [31, 32, 33], "rejected_ids": [41]},
    {"prompt_ids": [22, 23], "chosen_ids": [34], "rejected_ids": [42, 43]},
]
LABELLED = [
    {"prompt_ids": [21, 22], "completion_ids": [31, 32], "KL_completion_ids": [33], "label": False},
    {"prompt_ids": [23], "completion_ids": [33], "KL_completion_ids": [31, 32], "label": True},
]
REWARDS = [
    {"chosen_ids": [51], "rejected_ids": [61, 62, 63]},
    {"chosen_ids": [52, 53], "rejected_ids": [64]},
]
# Every collator with rows it takes and the column that must never be empty.
ALL = [
    (DataCollatorForLanguageModeling, rows([61, 62], [63, 64, 65, 66]), "input_ids"),
    (DataCollatorForPreference, PAIRS, "chosen_ids"),
    (DataCollatorForReward, REWARDS, "rejected_ids"),
    (DataCollatorForUnpairedPreference, LABELLED, "completion_ids"),
]
every_collator = pytest.mark.parametrize(("collator", "examples", "column"), ALL, ids=[c[0].__name__ for c in ALL])


# Language modelling


def test_language_modelling_pads_on_the_right_vector():
    batch = DataCollatorForLanguageModeling(PAD)(rows([61, 62], [63, 64, 65, 66]))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].tolist() == [[61, 62, PAD, PAD], [63, 64, 65, 66]]
    assert batch["labels"].tolist() == [[61, 62, -100, -100], [63, 64, 65, 66]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("multiple", "ids", "labels", "mask"),
    [
        (None, [[1, 2, 3], [4, 5, PAD]], [[1, 2, 3], [4, 5, -100]], [[1, 1, 1], [1, 1, 0]]),
        (
            4,
            [[1, 2, 3, PAD], [4, 5, PAD, PAD]],
            [[1, 2, 3, -100], [4, 5, -100, -100]],
            [[1, 1, 1, 0], [1, 1, 0, 0]],
        ),
    ],
)
def test_padded_table_of_the_specification(multiple, ids, labels, mask):
    batch = DataCollatorForLanguageModeling(PAD, pad_to_multiple_of=multiple)(rows([1, 2, 3], [4, 5]))
    assert batch["input_ids"].tolist() == ids
    assert batch["labels"].tolist() == labels
    assert batch["attention_mask"].tolist() == mask


@pytest.mark.parametrize(
    ("examples", "multiple", "ids", "positions", "labels"),
    [
        (
            rows([61, 62], [63, 64, 65, 66]),
            None,
            [61, 62, 63, 64, 65, 66],
            [0, 1, 0, 1, 2, 3],
            [-100, 62, -100, 64, 65, 66],
        ),
        (rows([1, 2, 3], [4, 5]), None, [1, 2, 3, 4, 5], [0, 1, 2, 0, 1], [-100, 2, 3, -100, 5]),
        (
            rows([1, 2, 3], [4, 5]),
            4,
            [1, 2, 3, 4, 5, PAD, PAD, PAD],
            [0, 1, 2, 0, 1, 0, 0, 0],
            [-100, 2, 3, -100, 5, -100, -100, -100],
        ),
        (
            rows([71, 72, 73, 74, 75], [76], seq_lengths=[[2, 3], [1]]),
            None,
            [71, 72, 73, 74, 75, 76],
            [0, 1, 0, 1, 2, 0],
            [-100, 72, -100, 74, 75, -100],
        ),
        (
            rows([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], seq_lengths=[[3, 3], [4, 1]]),
            None,
            list(range(1, 12)),
            [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0],
            [-100, 2, 3, -100, 5, 6, -100, 8, 9, 10, -100],
        ),
    ],
)
def test_padding_free_vectors(examples, multiple, ids, positions, labels):
    batch = DataCollatorForLanguageModeling(PAD, padding_free=True, pad_to_multiple_of=multiple)(examples)
    assert "attention_mask" not in batch
    assert batch["input_ids"].tolist() == [ids]
    assert batch["position_ids"].tolist() == [positions]
    assert batch["labels"].tolist() == [labels]


def test_padding_free_batch_carries_the_bounds_of_its_documents():
    collate = DataCollatorForLanguageModeling(PAD, padding_free=True)
    batch = collate(rows([71, 72, 73, 74, 75], [76], seq_lengths=[[2, 3], [1]]))
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 2, 5, 6]
    assert (batch["max_length_q"], batch["max_length_k"]) == (3, 3)
    assert isinstance(batch["max_length_q"], int)
    assert batch["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2]]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        assert batch[name].dtype == torch.int32


def test_each_token_of_the_padding_free_tail_is_a_document_of_its_own():
    batch = DataCollatorForLanguageModeling(PAD, padding_free=True, pad_to_multiple_of=4)(rows([1, 2, 3], [4, 5]))
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 7, 8]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 3, 4]]
    assert batch["max_length_q"] == 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=5), st.integers(1, 8))
def test_bounds_positions_and_document_numbers_agree(lengths, multiple):
    """Three descriptions of the same documents, each derived here from the lengths alone."""
    examples = [{"input_ids": list(range(1, sum(n) + 1)), "seq_lengths": n} for n in lengths]
    batch = DataCollatorForLanguageModeling(0, padding_free=True, pad_to_multiple_of=multiple)(examples)
    flat = [n for row in lengths for n in row]
    flat += [1] * (-sum(flat) % multiple)
    assert batch["position_ids"][0].tolist() == [p for n in flat for p in range(n)]
    assert batch["seq_idx"][0].tolist() == [i for i, n in enumerate(flat) for _ in range(n)]
    assert batch["cu_seq_lens_q"].tolist() == [0, *np.cumsum(flat).tolist()]
    assert batch["max_length_q"] == max(flat)
    trained = batch["labels"] != -100
    assert int(trained.sum()) == sum(n - 1 for row in lengths for n in row)


def test_position_ids_of_packed_lengths_vector():
    out = positions_of([[2, 2], [3]])
    assert [p.tolist() for p in out] == [[0, 1, 0, 1], [0, 1, 2]]


def test_zero_length_document_is_refused_instead_of_shifting_the_restart():
    with raises(DataError, "row 1", "2", "0", "1"):
        positions_of([[3], [2, 0, 1]])
    with raises(DataError, "row 0"):
        positions_of([[]])


def test_seq_lengths_that_do_not_add_up_are_refused_with_both_numbers():
    with raises(DataError, "row 0", "2", "4", "5"):
        DataCollatorForLanguageModeling(PAD, padding_free=True)(rows([1, 2, 3, 4, 5], seq_lengths=[[2, 2]]))


def test_packed_rows_with_the_padded_collator_are_refused():
    with raises(DataError, "padding_free=True"):
        DataCollatorForLanguageModeling(PAD)(rows([1, 2, 3], seq_lengths=[[1, 2]]))


@pytest.mark.parametrize("padding_free", [False, True])
def test_given_labels_are_kept_and_missing_ones_in_some_rows_are_refused(padding_free):
    collate = DataCollatorForLanguageModeling(PAD, padding_free=padding_free)
    batch = collate(rows([1, 2, 3], [4, 5], labels=[[-100, -100, 3], [-100, 5]]))
    expected = [[-100, -100, 3, -100, 5]] if padding_free else [[-100, -100, 3], [-100, 5, -100]]
    assert batch["labels"].tolist() == expected
    with raises(DataError, "row 1", "'labels'", "row 0"):
        collate([{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3]}])
    with raises(DataError, "row 0", "1", "2", "input_ids"):
        collate(rows([1, 2], labels=[[2]]))


def test_mask_columns_of_language_modelling_rows_are_ignored():
    plain = DataCollatorForLanguageModeling(PAD)(rows([1, 2], [3]))
    masked = DataCollatorForLanguageModeling(PAD)(
        rows([1, 2], [3], completion_mask=[[0, 1], [1]], attention_mask=[[0, 0], [0]])
    )
    assert all(torch.equal(plain[k], masked[k]) for k in plain)


def test_padded_batches_have_position_ids_for_sequence_parallelism_when_asked():
    batch = DataCollatorForLanguageModeling(PAD, return_position_ids=True)(rows([1, 2, 3], [4]))
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_of_a_padding_free_batch_do_not_attend_to_each_other(attention):
    model = build_model(64, attn_implementation=attention)
    a, b = [5, 6, 7, 8], [9, 10, 11]
    batch = DataCollatorForLanguageModeling(0, padding_free=True, pad_to_multiple_of=8)(rows(a, b))
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([x]), use_cache=False).logits[0] for x in (a, b)])
        leaked = model(input_ids=torch.tensor([a + b]), use_cache=False).logits[0]
    assert (together[:7] - alone).abs().max() < 1e-3
    assert (leaked[4:] - alone[4:]).abs().max() > 1e-2  # The test can fail: without positions they do attend.


# Preference


def test_preference_vector():
    batch = DataCollatorForPreference(PAD)(PAIRS)
    assert set(batch) == {"input_ids", "attention_mask", "completion_mask"}
    assert batch["input_ids"].tolist() == [[21, 31, 32, 33], [22, 23, 34, 9], [21, 41, 9, 9], [22, 23, 42, 43]]
    assert batch["completion_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


def test_preference_truncates_prompt_and_completion_together_before_padding():
    start = DataCollatorForPreference(PAD, max_length=3)(PAIRS)
    assert start["input_ids"].tolist() == [[21, 31, 32], [22, 23, 34], [21, 41, 9], [22, 23, 42]]
    assert start["completion_mask"].tolist() == [[0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 0, 1]]
    end = DataCollatorForPreference(PAD, max_length=2, truncation_mode="keep_end")(PAIRS)
    assert end["input_ids"].tolist() == [[32, 33], [23, 34], [21, 41], [42, 43]]
    assert end["completion_mask"].tolist() == [[1, 1], [0, 1], [0, 1], [1, 1]]


def test_unknown_truncation_mode_is_refused_at_construction():
    with raises(ConfigError, "truncation_mode='keep_strat'", "'keep_start'"):
        DataCollatorForPreference(PAD, truncation_mode="keep_strat")


@pytest.mark.parametrize("collator", [DataCollatorForPreference, DataCollatorForUnpairedPreference])
@pytest.mark.parametrize("limit", [0, -1])
def test_max_length_below_one_is_refused_at_construction(collator, limit):
    with pytest.raises(ConfigError, match=f"max_length={limit} must be at least 1"):
        collator(PAD, max_length=limit)


def test_row_whose_prompt_fills_the_limit_is_refused_instead_of_training_nothing():
    with raises(DataError, "row 1", "2", "max_length=2", "'chosen_ids'"):
        DataCollatorForPreference(PAD, max_length=2)(PAIRS)
    with pytest.raises(DataError, match=r"row 0 .*'completion_ids'"):
        DataCollatorForUnpairedPreference(PAD, max_length=2)(LABELLED)


def test_reference_log_probs_are_float_vectors_and_must_be_in_every_row():
    examples = [
        PAIRS[0] | {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2},
        PAIRS[1] | {"ref_chosen_logps": np.float32(-3), "ref_rejected_logps": torch.tensor(-4.0)},
    ]
    batch = DataCollatorForPreference(PAD)(examples)
    assert batch["ref_chosen_logps"].tolist() == [-1.5, -3.0]
    assert batch["ref_rejected_logps"].tolist() == [-2.0, -4.0]
    assert batch["ref_rejected_logps"].dtype == torch.float32
    with raises(DataError, "row 1", "'ref_chosen_logps'", "row 0"):
        DataCollatorForPreference(PAD)([examples[0], PAIRS[1]])
    with raises(DataError, "row 0", "'ref_chosen_logps'", "1.0"):
        DataCollatorForPreference(PAD)([examples[0] | {"ref_chosen_logps": [1.0]}, examples[1]])


def test_preference_takes_an_empty_prompt():
    batch = DataCollatorForPreference(PAD)([{"prompt_ids": [], "chosen_ids": [1, 2], "rejected_ids": [3]}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, PAD]]
    assert batch["input_ids"].dtype == torch.long


# Unpaired preference


def test_unpaired_preference_vector():
    batch = DataCollatorForUnpairedPreference(PAD, max_length=3)(LABELLED)
    assert batch["input_ids"].tolist() == [[21, 22, 31], [23, 33, 9]]
    assert batch["completion_mask"].tolist() == [[0, 0, 1], [0, 1, 0]]
    assert batch["KL_input_ids"].tolist() == [[21, 22, 33], [23, 31, 32]]
    assert batch["KL_completion_mask"].tolist() == [[0, 0, 1], [0, 1, 1]]
    assert batch["label"].tolist() == [False, True]
    assert batch["label"].dtype == torch.bool


def test_kl_rows_have_a_length_of_their_own_and_are_optional():
    examples = [LABELLED[0] | {"completion_ids": [1, 2, 3, 4], "KL_completion_ids": [5]}]
    batch = DataCollatorForUnpairedPreference(PAD)(examples)
    assert batch["input_ids"].shape == (1, 6)
    assert batch["KL_attention_mask"].tolist() == [[1, 1, 1]]
    without = [{k: v for k, v in e.items() if k != "KL_completion_ids"} for e in LABELLED]
    assert set(DataCollatorForUnpairedPreference(PAD)(without)) == {
        "input_ids",
        "attention_mask",
        "completion_mask",
        "label",
    }
    with raises(DataError, "row 1", "'KL_completion_ids'"):
        DataCollatorForUnpairedPreference(PAD)([LABELLED[0], without[1]])


@pytest.mark.parametrize("good", [1, True, np.bool_(True), np.int64(1), torch.tensor(True), torch.tensor(1)])
def test_labels_of_zero_and_one_become_bool(good):
    batch = DataCollatorForUnpairedPreference(PAD)([LABELLED[0] | {"label": good}, LABELLED[1] | {"label": 0}])
    assert batch["label"].tolist() == [True, False]
    assert batch["label"].dtype == torch.bool


@pytest.mark.parametrize("bad", ["true", None, 2, -1, 0.9, 1.0])
def test_labels_that_are_no_bool_are_refused_with_their_row(bad):
    with raises(DataError, "row 1", "'label'"):
        DataCollatorForUnpairedPreference(PAD)([LABELLED[0], LABELLED[1] | {"label": bad}])


def test_unpaired_log_probs_become_float_vectors():
    examples = [e | {"ref_logps": -1, "ref_KL_logps": -2.5} for e in LABELLED]
    batch = DataCollatorForUnpairedPreference(PAD)(examples)
    assert batch["ref_logps"].tolist() == [-1, -1]
    assert batch["ref_KL_logps"].tolist() == [-2.5, -2.5]


# Reward


def test_reward_vectors():
    batch = DataCollatorForReward(PAD)(REWARDS)
    assert batch["input_ids"].tolist() == [[51, 9, 9], [52, 53, 9], [61, 62, 63], [64, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert set(batch) == {"input_ids", "attention_mask"}
    other = [{"chosen_ids": [1, 2, 3], "rejected_ids": [4, 5]}, {"chosen_ids": [6, 7], "rejected_ids": [8]}]
    assert DataCollatorForReward(0)(other)["input_ids"].tolist() == [[1, 2, 3], [6, 7, 0], [4, 5, 0], [8, 0, 0]]


def test_margin_is_float32_and_missing_in_one_row_is_refused():
    examples = [REWARDS[0] | {"margin": 1}, REWARDS[1] | {"margin": 0.25}]
    margin = DataCollatorForReward(PAD)(examples)["margin"]
    assert margin.tolist() == [1.0, 0.25]
    assert margin.dtype == torch.float32
    for broken in ([examples[0], REWARDS[1]], [examples[0], REWARDS[1] | {"margin": None}]):
        with raises(DataError, "row 1", "'margin'", "row 0"):
            DataCollatorForReward(PAD)(broken)
    with raises(DataError, "row 0", "'margin'", "row 1"):
        DataCollatorForReward(PAD)([REWARDS[0], examples[1]])


# All of them


@every_collator
def test_pad_equal_to_a_real_token_masks_no_real_token(collator, examples, column):
    """With the last row's last token as pad id, masks and labels must be those of any other pad id."""
    eos = examples[-1][column][-1]
    a, b = collator(pad_token_id=eos)(examples), collator(pad_token_id=0)(examples)
    for name in a:
        if not name.endswith("input_ids"):
            assert torch.equal(a[name], b[name]), name
        else:
            mask = a[name.replace("input_ids", "attention_mask")].bool()
            assert torch.equal(a[name][mask], b[name][mask])
            assert (a[name][~mask] == eos).all()


@every_collator
def test_ids_and_masks_are_int64_whatever_the_rows_were_stored_as(collator, examples, column):
    plain = collator(PAD)(examples)
    for convert in (np.array, torch.tensor, lambda x: np.array(x, dtype=np.int32), tuple):
        stored = [{k: convert(v) if k.endswith("_ids") else v for k, v in e.items()} for e in examples]
        batch = collator(PAD)(stored)
        for name, value in batch.items():
            assert torch.equal(value, plain[name])
            assert value.dtype == (torch.bool if name == "label" else torch.long)


@every_collator
def test_empty_row_is_refused_instead_of_turning_ids_to_float(collator, examples, column):
    for row in range(2):
        broken = [dict(e) for e in examples]
        broken[row][column] = []
        with pytest.raises(DataError, match=rf"row {row} .*column '{column}', is empty"):
            collator(PAD)(broken)


@every_collator
def test_empty_batch_is_refused(collator, examples, column):
    with raises(DataError):
        collator(PAD)([])


@every_collator
def test_missing_column_is_named_with_its_row(collator, examples, column):
    broken = [examples[0], {k: v for k, v in examples[1].items() if k != column}]
    with pytest.raises(DataError, match=rf"row 1 .*no '{column}'; its columns are"):
        collator(PAD)(broken)


@every_collator
@pytest.mark.parametrize("bad", [[1.5, 2.0], [[1, 2]], "text", [[1], [2, 3]]])
def test_rows_that_are_no_list_of_integers_are_refused(collator, examples, column, bad):
    with pytest.raises(DataError, match=rf"row 0 .*column '{column}'"):
        collator(PAD)([examples[0] | {column: bad}, examples[1]])


@every_collator
def test_one_row_is_a_batch_and_rows_are_not_changed(collator, examples, column):
    before = pickle.dumps(examples)
    batch = collator(PAD)(examples[:1])
    assert batch["input_ids"].shape[0] in (1, 2, 3)
    collator(PAD)(examples)
    assert pickle.dumps(examples) == before


@every_collator
def test_padding_to_a_multiple_adds_only_padding(collator, examples, column):
    plain, padded = collator(PAD)(examples), collator(PAD, pad_to_multiple_of=8)(examples)
    for name, value in plain.items():
        if value.dim() == 2:
            width = value.shape[1]
            assert padded[name].shape[1] == 8
            assert torch.equal(padded[name][:, :width], value)
            fill = PAD if name.endswith("input_ids") else -100 if name == "labels" else 0
            assert (padded[name][:, width:] == fill).all()


@every_collator
def test_missing_pad_token_other_frameworks_and_rows_that_are_no_dicts_are_refused(collator, examples, column):
    with raises(ConfigError, "pad_token_id=None"):
        collator(pad_token_id=None)
    with pytest.raises(ConfigError, match="pad_to_multiple_of=0"):
        collator(PAD, pad_to_multiple_of=0)
    with pytest.raises(ConfigError, match="return_tensors='tf'"):
        collator(PAD, return_tensors="tf")
    with pytest.raises(ConfigError, match="return_tensors='np'"):
        collator(PAD)(examples, return_tensors="np")
    with raises(ArgumentTypeError, "row 0"):
        collator(PAD)([[1, 2]])


@every_collator
def test_collators_reach_data_loader_workers(collator, examples, column):
    copy = pickle.loads(pickle.dumps(collator(PAD)))
    assert copy == collator(PAD)
    assert torch.equal(copy(examples)["input_ids"], collator(PAD)(examples)["input_ids"])


def test_a_subclass_may_extend_a_batch():
    class WithSource(DataCollatorForReward):
        def torch_call(self, examples):
            return super().torch_call(examples) | {"source": [e["source"] for e in examples]}

    batch = WithSource(PAD)([e | {"source": "s"} for e in REWARDS])
    assert batch["source"] == ["s", "s"]


def test_positional_arguments_keep_their_places():
    assert DataCollatorForPreference(1, 2, "keep_end", 4).pad_to_multiple_of == 4
    assert DataCollatorForUnpairedPreference(1, 2, 4).pad_to_multiple_of == 4
    assert DataCollatorForLanguageModeling(1, True, False, 4).pad_to_multiple_of == 4
    assert DataCollatorForReward(1, 4).pad_to_multiple_of == 4


def test_identity_returns_the_rows_themselves():
    assert identity(PAIRS) is PAIRS
