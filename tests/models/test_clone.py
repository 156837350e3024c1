"""Cloning a chat template: tokens, special ids, embedding rows, and what must stay as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from posttrain.errors import ModelError
from posttrain.models.load import VocabularyMismatchError, clone_chat_template
from tests.conftest import build_model
from tests.wordings import raises

TEMPLATE = "{% for m in messages %}{{ '<turn>' + m.role + ' ' + m.content + '<stop>' }}{% endfor %}"


@pytest.fixture
def source(_tokenizer_folder, tmp_path):
    """Folder of a tokenizer with other special tokens: <turn>, <stop> (eos), <fill> (pad)."""
    tokenizer = AutoTokenizer.from_pretrained(_tokenizer_folder)
    tokenizer.add_tokens(["<turn>", "<stop>", "<fill>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<stop>", "<fill>", TEMPLATE
    tokenizer.save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


def rows(model) -> int:
    return model.get_input_embeddings().weight.shape[0]


def test_template_tokens_and_eos_come_over_and_every_row_has_a_token(tiny_model, tiny_tokenizer, source):
    before = len(tiny_tokenizer)
    model, tokenizer, added = clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert (model, tokenizer) == (tiny_model, tiny_tokenizer)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<stop>"
    assert tokenizer("<turn>user<stop>")["input_ids"][0] == tokenizer.convert_tokens_to_ids("<turn>")
    assert rows(model) == len(tokenizer) == model.config.vocab_size
    assert rows(model) % 64 == 0
    assert added == list(range(before, len(tokenizer)))
    assert {"<turn>", "<stop>", "<fill>", "<extra_id_0>"} <= set(tokenizer.convert_ids_to_tokens(added))
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == stop


def test_special_flags_of_the_sources_tokens_are_kept(tiny_model, tiny_tokenizer, source):
    other = AutoTokenizer.from_pretrained(source)
    other.add_tokens(["<plain>"])
    other.save_pretrained(source)
    _, tokenizer, _ = clone_chat_template(tiny_model, tiny_tokenizer, source)
    ids = tokenizer("<plain><stop>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<plain>"


def test_exact_size_without_a_multiple(tiny_model, tiny_tokenizer, source):
    model, tokenizer, added = clone_chat_template(tiny_model, tiny_tokenizer, source, None)
    assert rows(model) == len(tokenizer)
    assert len(added) == 3


def test_repeated_calls_with_another_multiple_go_on_from_the_first(tiny_model, tiny_tokenizer, source):
    _, _, first = clone_chat_template(tiny_model, tiny_tokenizer, source, 64)
    model, tokenizer, second = clone_chat_template(tiny_model, tiny_tokenizer, source, 100)
    assert rows(model) == len(tokenizer) == 400
    assert set(first).isdisjoint(second)
    assert clone_chat_template(tiny_model, tiny_tokenizer, source, 100)[2] == []
    tokens = tokenizer.convert_ids_to_tokens(first + second)
    assert len(tokens) == len(set(tokens))


def test_an_embedding_padded_beyond_the_vocabulary_never_shrinks(tiny_tokenizer, source):
    model = build_model(1000)
    kept = model.get_input_embeddings().weight[: len(tiny_tokenizer)].clone()
    model, tokenizer, added = clone_chat_template(model, tiny_tokenizer, source, None)
    assert rows(model) == len(tokenizer) == 1000
    assert torch.equal(model.get_input_embeddings().weight[: len(kept)], kept)
    assert added[-1] == 999


@pytest.mark.parametrize("tied", [True, False])
def test_added_rows_start_at_the_mean_of_the_vocabularys_rows(tied, tiny_tokenizer, source):
    known = len(tiny_tokenizer)
    model = build_model(1000, tie_word_embeddings=tied)
    with torch.no_grad():
        model.get_input_embeddings().weight[known:] = (
            50.0  # Padding of the checkpoint, never trained: no part of the mean.
        )
        model.get_output_embeddings().weight[known:] = 50.0
    model, _, added = clone_chat_template(model, tiny_tokenizer, source)
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        mean, spread = weight[:known].mean(0), weight[:known].std(0)
        assert ((weight[added] - mean).abs() <= 0.06 * spread).all()
        assert len(torch.unique(weight[added], dim=0)) == len(added)
    same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert same == tied


def test_cloning_is_the_same_every_time_and_leaves_the_global_generator_alone(_tokenizer_folder, source):
    weights = []
    for seed in (1, 2):
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_folder)
        model = build_model(len(tokenizer))
        torch.manual_seed(seed)
        clone_chat_template(model, tokenizer, source)
        weights.append(model.get_input_embeddings().weight)
    assert torch.equal(*weights)


def test_logits_of_old_tokens_do_not_move(tiny_model, tiny_tokenizer, source):
    ids = tiny_tokenizer("What is the sum?", return_tensors="pt")["input_ids"]
    known = len(tiny_tokenizer)
    before = tiny_model(ids).logits[..., :known]
    model, _, _ = clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert torch.allclose(model(ids).logits[..., :known], before, atol=1e-6)


def test_a_list_of_stop_tokens_is_extended_not_replaced(tiny_model, tiny_tokenizer, source):
    tiny_model.generation_config.eos_token_id = [2, 0]
    model, tokenizer, _ = clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert model.generation_config.eos_token_id == [2, 0, tokenizer.eos_token_id]


def test_pad_never_becomes_the_new_eos_by_accident(tiny_model, tiny_tokenizer, source):
    tiny_tokenizer.add_tokens(["<stop>"], special_tokens=True)
    tiny_tokenizer.pad_token = "<stop>"  # Its eos is <|im_end|>: pad and eos differ, until <stop> becomes eos.
    model, tokenizer, _ = clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<stop>", "<fill>")
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_pad_and_bos_are_copied_only_where_there_is_none(tiny_model, tiny_tokenizer, source):
    tiny_tokenizer.pad_token = tiny_tokenizer.bos_token = None
    model, tokenizer, _ = clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert (tokenizer.pad_token, tokenizer.bos_token) == ("<fill>", "<|im_start|>")
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_an_own_pad_token_stays(tiny_model, tiny_tokenizer, source):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    assert clone_chat_template(tiny_model, tiny_tokenizer, source)[1].pad_token == "<|endoftext|>"


def test_an_eos_from_the_sources_base_vocabulary_comes_over(tiny_model, tiny_tokenizer, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<halt>": 1, "hello": 2}, unk_token="<unk>"))
    other = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<halt>", unk_token="<unk>", chat_template=TEMPLATE
    )
    other.save_pretrained(tmp_path / "words")
    _, tokenizer, added = clone_chat_template(tiny_model, tiny_tokenizer, str(tmp_path / "words"))
    assert tokenizer.eos_token_id in added
    assert tokenizer("hi<halt>")["input_ids"][-1] == tokenizer.eos_token_id
    assert "hello" not in tokenizer.convert_ids_to_tokens(added)


def test_reward_models_work(tiny_tokenizer, source):
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=2,
    )
    model = LlamaForSequenceClassification(config)
    model, tokenizer, added = clone_chat_template(model, tiny_tokenizer, source)
    assert rows(model) == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model(torch.tensor([added[:3]])).logits.shape == (1, 1)


def test_the_text_part_of_a_composite_model_learns_the_new_eos(tiny_model, tiny_tokenizer, source):
    text = LlamaConfig(vocab_size=8, eos_token_id=2)
    tiny_model.config.get_text_config = lambda *args, **kwargs: text
    model, tokenizer, _ = clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert text.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id


def test_a_source_without_a_template_is_refused(tiny_model, tiny_tokenizer, source):
    other = AutoTokenizer.from_pretrained(source)
    other.chat_template = None
    import shutil

    shutil.rmtree(source)
    other.save_pretrained(source)
    before = len(tiny_tokenizer)
    with raises(ModelError):
        clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert len(tiny_tokenizer) == before


def test_a_multiple_below_one_is_refused(tiny_model, tiny_tokenizer, source):
    with raises(ModelError, "1", "0"):
        clone_chat_template(tiny_model, tiny_tokenizer, source, 0)


def test_a_mismatch_is_a_runtime_error_with_both_sizes(tiny_model, tiny_tokenizer, source, monkeypatch):
    monkeypatch.setattr(tiny_model, "resize_token_embeddings", lambda *args, **kwargs: None)
    with raises(VocabularyMismatchError) as caught:
        clone_chat_template(tiny_model, tiny_tokenizer, source)
    assert isinstance(caught.value, RuntimeError)
