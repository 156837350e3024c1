"""Distillation trainers: what they compare, on whose tokens, and what they refuse."""

import copy
import shutil

import datasets
import pytest
import torch

from posttrain import DistillationConfig, DistillationTrainer
from posttrain.errors import ConfigError, DataError
from posttrain.loop.rollout import sample, settings_of
from posttrain.methods.distillation.data import with_prompt_column, with_template_arguments
from posttrain.values import strip_none
from tests.conftest import build_masked_model, build_model
from tests.methods.helpers import SHORT, losses, prompts, scripted

BASE = SHORT | {"per_device_train_batch_size": 4, "max_completion_length": 8, "use_cpu": True, "learning_rate": 0.5}
BASE |= {"optim": "sgd"}


def answers(count=8):
    """Prompts, two of them equal, with answers of uneven length."""
    rows = [{"prompt": f"What is {i // 2}? ", "completion": "a number " * (1 + i % 3)} for i in range(count)]
    return datasets.Dataset.from_list(rows)


def make(
    folder, tokenizer, *, teacher="other", data=None, config=DistillationConfig, cls=DistillationTrainer, **settings
):
    """A distillation trainer on two-layer models."""
    names = (
        "eval_dataset",
        "peft_config",
        "rollout_engine",
        "teacher_processing_class",
        "teacher_server",
        "reward_funcs",
        "model",
    )
    names += ("formatting_func",)
    keys = {name: settings.pop(name) for name in names if name in settings}
    model = keys.pop("model", None) or build_model(len(tokenizer))
    teacher = build_model(len(tokenizer), seed=1) if isinstance(teacher, str) and teacher == "other" else teacher
    given = {} if teacher is None else {"teacher_model": teacher}
    args = config(str(folder), **(BASE | settings))
    data = answers() if data is None else data
    return cls(model, args=args, train_dataset=data, processing_class=tokenizer, **given, **keys)


def dense_loss(student, teacher, rows, beta, temperature=1.0):
    """Mean over answer tokens of the divergence, from each sequence alone and its full logits."""
    total, count = 0.0, 0
    for prompt, answer in rows:
        ids = torch.tensor([prompt + answer])
        x, y = (m(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature for m in (student, teacher))
        q, p = x.softmax(-1), y.softmax(-1)
        m = beta * p + (1 - beta) * q
        if beta in (0.0, 1.0):
            a, b = (p, q) if beta == 0 else (q, p)
            values = (a * (a.log() - b.log())).sum(-1)
        else:
            values = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
        total, count = total + values.sum(), count + len(answer)
    return total / count


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_step_on_the_dataset_is_the_dense_loss_of_each_sequence_alone(beta, temperature, tmp_path, tiny_tokenizer):
    trainer = make(
        tmp_path, tiny_tokenizer, beta=beta, temperature=temperature, lmbda=0.0, max_steps=1,
        per_device_train_batch_size=8, max_grad_norm=0.0,
    )  # fmt: skip
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    loss = dense_loss(student, teacher, rows, beta, temperature)
    loss.backward()
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(loss.item(), abs=1e-5)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        assert torch.allclose(ours, theirs - 0.5 * theirs.grad, atol=1e-5), name


def step(folder, tokenizer, **settings):
    """Weights after one step, and the loss."""
    trainer = make(folder, tokenizer, max_steps=1, max_grad_norm=0.0, **settings)
    trainer.train()
    return losses(trainer)[0], [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_on_policy_the_loss_is_that_of_what_the_student_sampled(engine, tmp_path, tiny_tokenizer):
    settings = {"beta": 0.5, "max_steps": 1, "num_generations": 2, "data": prompts(4)}
    args = DistillationConfig(
        str(tmp_path), **(BASE | {"rollout_engine": engine, "beta": 0.5, "max_steps": 1, "num_generations": 2})
    )
    model = build_model(len(tiny_tokenizer))
    trainer = DistillationTrainer(
        model,
        build_model(len(tiny_tokenizer), seed=1),
        args,
        train_dataset=settings["data"],
        processing_class=tiny_tokenizer,
    )
    seen = []
    sample = trainer.sample
    trainer.sample = lambda *given: seen.append(sample(*given)) or seen[-1]
    trainer.train()
    rows = [(r.prompt_ids, r.token_ids) for r in seen[0].rollouts]
    assert len(rows) == 4 and rows[0][0] == rows[1][0]
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    assert losses(trainer)[0] == pytest.approx(dense_loss(student, teacher, rows, 0.5).item(), abs=1e-5)
    assert trainer.state.log_history[0]["on_policy_fraction"] == 1


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4), (1, 8)])
def test_splitting_a_step_into_micro_batches_changes_nothing(sizes, tmp_path, tiny_tokenizer):
    batch, accumulation = sizes
    options = {"lmbda": 0.0, "beta": 0.5, "shuffle_dataset": False}
    whole = step(tmp_path / "a", tiny_tokenizer, per_device_train_batch_size=8, **options)
    split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    parts = step(tmp_path / "b", tiny_tokenizer, **split, **options)
    assert whole[0] == pytest.approx(parts[0], abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole[1], parts[1], strict=True))


