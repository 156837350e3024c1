"""TRL's distillation methods: each row of the table against its formula on the same rollouts."""

import dataclasses
import inspect
import math
import time

import datasets
import pytest
import torch

import posttrain as pt
from posttrain import ScriptedEngine
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.experimental.distillation_methods import THINKING
from posttrain.loop.rollout import settings_of
from posttrain.losses.distillation import divergence
from posttrain.models import parallel
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Advantages, Rollout
from tests.conftest import build_model
from tests.methods.helpers import count_a, losses, prompts
from tests.methods.test_distillation import TEMPLATE, answers, dense_loss, make
from tests.wordings import raises


def test_thinking_is_removed_in_linear_time():
    assert THINKING.sub(r"\1", "a <think>b\n<think>c</think> \n d</think><think>e") == "a d</think><think>e"
    began, unclosed = time.process_time(), "</think>" + "<think>" * 15_000
    assert THINKING.sub(r"\1", unclosed) == unclosed and time.process_time() - began < 0.2


def hinted(count=4):
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i}?"}], "privileged_context": f"It is {i}."}
        for i in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def preset(name, folder, tokenizer, **settings):
    """A trainer of that method; its rollouts of the first generation are `seen`."""
    cls, config = getattr(pt, name + "Trainer"), getattr(pt, name + "Config")
    own = {"num_generations": 2, "data": hinted(4), "max_steps": 1, "per_device_train_batch_size": 8}
    if name in ("SDFT", "SDPO", "SSD"):
        own["teacher"] = None
    if name == "SDPO":
        own |= {"reward_funcs": count_a, "success_reward_threshold": 2.0}
    trainer = make(folder, tokenizer, cls=cls, config=config, **(own | settings))
    trainer.seen = []
    spy = lambda run, rollouts, rewards, found: trainer.seen.append(rollouts.worth(found)) or True  # noqa: E731
    trainer.run.progress.watchers.setdefault("rollout", []).append(spy)
    return trainer


def logp_of(model, prompt, answer):
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1), torch.tensor(answer)[:, None]


def sampled(trainer):
    return [(r.prompt_ids, r.token_ids) for r in trainer.seen[0].rollouts]


EVERY = ("GKD", "Distillation", "MiniLLM", "SDFT", "SDPO", "SSD", "IWOPD")


@pytest.mark.parametrize("name", EVERY)
def test_every_preset_trains_two_steps_and_says_what_its_loss_is(name, tmp_path, tiny_tokenizer):
    data = answers() if name == "GKD" else hinted(8)
    trainer = preset(name, tmp_path, tiny_tokenizer, max_steps=2, data=data)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2 and all(torch.tensor(row["grad_norm"]).isfinite() for row in rows)
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert moved and trainer.axes == trainer.args.axes()


def test_gkd_samples_at_its_temperature_and_compares_at_one(tmp_path, tiny_tokenizer):
    trainer = preset("GKD", tmp_path, tiny_tokenizer, temperature=2.0, lmbda=1.0)
    trainer.train()
    truth = dense_loss(
        build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1), sampled(trainer), 0.5
    )
    assert settings_of(trainer.run, "train").sampling.temperature == 2.0
    assert losses(trainer)[0] == pytest.approx(truth.item(), abs=1e-5)


def test_ssd_is_the_cross_entropy_of_its_own_samples(tmp_path, tiny_tokenizer):
    trainer = preset("SSD", tmp_path, tiny_tokenizer, temperature=1.5, filter_empty=False)
    trainer.train()
    student, total, count = build_model(len(tiny_tokenizer)), 0.0, 0
    for prompt, answer in sampled(trainer):
        logp, ids = logp_of(student, prompt, answer)
        total, count = total - logp.gather(1, ids).sum(), count + len(answer)
    assert losses(trainer)[0] == pytest.approx((total / count).item(), abs=1e-5)


