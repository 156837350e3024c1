"""GOLD: tokens of two tokenizers aligned by bytes, and the losses between them."""

import json

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import posttrain as pt
from posttrain.errors import ConfigError
from posttrain.extensions.experimental.gold import byte_groups
from posttrain.losses.distillation import hybrid_divergence, sorted_l1
from tests.checks.test_tokenizers import byte_level, word_level
from tests.conftest import build_model, build_tokenizer
from tests.methods.helpers import losses
from tests.methods.test_distillation import answers, dense_loss, make
from tests.wordings import raises


def gold(folder, tokenizer, **settings):
    own = {
        "cls": pt.GOLDTrainer,
        "config": pt.GOLDConfig,
        "lmbda": 0.0,
        "max_steps": 1,
        "per_device_train_batch_size": 8,
    }
    return make(folder, tokenizer, **(own | settings))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((b"ab", b"cde", b"f"), (b"a", b"b", b"cdef"), [((0, 1), (0, 2)), ((1, 3), (2, 3))]),
        ((b"a", b"b"), (b"a", b"b"), [((0, 1), (0, 1)), ((1, 2), (1, 2))]),
        ((b"abc",), (b"ab",), []),
        ((b"a", b"bc"), (b"a", b"bd"), [((0, 1), (0, 1))]),
        ((), (b"a",), []),
    ],
)
def test_groups_are_the_shortest_runs_of_equal_bytes(first, second, expected):
    assert [((a.start, a.stop), (b.start, b.stop)) for a, b in byte_groups(first, second)] == expected