@pytest.mark.parametrize(("lmbda", "sampled"), [(0.0, 0), (1.0, 1), (0.5, None)])
def test_lmbda_is_the_share_of_prompts_that_the_student_completes(lmbda, sampled, tmp_path, tiny_tokenizer):
    calls = []
    engine = scripted()
    generate = engine.generate
    engine.generate = lambda requests, sampling: calls.extend(requests) or generate(requests, sampling)
    trainer = make(tmp_path, tiny_tokenizer, lmbda=lmbda, max_steps=6, rollout_engine=engine, learning_rate=0.0)
    trainer.train()
    shares = [row["on_policy_fraction"] for row in trainer.state.log_history if "on_policy_fraction" in row]
    assert (lmbda > 0) == bool(calls)
    mean = sum(shares) / len(shares)
    assert mean == sampled if sampled is not None else 0 < mean < 1


def test_the_draw_is_the_same_for_all_completions_of_a_prompt_and_on_every_rank(tmp_path, tiny_tokenizer):
    trainer = make(
        tmp_path, tiny_tokenizer, lmbda=0.5, num_generations=2, per_device_train_batch_size=8, rollout_engine=scripted()
    )
    rows = [{"prompt": str(i // 2)} for i in range(64)]
    settings = settings_of(trainer.run, "train")
    found = trainer.samples(rows, settings)
    assert found[::2] == found[1::2] and 0 < sum(found) < 64 and found == trainer.samples(rows, settings)


def test_the_teacher_samples_where_the_student_does_not(tmp_path, tiny_tokenizer):
    trainer = make(tmp_path, tiny_tokenizer, lmbda=0.0, seq_kd=True, max_steps=1, data=prompts(4))
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["on_policy_fraction"] == 0 and row["loss"] > 0


def test_a_lora_student_learns_from_its_own_base(tmp_path, tiny_tokenizer):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    trainer = make(
        tmp_path, tiny_tokenizer, teacher=None, peft_config=lora, teacher_model_kind="base", lmbda=0.0, max_steps=30, beta=0.0,
        learning_rate=0.05, optim="adamw_torch", model=build_model(len(tiny_tokenizer), tie_word_embeddings=False),
    )  # fmt: skip
    trainer.train()
    found = losses(trainer)
    assert trainer.teacher_model is None and found[0] > 0.01 and found[-1] < found[0] / 2


@pytest.mark.parametrize(
    ("teacher", "told"), [("same", True), ("copy", False), ("revision", False), ("silenced", False)]
)
def test_a_student_that_is_its_own_teacher_is_told_that_there_is_nothing_to_learn(
    teacher, told, tmp_path, tiny_model_dir, tiny_tokenizer, caplog
):
    settings = {"silence_findings": {"teacher-is-student": "a control"}} if teacher == "silenced" else {}
    settings |= {"teacher_model_revision": "other"} if teacher == "revision" else {}
    other = shutil.copytree(tiny_model_dir, tmp_path / "other") if teacher == "copy" else tiny_model_dir
    make(tmp_path / "run", tiny_tokenizer, model=tiny_model_dir, teacher=str(other), **settings)
    assert ("PT-K006" in caplog.text) == told


@pytest.mark.parametrize("silenced", [False, True])
def test_a_teacher_with_another_chat_template_is_a_finding(silenced, tmp_path, tiny_tokenizer, caplog):
    other = copy.deepcopy(tiny_tokenizer)
    other.chat_template = other.chat_template.replace("<|im_start|>", "<|im_start|>the ")
    settings = {"silence_findings": {"tokenizers-template": "a test"}} if silenced else {}
    trainer = make(tmp_path, tiny_tokenizer, teacher_processing_class=other, **settings)
    assert trainer.preflight.results["PT-K003"].outcome == "found"
    assert ("PT-K003" in caplog.text) != silenced


def test_the_schedule_names_no_importance_ratio(tmp_path, tiny_tokenizer, caplog):
    caplog.set_level("INFO", "posttrain.loop.prompts")
    make(tmp_path, tiny_tokenizer)
    assert "schedule: each generation is" in caplog.text and "importance ratio" not in caplog.text


def test_evaluation_scores_the_answers_or_samples_and_does_not_depend_on_the_batch(tmp_path, tiny_tokenizer):
    trainer = make(tmp_path, tiny_tokenizer, lmbda=0.0, beta=0.5, eval_dataset=answers(5), per_device_eval_batch_size=2)
    first = trainer.evaluate()["eval_loss"]
    trainer.args.per_device_eval_batch_size = 5
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.eval_dataset]
    truth = dense_loss(student, teacher, rows, 0.5).item()
    empty = sample(trainer.run, [], "eval")  # Of a rank without rows.
    assert (empty.mode, empty.group_size, empty.rollouts) == ("eval", trainer.group_size("eval"), [])
    assert first == pytest.approx(truth, abs=1e-5) and trainer.evaluate()["eval_loss"] == pytest.approx(truth, abs=1e-5)
    sampled = make(tmp_path / "b", tiny_tokenizer, eval_dataset=prompts(3), data=prompts(4)).evaluate()
    assert 0 < sampled["eval_loss"] < 100


def test_a_teacher_with_more_padded_rows_and_another_shape_is_compared_over_the_tokens_both_have(
    tmp_path, tiny_tokenizer
):
    size = len(tiny_tokenizer)
    wide = build_model(size + 64, seed=1, hidden_size=48, num_attention_heads=4, head_dim=12)
    trainer = make(
        tmp_path, tiny_tokenizer, teacher=wide, lmbda=0.0, beta=0.5, max_steps=1, per_device_train_batch_size=8
    )
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]

    def cut(**given):
        out = wide(**given)
        return type("Out", (), {"logits": out.logits[..., :size]})

    truth = dense_loss(build_model(size), cut, rows, 0.5).item()
    trainer.train()
    assert trainer.columns == size and losses(trainer)[0] == pytest.approx(truth, abs=1e-5)


def test_a_teacher_that_takes_no_segments_gets_a_mask(tmp_path, tiny_tokenizer):
    """Its rows are laid out for it, and not for the student."""
    teacher = build_masked_model(len(tiny_tokenizer))
    trainer = make(
        tmp_path, tiny_tokenizer, teacher=teacher, lmbda=0.0, beta=0.5, max_steps=1, per_device_train_batch_size=8
    )
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    truth = dense_loss(build_model(len(tiny_tokenizer)), teacher, rows, 0.5).item()
    trainer.train()
    assert not trainer.layout.dense_mask and trainer.teacher.layout.dense_mask
    assert losses(trainer)[0] == pytest.approx(truth, abs=2e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_each_models_own_rule_of_logits_applies(cap, tmp_path, tiny_tokenizer):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=len(tiny_tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=cap, initializer_range=0.3, attn_implementation="eager",
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    capped = Gemma2ForCausalLM(config).eval()
    trainer = make(
        tmp_path, tiny_tokenizer, teacher=capped, lmbda=0.0, beta=0.5, max_steps=1, per_device_train_batch_size=8
    )
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    truth = dense_loss(build_model(len(tiny_tokenizer)), capped, rows, 0.5).item()
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(truth, abs=2e-5)


def test_under_autocast_a_teacher_of_the_same_weights_differs_by_nothing(tmp_path, tiny_tokenizer):
    twin = build_model(len(tiny_tokenizer))
    trainer = make(tmp_path, tiny_tokenizer, teacher=twin, lmbda=0.0, bf16=True, max_steps=1, learning_rate=0.0)
    trainer.train()
    row = trainer.state.log_history[0]
    assert abs(row["loss"]) < 1e-6 and row["grad_norm"] < 1e-4 and row["distill/agreement"] == 1


def test_a_mixture_of_experts_adds_its_load_balancing_term(tmp_path, tiny_tokenizer):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(5)
    config = MixtralConfig(
        vocab_size=len(tiny_tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3,
        router_aux_loss_coef=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    student = MixtralForCausalLM(config).eval()
    twin = MixtralForCausalLM(config).eval()
    twin.load_state_dict(student.state_dict())
    trainer = make(
        tmp_path, tiny_tokenizer, model=student, lmbda=0.0, beta=0.5, max_steps=1, per_device_train_batch_size=8
    )
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    truth = dense_loss(twin, build_model(len(tiny_tokenizer), seed=1), rows, 0.5).item()
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["aux_loss"] > 1 and row["loss"] == pytest.approx(truth + 0.5 * row["aux_loss"], abs=2e-5)


@pytest.mark.parametrize("settings", [{"lmbda": 0.0, "beta": 0.5}, {"lmbda": 1.0, "num_generations": 2}])
def test_the_table_of_completions_names_the_tokens_on_which_the_two_differ_most(settings, tmp_path, tiny_tokenizer):
    from posttrain.report.files import read_rows

    trainer = make(tmp_path, tiny_tokenizer, max_steps=1, **settings)
    trainer.train()
    rows = read_rows(next((trainer.record.record.folder / "completions").glob("completions_*.parquet")))
    named = [pair for row in rows for pair in row["worst_tokens"].split("  ") if pair]
    worst = max(float(pair.rsplit(" ", 1)[1]) for pair in named)
    log = trainer.state.log_history[0]
    assert len(named) == 5 and worst == pytest.approx(log["distill/divergence_max"], abs=0.01)
    assert not {"key", "advantage"} & rows[0].keys()


def test_log_completions_prints_what_was_trained(tmp_path, tiny_tokenizer, capsys):
    make(tmp_path, tiny_tokenizer, lmbda=0.0, max_steps=1, log_completions=True).train()
    shown = capsys.readouterr().out
    assert "a number" in shown and "_unrewarded" not in shown


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Numbers of the largest tensor that any operation made."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            self.most = max(self.most, one.numel() if isinstance(one, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("support", ["full", "student_topk"])
def test_the_loss_never_holds_more_than_a_chunk_of_logits_however_many_tokens(support):
    from posttrain.methods.distillation.config import Axes
    from posttrain.methods.distillation.objective import Comparison, HiddenTeacher
    from posttrain.models.heads import LogitRule, TokenHead

    size, chunk, width, tokens = 256, 256, 8, 8192
    made = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(width, size, bias=False)
    hidden, teacher = (torch.randn(tokens, width, generator=made) for _ in range(2))
    hidden.requires_grad_()
    compare = Comparison(
        Axes(support, beta=0.5, top_k=4), HiddenTeacher(teacher, layer.weight.detach()), columns=None, policy_temperature=1.0
    )  # fmt: skip
    places = torch.zeros(tokens, dtype=torch.long)
    head = TokenHead(places, places, torch.randint(size, (tokens,), generator=made), chunk_size=chunk)
    with Largest() as seen:
        compare(hidden, layer, LogitRule(), head)["divergence"].sum().backward()
    # Of a top-k both log-probs and positions are as large as a chunk; the hidden states are larger than that here.
    assert seen.most <= max(2 * chunk * size, tokens * width) < tokens * size / 10


TEMPLATE = (
    "{{ tone }} {% for tool in tools or [] %}{{ tool }} {% endfor %}{% for m in messages %}[{{ m.role }}] {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_answers_of_the_dataset_follow_the_same_prompt_as_samples(tmp_path, tiny_tokenizer):
    tiny_tokenizer.chat_template = TEMPLATE
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [tool]},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "tools": None},
    ]
    rows[1]["chat_template_kwargs"] = {"tone": "rude"}
    data = datasets.Dataset.from_list([{"chat_template_kwargs": None} | row for row in rows])
    settings = {"lmbda": 0.5, "chat_template_kwargs": {"tone": "kind"}}
    trainer = make(
        tmp_path, tiny_tokenizer, data=data, per_device_train_batch_size=2, shuffle_dataset=False, **settings
    )
    examples = [trainer.train_dataset[i] for i in range(2)]
    sampled = [list(ids) for ids in trainer.prompt_source.token_ids(examples)]
    assert [example["prompt_ids"] for example in examples] == sampled
    texts = [tiny_tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in sampled]
    assert texts[0].startswith("kind") and "adds" in texts[0] and texts[1].startswith("rude [user]")


def test_a_sequence_beyond_the_teachers_positions_is_told(tmp_path, tiny_tokenizer, caplog):
    teacher = build_model(len(tiny_tokenizer), seed=1)
    teacher.config.max_position_embeddings = 8
    make(tmp_path, tiny_tokenizer, teacher=teacher, lmbda=0.0, max_steps=1).train()
    assert "PT-T003" in caplog.text


def test_a_stream_of_messages_trains_on_their_answers(tmp_path, tiny_tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"a {i}"}]}
        for i in range(8)
    ]
    data = datasets.Dataset.from_list(rows)
    found = []
    for i, one in enumerate((data, data.to_iterable_dataset())):
        trainer = make(tmp_path / str(i), tiny_tokenizer, data=one, lmbda=0.0, max_steps=1, shuffle_dataset=False)
        trainer.train()
        found.append(losses(trainer)[0])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_answers_of_the_dataset_need_no_room_for_a_completion(tmp_path, tiny_tokenizer):
    trainer = make(tmp_path, tiny_tokenizer, lmbda=0.0, max_completion_length=512, max_steps=1)
    assert trainer.context == 512
    trainer.train()
    assert losses(trainer)[0] > 0
    for settings in ({"lmbda": 0.5}, {"lmbda": 0.0, "seq_kd": True}):
        with pytest.raises(ConfigError, match="512"):
            make(tmp_path, tiny_tokenizer, max_completion_length=512, **settings)