@pytest.mark.parametrize(("name", "cut"), [("SSD", False), *((name, True) for name in EVERY)])
def test_a_step_whose_completions_are_all_left_out_trains_nothing_and_ends_no_run(
    name, cut, tmp_path, tiny_tokenizer, caplog
):
    """Not written to the end, or, in SSD, too short to be an answer."""
    engine = ScriptedEngine(lambda ids, index: [5] * (8 if cut else 1))
    settings = {"loss_type": "dapo"} if name in ("MiniLLM", "SDPO") else {}
    settings |= {"lmbda": 1.0} if name == "GKD" else {}
    trainer = preset(name, tmp_path, tiny_tokenizer, rollout_engine=engine, mask_truncated_completions=cut, **settings)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert losses(trainer) == [0.0] and "step 1 are excluded" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_sdft_compares_with_itself_after_the_privileged_prompt(tmp_path, tiny_tokenizer):
    trainer = preset("SDFT", tmp_path, tiny_tokenizer, distillation_topk=7)
    trainer.train()
    student, means = build_model(len(tiny_tokenizer)), []
    for (prompt, answer), example in zip(sampled(trainer), trainer.seen[0].examples, strict=True):
        text = f"{example['prompt'][0]['content']}\n\n{example['privileged_context']}"
        told = tiny_tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
            "input_ids"
        ]
        log_q, _ = logp_of(student, prompt, answer)
        log_p, _ = logp_of(student, told, answer)
        ids = log_q.topk(7, -1).indices
        q, p = (x.gather(1, ids).softmax(-1) for x in (log_q, log_p))
        m = (p + q) / 2
        means.append(((p * (p / m).log() + q * (q / m).log()) / 2).sum(-1).mean())
    assert losses(trainer)[0] == pytest.approx(torch.stack(means).mean().item(), abs=1e-5)


def test_the_teacher_of_sdft_is_the_given_weights_and_stays_there(tmp_path, tiny_tokenizer):
    trainer = preset("SDFT", tmp_path, tiny_tokenizer, max_steps=2, data=hinted(8))
    given = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(given, trainer.teacher_model.parameters(), strict=True))


def test_an_ema_teacher_follows_the_student(tmp_path, tiny_tokenizer):
    trainer = preset("SDFT", tmp_path, tiny_tokenizer, teacher_model_kind="ema", teacher_update_rate=0.25)
    given = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    for old, new, ema in zip(given, trainer.model.parameters(), trainer.teacher_model.parameters(), strict=True):
        assert torch.allclose(ema, 0.75 * old + 0.25 * new, atol=1e-6)


def test_the_hint_is_cut_and_the_question_is_not(tmp_path, tiny_tokenizer):
    rows = datasets.Dataset.from_list(
        [{"prompt": f"What is {i}? ", "privileged_context": "very long " * 50} for i in range(4)]
    )
    trainer = preset("SDFT", tmp_path, tiny_tokenizer, data=rows, max_prompt_length=60)
    trainer.train()
    for key in trainer.kept["train"]:
        ids = trainer.kept["train"][key]
        assert 40 < len(ids) <= 60 and tiny_tokenizer.decode(ids, skip_special_tokens=True).startswith("What is")


@pytest.mark.parametrize("name", ["SDFT", "SDPO"])
def test_the_teachers_prompt_is_rendered_as_the_students(name, tmp_path, tiny_tokenizer):
    tiny_tokenizer.chat_template = TEMPLATE
    data = hinted(4).add_column("chat_template_kwargs", [{"tone": "rude"}] * 4)
    settings = {"include_environment_feedback": True} if name == "SDPO" else {}
    trainer = preset(name, tmp_path, tiny_tokenizer, data=data, **settings)
    trainer.train()
    shown = [trainer._fact(int(key)) for key in trainer.seen[0].columns["key"]]
    assert all(tiny_tokenizer.decode(ids).startswith("rude") for ids in shown)


def test_skipped_tokens_and_samples_of_the_teachers_prompt(tmp_path, tiny_tokenizer):
    trainer = preset("SDFT", tmp_path, tiny_tokenizer, generate_from_teacher=True, num_loss_tokens_to_skip=2)
    trainer.train()
    for rollout, example in zip(trainer.seen[0].rollouts, trainer.seen[0].examples, strict=True):
        assert rollout.prompt_ids == trainer.prompt_source.token_ids([example])[0]
        assert rollout.tool_mask == [0, 0, *[1] * (len(rollout.token_ids) - 2)][: len(rollout.token_ids)]


@pytest.mark.parametrize("hinted_samples", [True, False])
def test_samples_of_the_teachers_prompt_have_no_ratio_to_the_student(hinted_samples, tmp_path, tiny_tokenizer):
    settings = {"generate_from_teacher": hinted_samples, "num_iterations": 2, "max_steps": 2}
    trainer = preset("SDFT", tmp_path, tiny_tokenizer, **settings)
    trainer.train()
    assert ("old_logp" in trainer.seen[0].token_columns) is not hinted_samples