def test_with_one_tokenizer_it_is_gkd_with_the_temperature_in_the_loss(tmp_path, tiny_tokenizer):
    trainer = gold(tmp_path, tiny_tokenizer, temperature=2.0)
    trainer.train()
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    assert losses(trainer)[0] == pytest.approx(dense_loss(student, teacher, rows, 0.5, 2.0).item(), abs=1e-5)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("strategy", ["observed", "bayesian"])
def test_across_tokenizers_each_group_is_compared_where_it_begins(hybrid, strategy, tmp_path, tiny_tokenizer):
    other = byte_level()
    teacher = build_model(len(other), seed=1)
    trainer = gold(
        tmp_path, tiny_tokenizer, teacher=teacher, teacher_processing_class=other, use_uld_loss=True,
        uld_use_hybrid_loss=hybrid, uld_token_merge_strategy=strategy, uld_crossentropy_weight=0.3,
    )  # fmt: skip
    trainer.train()
    student, total, count, nll, tokens = build_model(len(tiny_tokenizer)), 0.0, 0, 0.0, 0
    parts = torch.zeros(2)
    mine, theirs = trainer._mine, trainer._theirs
    for row in trainer.train_dataset:
        prompt, answer = row["prompt_ids"], row["completion_ids"]
        told, said = (other(b"".join(mine[i] for i in ids if i > 2).decode())["input_ids"] for ids in (prompt, answer))
        log_q = student(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_p = teacher(input_ids=torch.tensor([told + said])).logits[0, len(told) - 1 : -1].log_softmax(-1)
        assert answer[-1] == 2
        for a, b in byte_groups([mine[i] for i in answer[:-1]], [theirs[i] for i in said]):
            at = 0 if strategy == "observed" else -1
            q, p = log_q[a[at]], log_p[b[at]]
            both = (torch.zeros(()), sorted_l1(q.exp(), p.exp()))
            weights = (0.0, 1.0)
            if hybrid:
                both, weights = hybrid_divergence(q, p, tuple(trainer._pairs), beta=0.5), trainer._weights
            value, parts = weights[0] * both[0] + weights[1] * both[1], parts + torch.stack(both).detach()
            total, count = total + value, count + 1
        nll, tokens = nll - log_q.gather(1, torch.tensor(answer)[:, None]).sum(), tokens + len(answer)
    loss = total / count + 0.3 * nll / tokens
    loss.backward()
    assert losses(trainer)[0] == pytest.approx(loss.item(), abs=1e-4)
    logged = [trainer.state.log_history[0][f"{name}_loss"] for name in ("matched", "unmatched")]
    assert logged == pytest.approx((parts / count).tolist(), abs=1e-4)
    for (name, ours), truth in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        scale = 1.0 / max(trainer.state.log_history[0]["grad_norm"], 1.0)
        assert torch.allclose(ours, truth - 0.5 * scale * truth.grad, atol=1e-4), name


def test_the_students_samples_are_aligned_by_the_bytes_of_their_ids(tmp_path, tiny_tokenizer):
    other = byte_level()
    options = {"teacher": build_model(len(other), seed=1), "teacher_processing_class": other, "use_uld_loss": True}
    trainer = gold(tmp_path, tiny_tokenizer, lmbda=1.0, data=answers(8), max_completion_length=6, **options)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["align/group_count"] > 0 and 0 <= row["align/dropped_bytes_fraction"] <= 1
    assert 0 < row["align/vocab_overlap"] <= 1 and 0 < row["loss"] < 10


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_step_whose_completions_are_all_left_out_has_no_group_and_trains_nothing(hybrid, tmp_path, tiny_tokenizer):
    other = byte_level()
    options = {"teacher": build_model(len(other), seed=1), "teacher_processing_class": other, "use_uld_loss": True}
    options |= {"rollout_engine": pt.ScriptedEngine(lambda ids, index: [5] * 8), "mask_truncated_completions": True}
    trainer = gold(tmp_path, tiny_tokenizer, lmbda=1.0, uld_use_hybrid_loss=hybrid, **options)
    trainer.train()
    assert losses(trainer) == [0.0]


def test_what_cannot_be_aligned_is_refused(tmp_path, tiny_tokenizer):
    other = byte_level()
    teacher = build_model(len(other), seed=1)
    with pytest.raises(ConfigError, match="use_uld_loss=True"):
        gold(tmp_path, tiny_tokenizer, teacher=teacher, teacher_processing_class=other)
    with pytest.raises(ConfigError, match="teacher_processing_class"):
        gold(tmp_path, tiny_tokenizer, teacher=teacher, use_uld_loss=True)
    with raises(ConfigError):
        words = word_level()
        gold(
            tmp_path, tiny_tokenizer, teacher=build_model(len(words)), teacher_processing_class=words, use_uld_loss=True
        )
    for settings in ({"uld_hybrid_matched_weight": 0.5}, {"callbacks": ["x"]}, {"use_uld_loss": True, "seq_kd": True}):
        with pytest.raises(ConfigError):
            pt.GOLDConfig(str(tmp_path), bf16=False, use_cpu=True, **settings)


def sentence_pieces(kind="prepend"):
    """A BPE with bytes as a fallback, whose tokenizer writes a space before every text, as Llama-2's, Mistral's and Phi-3's do."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    split = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.pre_tokenizer = split
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=names[:3],
        initial_alphabet=[chr(i) for i in range(33, 127)] + ["▁"],
        show_progress=False,
    )
    backend.train_from_iterator(
        ["a number and another number, what is it 0 1 2 3", "assistant user system"] * 4, trainer
    )
    model = json.loads(backend.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(m) for m in model["merges"]]
    for name in names[3:]:
        vocab.setdefault(name, len(vocab))
    backend = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = split
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    made.chat_template = build_tokenizer().chat_template
    return made


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
@pytest.mark.parametrize("extended", [True, False])
def test_a_space_that_the_teachers_tokenizer_writes_before_a_text_has_no_part_in_the_alignment(
    kind, extended, tmp_path, tiny_tokenizer
):
    other = sentence_pieces(kind)
    teacher = build_model(len(other), seed=1)
    data = datasets.Dataset.from_list(
        [{"prompt": f"What is {i}?", "completion": " a number" if i % 2 else "\nanother, 你 number"} for i in range(8)]
    )
    trainer = gold(
        tmp_path, tiny_tokenizer, teacher=teacher, teacher_processing_class=other, use_uld_loss=True, data=data,
        use_extended_uld=extended, learning_rate=0.0,
    )  # fmt: skip
    trainer.train()
    student, total, count = build_model(len(tiny_tokenizer)), 0.0, 0
    mine, theirs = trainer._mine, trainer._theirs
    for row in trainer.train_dataset:
        prompt, answer = row["prompt_ids"], row["completion_ids"]
        told = other(row["prompt"])["input_ids"]
        # Behind a line break no space is written, and what is cut off with it spells nothing else.
        said = other("\n" + row["completion"])["input_ids"][len(other("\n")["input_ids"]) :]
        assert b"".join(theirs[i] for i in said) == row["completion"].encode()
        log_q = student(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_p = teacher(input_ids=torch.tensor([told + said])).logits[0, len(told) - 1 : -1].log_softmax(-1)
        pairs = byte_groups([mine[i] for i in answer[:-1]], [theirs[i] for i in said])
        if not extended:
            pairs = [(range(i, i + 1),) * 2 for i in range(min(len(answer) - 1, len(said)))]
        for a, b in pairs:
            total, count = total + sorted_l1(log_q[a[0]].exp(), log_p[b[0]].exp()), count + 1
    log = trainer.state.log_history[0]
    assert log["align/group_count"] == count > 8
    assert log["loss"] == pytest.approx((total / count).item(), abs=1e-5)
    assert not extended or log["align/dropped_bytes_fraction"] == 0


def test_a_student_whose_tokenizer_writes_that_space_shows_the_teacher_the_prompt_without_it(tmp_path, tiny_tokenizer):
    mine = sentence_pieces()
    teacher = build_model(len(tiny_tokenizer), seed=1)
    trainer = gold(tmp_path, mine, teacher=teacher, teacher_processing_class=tiny_tokenizer, use_uld_loss=True)
    trainer.train()
    (shown, *_) = [fact["prompt"] for fact in trainer.kept["train"].values()]
    assert tiny_tokenizer.decode(shown).startswith("What is ")
    assert trainer.state.log_history[0]["align/dropped_bytes_fraction"] == 0


def test_text_that_has_no_partner_is_counted_by_bytes_and_told(tmp_path, tiny_tokenizer, caplog):
    """What follows bytes that the teacher's tokenizer writes otherwise is left out: never without a word."""
    other = sentence_pieces()
    backend = Tokenizer.from_str(other.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.Replace("9", "nine"), backend.normalizer])
    other = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    data = datasets.Dataset.from_list([{"prompt": "What is it?", "completion": " a 9" + " number" * 8}] * 8)
    teacher = build_model(len(other), seed=1)
    trainer = gold(
        tmp_path, tiny_tokenizer, teacher=teacher, teacher_processing_class=other, use_uld_loss=True, data=data
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["align/dropped_bytes_fraction"] == pytest.approx(1 - 3 / 60, abs=0.02)
    assert log["align/one_to_one_fraction"] < 0.2
    assert "PT-R031" in caplog.text
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
    other = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    with raises(ConfigError, "the quick brown fox."):
        gold(tmp_path, tiny_tokenizer, teacher=teacher, teacher_processing_class=other, use_uld_loss=True)
