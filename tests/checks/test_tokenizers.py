"""Two tokenizers: what makes token ids comparable, and ids that a model has rows for."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.checks import tokenizers as checks
from posttrain.checks.tokenizers import compare_tokenizers, probe_conversations, probe_texts
from tests.conftest import build_tokenizer

CORPUS = [
    "Other words make other merges: banana bandana, Anna and Hannah.",
    "zzz 99 bottles of beer on the wall, sung by every sailor",
] * 4


def byte_level(corpus=CORPUS, size=330, **special):
    """A byte-level BPE trained on another text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=names,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", **special)
    made.chat_template = build_tokenizer().chat_template
    return made


def word_level():
    """Words of a lower-cased text; everything else is unknown."""
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        CORPUS, trainers.WordLevelTrainer(special_tokens=["[UNK]", "</s>"], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>", unk_token="[UNK]")


def codes(findings):
    return [(finding.code, finding.severity) for finding in findings]


def test_there_are_two_hundred_probe_texts_and_eight_conversations(tiny_tokenizer):
    texts = probe_texts(tiny_tokenizer, tiny_tokenizer)
    assert len(texts) >= 200 and len(set(texts)) == len(texts)
    assert "<|im_end|>" in texts and any("你好" in text for text in texts)
    assert len(probe_conversations()) == 8


def test_a_tokenizer_and_its_copy_are_identical_and_nothing_is_said(tiny_tokenizer):
    match = compare_tokenizers(tiny_tokenizer, build_tokenizer(), widths=(316, 316), stops=([2], [2]))
    assert match.verdict == "identical"
    assert (match.different, match.texts, dict(match.special), match.stops) == (0, (), {}, ())
    assert match.common == len(tiny_tokenizer) and match.bytes == ("bytes", "bytes")
    assert checks.check_tokenizers(tiny_tokenizer, build_tokenizer(), stops=([2], [2])) == []


def test_models_of_other_widths_share_the_columns_of_their_tokens(tiny_tokenizer):
    """As a small and a large model of one family: 151 936 and 152 064 logits for the same 151 665 tokens."""
    match = compare_tokenizers(tiny_tokenizer, build_tokenizer(), widths=(320, 384))
    assert (match.verdict, match.columns) == ("identical-padded", len(tiny_tokenizer))
    assert checks.check_match(match, on_policy=True) == []


def test_two_vocabularies_of_one_size_are_an_error_that_shows_ids_of_both(tiny_tokenizer):
    other = byte_level(size=len(tiny_tokenizer))
    assert len(other) == len(tiny_tokenizer)  # What a comparison of sizes lets pass.
    (finding,) = checks.check_tokenizers(tiny_tokenizer, other)
    assert (finding.code, finding.severity) == ("PT-K001", "error")
    assert "teacher and student disagree on" in finding.what and " vs " in finding.what
    assert "use_uld_loss=True" in finding.fix
    mine, theirs = checks.token_bytes(tiny_tokenizer), checks.token_bytes(other)
    match = compare_tokenizers(tiny_tokenizer, other)
    assert match.verdict == "cross-tokenizer" and match.texts
    assert match.common == len(set(mine.values()) & set(theirs.values()))
    for i, first, second in match.examples:
        assert (mine.get(i), theirs.get(i)) == (first, second) and first != second


def test_ids_are_compared_by_bytes_whatever_the_vocabulary_writes_for_a_space(tiny_tokenizer):
    backend = Tokenizer(models.BPE(vocab={"<0x0A>": 0, "▁the": 1, "é": 2}, merges=[], byte_fallback=True))
    pieces = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert checks.token_bytes(pieces) == {0: b"\n", 1: b" the", 2: "é".encode()}
    spelled = checks.token_bytes(tiny_tokenizer)
    text = "naïve 你好\n the end"
    assert b"".join(spelled[i] for i in tiny_tokenizer(text)["input_ids"]) == text.encode()
    assert spelled[2] == b"<|im_end|>"


def test_a_vocabulary_that_cannot_be_aligned_by_bytes_has_no_way_out_but_another_model(tiny_tokenizer):
    match = compare_tokenizers(tiny_tokenizer, word_level())
    assert match.verdict == "incompatible"
    (finding,) = checks.check_tokenizers(tiny_tokenizer, word_level())
    assert "models of the same family" in finding.fix and "use_uld_loss" not in finding.fix


def test_one_more_token_makes_a_superset_that_is_compared_on_the_common_ones(tiny_tokenizer):
    larger = build_tokenizer()
    larger.add_tokens(["<think>", "</think>"])
    match = compare_tokenizers(tiny_tokenizer, larger)
    assert (match.verdict, match.columns) == ("superset", len(tiny_tokenizer))
    assert codes(checks.check_tokenizers(tiny_tokenizer, larger)) == [("PT-K001", "warning")]


def test_the_same_map_with_another_way_of_cutting_words_is_no_match(tiny_tokenizer):
    other = build_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert other.get_vocab() == tiny_tokenizer.get_vocab()
    match = compare_tokenizers(tiny_tokenizer, other)
    assert match.verdict == "cross-tokenizer"
    assert "probe texts" in checks.check_match(match, on_policy=True)[0].what


def test_other_stops_are_an_error_for_a_student_that_generates_and_other_padding_a_note(tiny_tokenizer):
    other = build_tokenizer()
    other.pad_token = "<|endoftext|>"
    (finding,) = checks.check_tokenizers(tiny_tokenizer, other)
    assert (finding.code, finding.severity) == ("PT-K002", "info") and "pad 2 vs 0" in finding.what
    other.eos_token = "<|endoftext|>"
    assert codes(checks.check_tokenizers(tiny_tokenizer, other)) == [("PT-K002", "warning")]
    ends = {"stops": ([2], [0])}
    assert codes(checks.check_tokenizers(tiny_tokenizer, other, **ends)) == [("PT-K002", "error")]
    assert codes(checks.check_tokenizers(tiny_tokenizer, other, on_policy=False, **ends)) == [("PT-K002", "warning")]
    assert "student stops at [2], teacher at [0]" in checks.check_tokenizers(tiny_tokenizer, other, **ends)[0].what


def test_another_template_is_a_warning_with_how_many_conversations_differ(tiny_tokenizer):
    other = build_tokenizer()
    other.chat_template = other.chat_template.replace("message['role'] + '\n'", "message['role'] + ':'")
    (finding,) = checks.check_tokenizers(tiny_tokenizer, other)
    assert (finding.code, finding.severity) == ("PT-K003", "warning") and "8 of 8 conversations" in finding.what
    other.chat_template = None
    assert checks.check_tokenizers(tiny_tokenizer, other) == []


# Ids and embeddings --------------------------------------------------------------------------------------------