def test_tokens_that_are_skipped_in_the_loss_are_written_by_the_student_all_the_same(tmp_path, tiny_tokenizer):
    trainer = preset("SDFT", tmp_path, tiny_tokenizer, num_loss_tokens_to_skip=2)
    trainer.train()
    lengths = [len(rollout.token_ids) for rollout in trainer.seen[0].rollouts]
    log = trainer.state.log_history[0]
    assert (
        log["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths)) and "tools/token_share" not in log
    )
    assert log["completions/min_length"] == min(lengths)


def test_minillm_rewards_are_the_log_ratio_and_the_single_step_is_the_reverse_kl(tmp_path, tiny_tokenizer):
    trainer = preset("MiniLLM", tmp_path, tiny_tokenizer, gamma=0.5, length_normalization=False, loss_type="dapo")
    trainer.train()
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    total, count = 0.0, 0
    for prompt, answer in sampled(trainer):
        (log_q, ids), (log_p, _) = logp_of(student, prompt, answer), logp_of(teacher, prompt, answer)
        q, p = (x.gather(1, ids)[:, 0] for x in (log_q, log_p))
        later, credit = 0.0, []
        for reward in reversed((p - q).tolist()):
            later = reward + 0.5 * later
            credit.append(later)
        policy = -(torch.tensor(credit[::-1]) * (q - q.detach()).exp())
        total = total + policy.sum() + (log_q.exp() * (log_q - log_p)).sum()
        count += len(answer)
    (total / count).backward()
    assert losses(trainer)[0] == pytest.approx((total / count).item(), abs=1e-5)
    norm = torch.stack([p.grad.norm() for p in student.parameters()]).norm().item()
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_iw_opd_weighs_early_tokens_more(tmp_path, tiny_tokenizer):
    trainer = preset("IWOPD", tmp_path, tiny_tokenizer)
    trainer.train()
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    total, count, advantages = 0.0, 0, []
    for prompt, answer in sampled(trainer):
        (log_q, ids), (log_p, _) = logp_of(student, prompt, answer), logp_of(teacher, prompt, answer)
        q, p = (x.gather(1, ids)[:, 0] for x in (log_q, log_p))
        a = (p - q).detach()
        weights = 1 + 0.5 * (1 - (a.abs().cumsum(0) - a.abs()) / a.abs().sum())
        total, count = total - (q * weights * a).sum(), count + len(answer)
        advantages += (weights * a).tolist()
    (total / count).backward()
    assert losses(trainer)[0] == pytest.approx((total / count).item(), abs=1e-5)
    norm = torch.stack([p.grad.norm() for p in student.parameters()]).norm().item()
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    mean = sum(advantages) / count
    assert trainer.state.log_history[0]["iw_opd/mean_advantage"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("name", ["IWOPD", "SDPO"])
def test_where_the_loss_is_of_sampled_tokens_no_divergence_of_0_is_logged(name, tmp_path, tiny_tokenizer):
    trainer = preset(name, tmp_path, tiny_tokenizer, teacher_model_kind="model" if name == "IWOPD" else "base")
    trainer.train()
    logged = trainer.state.log_history[0].keys()
    assert (
        not {"distill/divergence", "distill/divergence_max", "distill/support_mass"} & logged and "distill/k1" in logged
    )


def test_sdpo_shows_another_success_and_averages_over_those_that_have_one(tmp_path, tiny_tokenizer):
    def even(completion_ids, **_):
        return [float(ids[0] % 2 == 0) for ids in completion_ids]

    trainer = preset(
        "SDPO", tmp_path, tiny_tokenizer, reward_funcs=even, num_generations=4, success_reward_threshold=1.0, data=hinted(2),
        max_completion_length=5, seed=3, teacher_model_kind="base",
    )  # fmt: skip
    trainer.train()
    batch, student = trainer.seen[0], build_model(len(tiny_tokenizer))
    active, means = batch.columns["active"], []
    rewards = even([r.token_ids for r in batch.rollouts])
    for i, (prompt, answer) in enumerate(sampled(trainer)):
        others = [j for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i and rewards[j] >= 1]
        assert active[i] == float(bool(others))
        told = trainer.kept["train"][i + 1]
        assert (told == prompt) == (not others)
        if others:
            (log_q, ids), (log_p, _) = logp_of(student, prompt, answer), logp_of(student, told, answer)
            q, p = (x.gather(1, ids)[:, 0] for x in (log_q, log_p))
            means.append(((q - p).detach() * q).mean())
    assert sum(active) > 0 and losses(trainer)[0] == pytest.approx(torch.stack(means).mean().item(), abs=1e-5)


def test_sdpo_shows_successes_of_the_same_prompt_whichever_process_sampled_them(tmp_path, tiny_tokenizer, monkeypatch):
    """Two processes with 6 completions each, groups of 4: the second group lies on both, and the second process begins in it."""
    trainer = preset("SDPO", tmp_path, tiny_tokenizer, success_reward_threshold=1.0, num_generations=4)
    prompt_of = lambda row: f"What is {row // 4}? "  # noqa: E731
    rollouts = [Rollout([5, 6], [7], [], "stop", text=f"answer {row}") for row in range(12)]
    mine = slice(6, 12)
    generation = RolloutBatch([{"prompt": prompt_of(row)} for row in range(6, 12)], rollouts[mine], [], group_size=4)
    totals = torch.zeros(12)
    totals[[5, 8]] = 1.0
    others = [rollout.text for rollout in rollouts[:6]]
    monkeypatch.setattr(parallel, "all_gather_objects", lambda items, _: [*others, *items])
    shown, found = trainer.facts(generation, Advantages(torch.zeros(12), totals, 6))
    assert found.columns["active"] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    for row, ids in zip(range(6, 12), shown, strict=True):
        text = tiny_tokenizer.decode(ids)
        assert row == 8 or (prompt_of(row) in text and f"answer {5 if row < 8 else 8}" in text)


def reprompted(folder, tokenizer, data=None, **settings):
    """What the teacher of SDPO is shown of each completion of a group in which all succeed, and the hints' texts."""
    settings = {"include_environment_feedback": True} | settings
    trainer = preset(
        "SDPO", folder, tokenizer, reward_funcs=lambda completion_ids, **_: [1.0] * len(completion_ids), data=data or hinted(2),
        success_reward_threshold=1.0, teacher_model_kind="base", per_device_train_batch_size=4, shuffle_dataset=False, **settings,
    )  # fmt: skip
    trainer.train()
    texts = [rollout.text for rollout in trainer.seen[0].rollouts]
    return [tokenizer.decode(trainer.kept["train"][i + 1]) for i in range(4)], [texts[1], texts[0], texts[3], texts[2]]


@pytest.mark.parametrize(
    "template", ["{feedback}|{prompt}", "{prompt} {solution}|{feedback}", "{feedback}|{solution}{prompt} {{x}}"]
)
def test_sdpo_fills_each_field_of_a_template_where_it_stands(template, tmp_path, tiny_tokenizer):
    own = {"solution_template": "S{successful_previous_attempt}", "feedback_template": "F{feedback_raw}"}
    settings = {"reprompt_template": template, "use_successful_as_teacher": "{solution}" in template}
    shown, solutions = reprompted(tmp_path, tiny_tokenizer, **settings, **own)
    for i, (text, solution) in enumerate(zip(shown, solutions, strict=True)):
        filled = template.format(prompt=f"What is {i // 2}?", solution=f"S{solution}", feedback=f"FIt is {i // 2}.")
        turn = [{"role": "user", "content": filled}]
        assert text == tiny_tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def test_the_loss_of_samples_is_a_mean_over_tokens_in_sdpo_too(tmp_path, tiny_tokenizer):
    trainer = preset(
        "SDPO", tmp_path, tiny_tokenizer, include_environment_feedback=True, teacher_model_kind="base", max_completion_length=4,
        distillation_mode="full_logits", reward_funcs=lambda completion_ids, **_: [0.0] * len(completion_ids),
    )  # fmt: skip
    trainer.train()
    log = trainer.state.log_history[0]
    assert {len(rollout.token_ids) for rollout in trainer.seen[0].rollouts} == {4}
    assert log["loss"] == pytest.approx(log["distill/divergence"], abs=1e-6)
    assert log["on_policy_loss"] == pytest.approx(log["distill/divergence"], abs=1e-6)


def test_words_in_braces_of_the_data_are_no_fields_of_the_template(tmp_path, tiny_tokenizer):
    rows = [{"prompt": "What is {solution}? ", "privileged_context": "{prompt} {x} {"} for _ in range(2)]
    shown, _ = reprompted(
        tmp_path, tiny_tokenizer, datasets.Dataset.from_list(rows), use_successful_as_teacher=False,
        reprompt_template="{feedback}|{prompt}", feedback_template="{feedback_raw}",
    )  # fmt: skip
    assert shown == ["{prompt} {x} {|What is {solution}? "] * 4


def test_feedback_of_messages_is_shown_and_where_there_is_none_the_completion_has_no_teacher(tmp_path, tiny_tokenizer):
    rows = [
        {"prompt": f"What is {i}? ", "privileged_context": [{"role": "user", "content": "wrong"}] * i} for i in range(2)
    ]
    trainer = preset(
        "SDPO", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows), include_environment_feedback=True,
        use_successful_as_teacher=False, per_device_train_batch_size=4, shuffle_dataset=False,
        reward_funcs=lambda completion_ids, **_: [0.0] * len(completion_ids),
    )  # fmt: skip
    trainer.train()
    assert trainer.seen[0].columns["active"] == [0.0, 0.0, 1.0, 1.0]
    assert "wrong" in tiny_tokenizer.decode(trainer.kept["train"][3])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SDPO", {"reprompt_template": "{prompt}{feedback}"}),
        ("SDPO", {"reprompt_template": "{prompt}{solution}", "include_environment_feedback": True}),
        ("SDPO", {"reprompt_template": "{solution}"}),
        ("SDPO", {"reprompt_template": "{prompt}{solution}{answer}"}),
        ("SDPO", {"reprompt_template": '{prompt}{solution} as {"json": 1}'}),
        ("SDPO", {"reprompt_template": "{prompt}{solution}{"}),
        ("SDPO", {"solution_template": "It is solved."}),
        ("SDPO", {"feedback_template": "{feedback}"}),
        ("SDPO", {"use_successful_as_teacher": False}),
        ("SDFT", {"teacher_prompt_template": "{prompt}"}),
        ("SDFT", {"teacher_prompt_template": "{prompt}{privileged_context}{solution}"}),
    ],
)
def test_a_template_without_a_needed_field_or_with_an_unknown_one_is_refused(name, settings, tmp_path):
    with raises(ConfigError, next(iter(settings))):
        getattr(pt, name + "Config")(str(tmp_path), bf16=False, use_cpu=True, **settings)