def test_a_prompt_without_room_for_its_completion_is_refused_before_training(tmp_path, tiny_tokenizer):
    data = datasets.Dataset.from_list([{"prompt": "one two three four five six seven"}] * 4)
    settings = {"lmbda": 1.0, "max_completion_length": 510, "max_length": 2000}
    with pytest.raises(DataError, match="does not fit the model's context of 512 tokens"):
        make(tmp_path, tiny_tokenizer, data=data, **settings)
    make(tmp_path, tiny_tokenizer, data=data, **settings | {"max_length": 512})  # Prompts are truncated to 2 tokens.


def test_keys_that_come_first_in_late_rows_are_kept():
    """`map` takes a new column's type from 1,000 rows: of a key without a value there, no later value could be written."""
    early = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    late = {"messages": [early["messages"][0] | {"name": "n"}, early["messages"][1] | {"thinking": "t"}]}
    last = [{"chat_template_kwargs": {"tone": "rude", "depth": 2}} | late]
    data = datasets.Dataset.from_list([*[{"chat_template_kwargs": None} | early] * 1001, *last])
    rows = with_template_arguments(with_prompt_column(data), {"tone": "kind"})
    assert strip_none(rows[-1]) == {
        "prompt": late["messages"][:1],
        "completion": late["messages"][1:],
        "chat_template_kwargs": {"tone": "rude", "depth": 2},
    }
    assert strip_none(rows[0])["chat_template_kwargs"] == {"tone": "kind"}