@pytest.mark.parametrize("value", ["", "  \n", []])
def test_an_empty_privileged_context_is_refused_as_none_is(value, tmp_path, tiny_tokenizer):
    data = datasets.Dataset.from_list([{"prompt": "What is it? ", "privileged_context": value}] * 4)
    with raises(DataError, "row 0", "privileged_context"):
        preset("SDFT", tmp_path, tiny_tokenizer, data=data)


def test_feedback_that_is_to_be_shown_needs_its_column(tmp_path, tiny_tokenizer):
    with raises(DataError, "privileged_context"):
        preset("SDPO", tmp_path, tiny_tokenizer, data=prompts(4), include_environment_feedback=True)


def test_sdpo_mixes_with_the_policys_loss(tmp_path, tiny_tokenizer):
    trainer = preset("SDPO", tmp_path, tiny_tokenizer, distillation_weight=0.0)
    grpo = pt.GRPOTrainer(
        build_model(len(tiny_tokenizer)), count_a, pt.GRPOConfig(
            str(tmp_path / "b"), num_generations=2, max_steps=1, per_device_train_batch_size=8, max_completion_length=8, bf16=False,
            use_cpu=True, seed=7, report_to="none", learning_rate=0.5, optim="sgd", logging_steps=1, save_strategy="no",
            lr_scheduler_type="constant",
        ), train_dataset=hinted(4), processing_class=tiny_tokenizer,
    )  # fmt: skip
    trainer.train(), grpo.train()
    assert losses(trainer)[0] == pytest.approx(losses(grpo)[0], abs=1e-6)
    for a, b in zip(trainer.model.parameters(), grpo.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    "support", [{"beta": 0.0, "loss_top_k": 5}, {"beta": 1.0, "loss_top_k": 5}, {"beta": 0.3, "loss_top_k": 5}]
)
def test_sparse_supports_with_a_tail_tend_to_the_whole(support, tmp_path, tiny_tokenizer):
    options = {"lmbda": 0.0, "max_steps": 1, "per_device_train_batch_size": 8}
    few = make(tmp_path / "a", tiny_tokenizer, **options, **support)
    many = make(tmp_path / "b", tiny_tokenizer, **options, **(support | {"loss_top_k": len(tiny_tokenizer) - 1}))
    few.train(), many.train()
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in few.train_dataset]
    size = len(tiny_tokenizer)
    truth = dense_loss(build_model(size), build_model(size, seed=1), rows, support["beta"]).item()
    assert losses(many)[0] == pytest.approx(truth, abs=2e-4) and 0 < losses(few)[0] < truth


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("Distillation", {"beta": 1.5}, ConfigError),
        ("GKD", {"beta": -0.1}, ConfigError),
        ("GKD", {"lmbda": 1.1}, ConfigError),
        ("GKD", {"temperature": 0.0}, ConfigError),
        ("MiniLLM", {"kd_temperature": 0.0}, ConfigError),
        ("SDFT", {"distillation_mode": "sampled_token"}, ConfigError),
        ("SDFT", {"distillation_topk": 1}, ConfigError),
        ("SDFT", {"distillation_alpha": 2.0}, ConfigError),
        ("SDFT", {"teacher_prompt_template": "{prompt}"}, ConfigError),
        ("SDFT", {"use_teacher_server": True}, ConfigError),
        ("SDPO", {"distillation_weight": 1.5}, ConfigError),
        ("SDPO", {"diagnostics_warning_interval": 5}, ConfigError),
        ("IWOPD", {"lmbda": 0.5}, ConfigError),
        ("IWOPD", {"reverse_kl_top_1_mode": "argmax"}, ConfigError),
        ("IWOPD", {"vllm_sync_frequency": 2}, ConfigError),
        ("IWOPD", {"beta": 0.5}, ConfigError),
        ("IWOPD", {"loss_top_k": 7}, ConfigError),
        ("SDFT", {"beta": 0.5}, ConfigError),
        ("SDFT", {"loss_top_k": 7}, ConfigError),
        ("SDFT", {"teacher_update_rate": 0.5}, ConfigError),
        ("SDPO", {"loss_add_tail": False}, ConfigError),
        ("SSD", {"beta": 0.5}, ConfigError),
        ("SSD", {"teacher_model_kind": "ema"}, ConfigError),
        ("Distillation", {"loss_top_k": 1, "loss_add_tail": False}, ConfigError),
        ("Distillation", {"use_liger_kernel": True}, ConfigError),
        ("Distillation", {"teacher_scores": "x.arrow"}, ConfigError),
        ("Distillation", {"seq_kd": True}, ConfigError),
        ("Distillation", {"lmbda": -0.1}, ConfigError),
        ("GOLD", {"uld_student_temperature": 0.0}, ConfigError),
        ("GOLD", {"uld_hybrid_matched_weight": 0.5}, ConfigError),
        ("GOLD", {"uld_crossentropy_weight": -1.0}, ConfigError),
        ("GOLD", {"use_uld_loss": True, "loss_top_k": 4}, ConfigError),
        ("GKD", {"packing": True}, ConfigError),
        ("GKD", {"assistant_only_loss": True}, ConfigError),
        ("GOLD", {"callbacks": ["x"]}, ConfigError),
        ("MiniLLM", {"gamma": 1.5}, ConfigError),
        ("MiniLLM", {"entropy_coef": 0.1}, ConfigError),
        ("SDPO", {"sync_ref_model": True}, ConfigError),
        ("MiniLLM", {"rkl_advantage": False, "single_step_decomposition": False}, ConfigError),
        ("Distillation", {"teacher_model_kind": "ema", "teacher_model_name_or_path": "x"}, ConfigError),
    ],
)
def test_configs_that_would_train_nothing_or_something_else_are_refused(name, settings, error, tmp_path):
    with pytest.raises(error):
        getattr(pt, name + "Config")(str(tmp_path), bf16=False, use_cpu=True, **settings)


def test_rows_and_teachers_that_mean_nothing_are_refused_before_training(tmp_path, tiny_tokenizer):
    empty = datasets.Dataset.from_list([{"prompt": "a ", "completion": "b"}, {"prompt": "a ", "completion": ""}])
    with pytest.raises(DataError, match="row 1"):
        make(tmp_path, tiny_tokenizer, lmbda=0.0, data=empty)
    with pytest.raises(DataError, match="row 0"):
        make(tmp_path, tiny_tokenizer, lmbda=0.0, data=answers(), max_length=4)
    with raises(DataError):
        make(tmp_path, tiny_tokenizer, lmbda=0.5, data=prompts(4))
    with pytest.raises(DataError, match="privileged_context"):
        preset("SDFT", tmp_path, tiny_tokenizer, data=prompts(4))
    with pytest.raises(DataError, match=r"eval.*privileged_context"):
        preset("SDFT", tmp_path, tiny_tokenizer, eval_dataset=prompts(4))
    silent = [row | {"privileged_context": None if i == 2 else "b"} for i, row in enumerate(hinted(4))]
    with pytest.raises(DataError, match="row 2"):
        preset("SDFT", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(silent))
    student = build_model(len(tiny_tokenizer))
    with raises(ConfigError):
        make(tmp_path, tiny_tokenizer, model=student, teacher=student)
    with pytest.raises(ConfigError, match="SSD"):
        preset("SSD", tmp_path, tiny_tokenizer, teacher=build_model(len(tiny_tokenizer), seed=1))
    with pytest.raises(ConfigError, match="nope/one"):
        make(tmp_path, tiny_tokenizer, teacher="nope/one", teacher_model_name_or_path="nope/two")
    with pytest.raises(ConfigError, match="logits"):
        make(tmp_path, tiny_tokenizer, teacher=build_model(len(tiny_tokenizer) - 4, seed=1))
    with pytest.raises(ConfigError, match="formatting_func"):
        make(tmp_path, tiny_tokenizer, cls=pt.GKDTrainer, config=pt.GKDConfig, formatting_func=str)
    nothing = datasets.Dataset.from_list([{"prompt": "a ", "completion": [{"role": "assistant", "content": ""}]}] * 4)
    with pytest.raises(DataError, match="row 0"):
        make(tmp_path, tiny_tokenizer, lmbda=0.0, data=nothing)
    with raises(ConfigError):
        make(tmp_path, tiny_tokenizer, teacher=None)


def test_keywords_to_load_a_teacher_are_told_where_it_is_loaded_already(tmp_path, tiny_tokenizer, caplog):
    make(
        tmp_path, tiny_tokenizer, lmbda=0.0, teacher_model_init_kwargs={"dtype": "bfloat16"}, teacher_model_revision="a"
    )
    for name in ("teacher_model_init_kwargs", "teacher_model_revision"):
        assert f"{name} is ignored" in caplog.text


def test_a_teacher_of_another_tokenizer_is_refused_with_the_ids_that_differ(
    tmp_path, tiny_tokenizer, _tokenizer_folder
):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(_tokenizer_folder)
    vocabulary = other.get_vocab()
    first, second = (next(token for token, i in vocabulary.items() if i == k) for k in (100, 101))
    state = other.backend_tokenizer.to_str()
    swapped = state.replace(f'"{first}":100', '"\\u0000":100').replace(f'"{second}":101', f'"{first}":101')
    other._tokenizer = type(other.backend_tokenizer).from_str(swapped.replace('"\\u0000":100', f'"{second}":100'))
    with pytest.raises(ConfigError, match="GOLD"):
        make(tmp_path, tiny_tokenizer, teacher_processing_class=other)


def test_configs_hold_the_defaults_of_trl(tmp_path):
    made = {name: getattr(pt, name + "Config")(str(tmp_path), bf16=False, use_cpu=True) for name in EVERY}
    assert (made["GKD"].lmbda, made["GKD"].beta, made["GKD"].temperature, made["GKD"].max_new_tokens) == (
        0.5,
        0.5,
        0.9,
        128,
    )
    assert (made["Distillation"].beta, made["Distillation"].learning_rate) == (1.0, 1e-6)
    assert made["SDFT"].distillation_topk == 100 and made["SDPO"].teacher_model_kind == "ema"
    assert dataclasses.replace(made["IWOPD"].axes(), prefix=None).estimator == "score"


def lora_of_ema(folder, tokenizer, **settings):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return preset(
        "SDFT", folder, tokenizer, teacher_model_kind="ema", teacher_update_rate=0.25, peft_config=lora, data=hinted(12),
        distillation_mode="full_logits", **settings,
    )  # fmt: skip


def adapters(trainer):
    """Weights of the student's adapter, and of the teacher's, by name."""
    found = {"default": {}, "ref": {}}
    for name, parameter in trainer.model.named_parameters():
        for adapter, weights in found.items():
            if f".{adapter}." in name:
                weights[name.replace(f".{adapter}.", ".")] = parameter.detach().clone()
    return found["default"], found["ref"]


def test_with_lora_the_moving_average_is_an_adapter_that_begins_as_the_students(tmp_path, tiny_tokenizer):
    trainer = lora_of_ema(tmp_path, tiny_tokenizer)
    given, teacher = adapters(trainer)
    assert trainer.teacher_model is None and given.keys() == teacher.keys() and len(given) == 4
    assert all(torch.equal(given[name], teacher[name]) for name in given)
    trainer.train()
    student, teacher = adapters(trainer)
    assert any(not torch.equal(given[name], student[name]) for name in given)
    for name in given:
        assert torch.allclose(teacher[name], 0.75 * given[name] + 0.25 * student[name], atol=1e-6)
    assert {n.split(".")[-2] for n, p in trainer.model.named_parameters() if p.requires_grad} == {"default"}


def test_a_resumed_run_goes_on_with_the_average_it_had(tmp_path, tiny_tokenizer):
    whole = lora_of_ema(tmp_path / "a", tiny_tokenizer, max_steps=3, save_strategy="steps", save_steps=2)
    whole.train()
    again = lora_of_ema(tmp_path / "b", tiny_tokenizer, max_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for mine, theirs in zip(adapters(whole), adapters(again), strict=True):
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-6) for name in mine)


def test_constructors_take_the_peers_positions(tmp_path, tiny_tokenizer):
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    args = pt.GKDConfig(str(tmp_path), bf16=False, use_cpu=True, lmbda=0.0, report_to="none", optim="sgd")
    trainer = pt.GKDTrainer(student, teacher, args, None, answers(), None, tiny_tokenizer)
    assert trainer.teacher_model is teacher and trainer.processing_class is tiny_tokenizer
    names = list(inspect.signature(pt.SDPOTrainer.__init__).parameters)
    assert names[:6] == ["self", "model", "reward_funcs", "args", "train_dataset", "eval_dataset"]
    with raises(TypeError):
        pt.SDFTTrainer(*[None] * 9)


def jsd_of_trl(student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, reduction="batchmean"):
    """TRL 0.11's function, which scripts copy and change."""
    q, p = (student_logits / temperature).log_softmax(-1), (teacher_logits / temperature).log_softmax(-1)
    m = torch.logsumexp(torch.stack([q + math.log(1 - beta), p + math.log(beta)]), 0)
    kl = lambda one: (one.exp() * (one - m)).sum(-1)  # noqa: E731
    return (beta * kl(p) + (1 - beta) * kl(q))[labels != -100].mean()


@pytest.mark.parametrize("name", ["GKD", "GOLD", "Distillation"])
def test_an_overridden_divergence_is_the_loss(name, tmp_path, tiny_tokenizer):
    def loss(factor, folder, overridden):
        calls = []

        class Mine(getattr(pt, name + "Trainer")):
            if overridden == "static":

                @staticmethod
                def generalized_jsd_loss(*args, **kwargs):
                    calls.append(kwargs["student_logits"].shape[1])
                    return factor * jsd_of_trl(*args, **kwargs)
            elif overridden == "super":

                def generalized_jsd_loss(self, student_logits, teacher_logits, labels=None, **kwargs):
                    calls.append(labels.shape[1])
                    return factor * super().generalized_jsd_loss(student_logits, teacher_logits, labels, **kwargs)

        settings = {"data": answers(), "max_steps": 2, "per_device_train_batch_size": 4, "logits_chunk_size": 7}
        config = getattr(pt, name + "Config")
        trainer = make(
            folder, tiny_tokenizer, cls=Mine, config=config, lmbda=0.0, beta=0.3, temperature=1.5, **settings
        )
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        assert bool(calls) == bool(overridden) and max(calls, default=1) <= 7
        return torch.tensor([[row["loss"], row["grad_norm"]] for row in rows])

    plain = loss(1, tmp_path / "plain", None)
    for kind in ("static", "super"):
        torch.testing.assert_close(loss(1, tmp_path / kind, kind), plain, rtol=1e-4, atol=1e-5)
    tripled = loss(3, tmp_path / "tripled", "static")
    torch.testing.assert_close(tripled[0], 3 * plain[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"loss_top_k": 5}, {"use_uld_loss": True}])
def test_an_overridden_divergence_that_no_loss_would_call_is_refused(settings, tmp_path, tiny_tokenizer):
    class Mine(pt.GOLDTrainer):
        @staticmethod
        def generalized_jsd_loss(student_logits, teacher_logits, labels=None, beta=0.5):
            return student_logits.sum()

    tokenizers = {"teacher_processing_class": tiny_tokenizer} if "use_uld_loss" in settings else {}
    with raises(ConfigError, "Mine", "generalized_jsd_loss", "objective"):
        make(
            tmp_path,
            tiny_tokenizer,
            cls=Mine,
            config=pt.GOLDConfig,
            data=answers(),
            lmbda=0.0,
            **tokenizers,
            **settings,
        )


def test_an_overridden_divergence_must_return_a_scalar(tmp_path, tiny_tokenizer):
    class Mine(pt.GKDTrainer):
        def generalized_jsd_loss(self, student_logits, teacher_logits, labels=None, beta=0.5):
            return student_logits

    trainer = make(tmp_path, tiny_tokenizer, cls=Mine, config=pt.GKDConfig, data=answers(), lmbda=0.0, max_steps=1)
    with raises(ConfigError, "generalized_jsd_loss", "scalar"):
        trainer.train()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_by_trl_s_name_reduces_as_trl_s(beta):
    q, p = torch.randn(2, 2, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([[1, 2, -100, 3], [-100, -100, 4, 0]])
    each = pt.GKDTrainer.generalized_jsd_loss(q, p, labels, beta=beta, reduction="none")
    exact = divergence(q.log_softmax(-1), p.log_softmax(-1), beta=beta)[labels != -100]
    torch.testing.assert_close(each.sum(-1), exact)
    sums = {"sum": 1, "batchmean": 5, "mean": 25}
    for reduction, count in sums.items():
        value = pt.GKDTrainer.generalized_jsd_loss(q, p, labels, beta=beta, reduction=reduction)
        torch.testing.assert_close(value, exact.sum() / count)
    value = pt.GKDTrainer.generalized_jsd_loss(q, p, labels, beta=beta, num_items_in_batch=10)
    torch.testing.assert_close(value, exact.sum() / 10)
