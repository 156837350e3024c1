"""Several teachers of one student: each row its own, or a weighted mean of the divergences from all."""

import datasets
import pytest
import torch

import posttrain as pt
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.serve.engine import ServedEngine
from posttrain.methods.distillation.teacher import load_teacher
from posttrain.rollouts.native.engine import NativeEngine
from tests.checks.test_tokenizers import byte_level
from tests.conftest import build_model
from tests.extensions.serve.support import serving
from tests.methods.helpers import losses, prompts
from tests.methods.test_distillation import BASE, answers, dense_loss, make
from tests.methods.test_distillation_scores import FakeServer
from tests.wordings import raises

NAMES = ["math", "code"]


def teachers(tokenizer):
    """Two models that differ from each other and from the student."""
    return {name: build_model(len(tokenizer), seed=1 + number) for number, name in enumerate(NAMES)}


def named(data, names=NAMES):
    """Rows in turn of each teacher; two neighbours in `answers` share a prompt, and have two teachers."""
    return data.add_column("teacher_id", [names[i % len(names)] for i in range(len(data))])


def dense_mixture(student, models, rows, weights, beta):
    """Mean over all answer tokens of the weighted divergences; ``weights[i]`` are those of row i."""
    tokens, total = sum(len(answer) for _, answer in rows), 0.0
    for (prompt, answer), shares in zip(rows, weights, strict=True):
        for name, weight in shares.items():
            loss = dense_loss(student, models[name], [(prompt, answer)], beta)
            total = total + weight * loss * len(answer) / tokens
    return total


def kept_rows(trainer):
    return [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]


@pytest.mark.parametrize("weights", [None, {"math": 0.3, "code": 0.7}], ids=["by_row", "weighted"])
def test_a_step_is_the_sum_of_each_teachers_dense_divergence_from_each_sequence(weights, tmp_path, tiny_tokenizer):
    # Of three positions no row may be a teacher's.
    for beta, chunk in ((0.0, None), (0.4, 3), (1.0, None)):
        options = {"beta": beta, "lmbda": 0.0, "per_device_train_batch_size": 8, "max_steps": 1, "max_grad_norm": 0.0}
        options["logits_chunk_size"] = chunk
        trainer = make(
            tmp_path / str(beta), tiny_tokenizer, teacher=teachers(tiny_tokenizer), data=named(answers()),
            teacher_weights=weights, **options,
        )  # fmt: skip
        shares = [weights or {NAMES[i % 2]: 1.0} for i in range(8)]
        student = build_model(len(tiny_tokenizer))
        loss = dense_mixture(student, teachers(tiny_tokenizer), kept_rows(trainer), shares, beta)
        loss.backward()
        trainer.train()
        assert losses(trainer)[0] == pytest.approx(loss.item(), abs=1e-5)
        for (name, ours), theirs in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
            assert torch.allclose(ours, theirs - 0.5 * theirs.grad, atol=1e-5), name


def test_a_teacher_is_asked_about_its_own_rows_alone(tmp_path, tiny_tokenizer):
    models, seen = teachers(tiny_tokenizer), dict.fromkeys(NAMES, 0)

    def count(name):
        def hook(module, args, kwargs):
            seen[name] += kwargs["input_ids"].numel()

        return hook

    for name, model in models.items():
        model.register_forward_pre_hook(count(name), with_kwargs=True)
    data = answers().add_column("teacher_id", ["math"] * 6 + ["code"] * 2)
    options = {"lmbda": 0.0, "per_device_train_batch_size": 8, "max_steps": 1, "data": data}
    trainer = make(tmp_path, tiny_tokenizer, teacher=models, **options)
    seen |= dict.fromkeys(NAMES, 0)  # The probes of the layout are over.
    trainer.train()
    rows = kept_rows(trainer)
    # Neighbours have one prompt, which is computed once.
    own = {
        name: sum(len(answer) for _, answer in part) + sum(len(prompt) for prompt, _ in part[::2])
        for name, part in {"math": rows[:6], "code": rows[6:]}.items()
    }
    assert seen == own


def test_on_policy_each_completion_has_the_teacher_of_its_row_and_the_log_says_how_far_it_is(tmp_path, tiny_tokenizer):
    options = {"beta": 0.5, "max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4}
    trainer = make(
        tmp_path, tiny_tokenizer, teacher=teachers(tiny_tokenizer), data=named(prompts(4)), log_completions=False, **options
    )  # fmt: skip
    seen, sample, shown = [], trainer.sample, []
    trainer.sample = lambda *given: seen.append(sample(*given)) or seen[-1]
    trainer.record.listeners.append(lambda rows, evaluation: shown.extend(rows))
    trainer.train()
    (batch,) = seen
    rows = [(r.prompt_ids, r.token_ids) for r in batch.rollouts]
    own = [example["teacher_id"] for example in batch.examples]
    student = build_model(len(tiny_tokenizer))
    expected = dense_mixture(student, teachers(tiny_tokenizer), rows, [{name: 1.0} for name in own], 0.5)
    assert losses(trainer)[0] == pytest.approx(expected.item(), abs=1e-5)
    log, lengths = trainer.state.log_history[0], [len(answer) for _, answer in rows]
    for name in NAMES:
        part = [row for row, one in zip(rows, own, strict=True) if one == name]
        share = sum(len(answer) for _, answer in part) / sum(lengths)
        assert log.get(f"teacher_token_frac/{name}", 0.0) == pytest.approx(share)
        if part:
            dense = dense_loss(student, teachers(tiny_tokenizer)[name], part, 0.5).item()
            assert log[f"teacher_jsd/{name}"] == pytest.approx(dense, abs=1e-5)
    assert [row["teacher"] for row in shown] == own


def test_shares_of_tokens_are_of_the_whole_step_where_a_micro_batch_has_one_teacher(tmp_path, tiny_tokenizer):
    data = answers().add_column("teacher_id", ["math"] * 6 + ["code"] * 2)
    logs = []
    for size in (8, 2):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_steps": 1}
        options |= {"lmbda": 0.0, "shuffle_dataset": False, "data": data}
        trainer = make(tmp_path / str(size), tiny_tokenizer, teacher=teachers(tiny_tokenizer), **options)
        trainer.train()
        found = trainer.state.log_history[0]
        logs.append([found[f"teacher_{kind}/{name}"] for kind in ("token_frac", "jsd") for name in NAMES])
    tokens = [len(answer) for _, answer in kept_rows(trainer)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-5) and logs[0][0] == pytest.approx(sum(tokens[:6]) / sum(tokens))


def test_teachers_behind_servers_are_the_sparse_loss_of_the_same_models_here(tmp_path, tiny_tokenizer):
    for beta, k, weights in ((0.0, 8, None), (1.0, 1, None), (0.4, 1, {"math": 0.25, "code": 0.75})):
        options = {"beta": beta, "loss_top_k": k, "max_steps": 1, "teacher_weights": weights}
        models, data = teachers(tiny_tokenizer), named(prompts(4))
        servers = {name: FakeServer(model) for name, model in models.items()}
        asked = {name: [] for name in NAMES}
        for name, server in servers.items():
            score = server.score
            server.score = lambda ids, *a, n=name, s=score, **kw: asked[n].append(len(ids)) or s(ids, *a, **kw)
        urls = {name: f"http://{name}" for name in NAMES}
        remote = make(
            tmp_path / f"a{beta}", tiny_tokenizer, teacher=None, teacher_server=servers, data=data,
            teacher_model_server_url=urls, **options,
        )  # fmt: skip
        local = make(tmp_path / f"b{beta}", tiny_tokenizer, teacher=models, data=data, **options)
        remote.train(), local.train()
        assert losses(remote)[0] == pytest.approx(losses(local)[0], abs=1e-5) and losses(remote)[0] > 0
        # The handshake, and then a row's own server alone, or all of them.
        counts = [sum(counts[1:]) for counts in asked.values()]
        assert sum(counts) == 4 * (1 if weights is None else 2)


def test_the_score_of_a_token_is_the_weighted_mean_of_the_teachers_log_probs(tmp_path, tiny_tokenizer):
    weights = {"math": 0.3, "code": 0.7}
    options = {"max_steps": 1, "max_grad_norm": 0.0, "data": prompts(4), "iw_opd_gamma": 0.0, "max_length": 64}
    trainer = make(
        tmp_path, tiny_tokenizer, teacher=teachers(tiny_tokenizer), config=pt.IWOPDConfig, cls=pt.IWOPDTrainer,
        teacher_weights=weights, **options,
    )  # fmt: skip
    seen, sample = [], trainer.sample
    trainer.sample = lambda *given: seen.append(sample(*given)) or seen[-1]
    trainer.train()
    student, models, total, count = build_model(len(tiny_tokenizer)), teachers(tiny_tokenizer), 0.0, 0
    for rollout in seen[0].rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        places = slice(len(rollout.prompt_ids) - 1, -1)
        at = ids[0, len(rollout.prompt_ids) :, None]
        q, *p = (
            model(input_ids=ids).logits[0, places].log_softmax(-1).gather(1, at)[:, 0]
            for model in (student, *models.values())
        )
        reward = sum(w * one for w, one in zip(weights.values(), p, strict=True)).detach() - q.detach()
        total, count = total - (reward * q).sum(), count + len(rollout.token_ids)
    (total / count).backward()
    for (name, ours), theirs in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        assert torch.allclose(ours, theirs - 0.5 * theirs.grad, atol=1e-5), name


def test_a_mixture_of_losses_is_that_of_the_mean_forward_and_of_the_geometric_mean_backward():
    """What the objective's docstring says of the edges, by the exact gradients."""
    from posttrain.losses.distillation import divergence

    made = torch.Generator().manual_seed(0)
    x = torch.randn(6, 12, generator=made, dtype=torch.float64, requires_grad=True)
    p = torch.randn(2, 6, 12, generator=made, dtype=torch.float64).log_softmax(-1)
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    arithmetic = (p.exp() * weights[:, None, None]).sum(0).log()
    geometric = (p * weights[:, None, None]).sum(0).log_softmax(-1)

    def slope(*given, beta):
        loss = sum(w * divergence(x.log_softmax(-1), one, beta=beta).sum() for w, one in given)
        return torch.autograd.grad(loss, x)[0]

    pairs = list(zip(weights, p, strict=True))
    for beta, single, other in ((0.0, arithmetic, geometric), (1.0, geometric, arithmetic)):
        mixture = slope(*pairs, beta=beta)
        assert torch.allclose(mixture, slope((1.0, single), beta=beta), atol=1e-12)
        assert not torch.allclose(mixture, slope((1.0, other), beta=beta), atol=1e-3)


def test_what_several_teachers_cannot_be_is_refused_with_names_and_numbers(tmp_path, tiny_tokenizer):
    models, given = teachers(tiny_tokenizer), {"data": named(answers()), "lmbda": 0.0}
    for weights, values in (
        ({"math": 0.5, "code": 0.4}, ("0.9", "0.555556", "0.444444")),
        ({"math": 1.5, "code": -0.5}, ("'math'", "1.5")),
    ):
        with raises(ConfigError, "teacher_weights", *values):
            make(tmp_path, tiny_tokenizer, teacher=models, teacher_weights=weights, **given)
    with raises(ConfigError, "['history', 'math']", "['code', 'math']"):
        make(tmp_path, tiny_tokenizer, teacher=models, teacher_weights={"math": 0.5, "history": 0.5}, **given)
    with raises(DataError, "train_dataset row 1", "'history'", "['math', 'code']"):
        make(tmp_path, tiny_tokenizer, teacher=models, lmbda=0.0, data=named(answers(), ["math", "history"]))
    with raises(DataError, "train_dataset row 0", "None", "teacher_id"):
        make(tmp_path, tiny_tokenizer, teacher=models, lmbda=0.0, data=answers())
    with raises(DataError, "teacher_id='history'"):
        stream = datasets.IterableDataset.from_generator(lambda: iter(named(prompts(4), ["history"])))
        make(tmp_path, tiny_tokenizer, teacher=models, data=stream).train()
    with raises(ConfigError, "samples from one", "['math', 'code']"):
        make(tmp_path, tiny_tokenizer, teacher=models, data=named(prompts(4)), lmbda=0.5, seq_kd=True)
    other = byte_level(size=320)
    folder = tmp_path / "other"
    build_model(len(other), seed=1).save_pretrained(folder), other.save_pretrained(folder)
    with raises(ConfigError, "tokens"):
        make(tmp_path, tiny_tokenizer, teacher={"math": models["math"], "code": str(folder)}, **given)


def test_one_teacher_by_name_scores_every_row_whatever_the_column_says(tmp_path, tiny_tokenizer):
    options = {"lmbda": 0.0, "max_steps": 1}
    alone = make(tmp_path / "a", tiny_tokenizer, teacher=teachers(tiny_tokenizer)["math"], **options)
    only = {"math": teachers(tiny_tokenizer)["math"]}
    by_name = make(tmp_path / "b", tiny_tokenizer, teacher=only, data=named(answers(), ["code"]), **options)
    alone.train(), by_name.train()
    assert losses(alone) == losses(by_name)


def test_teachers_are_named_in_the_config_too(tmp_path, tiny_tokenizer):
    folders = {}
    for name, model in teachers(tiny_tokenizer).items():
        folders[name] = str(tmp_path / name)
        model.save_pretrained(folders[name]), tiny_tokenizer.save_pretrained(folders[name])
    text = __import__("json").dumps(folders)
    settings = {"teacher_model_name_or_path": text, "teacher_weights": '{"math": 0.5, "code": 0.5}'}
    given = {"lmbda": 0.0, "max_steps": 1, "teacher": None}
    trainer = make(tmp_path / "a", tiny_tokenizer, **given, **settings)
    assert trainer.args.teacher_model_name_or_path == folders and trainer.teacher_names == NAMES
    trainer.train()
    assert {"teacher_jsd/math", "teacher_jsd/code"} <= trainer.state.log_history[0].keys()


def test_server_distillation_learns_from_two_real_servers_as_from_the_models_they_hold(tmp_path, tiny_tokenizer):
    data, options = named(prompts(4)), {"beta": 0.0, "loss_top_k": 8, "max_steps": 1}
    engines = [ServedEngine(NativeEngine(model, pad_token_id=0)) for model in teachers(tiny_tokenizer).values()]
    with serving(lambda: engines[0], context=256) as math, serving(lambda: engines[1], context=256) as code:
        urls = {"math": math.url, "code": code.url}
        args = pt.ServerDistillationConfig(str(tmp_path / "a"), teacher_model_server_url=urls, **(BASE | options))
        student = build_model(len(tiny_tokenizer))
        # TRL's positions.
        remote = pt.ServerDistillationTrainer(student, args, data, None, tiny_tokenizer, None, (None, None), None, None)
        remote.train()
    local = make(tmp_path / "b", tiny_tokenizer, teacher=teachers(tiny_tokenizer), data=data, **options)
    local.train()
    assert losses(remote)[0] == pytest.approx(losses(local)[0], abs=1e-5) and losses(remote)[0] > 0
    assert remote.teacher_model is None and remote.state.log_history[0]["teacher_token_frac/math"] > 0


def test_server_distillation_without_a_server_or_with_a_support_that_none_gives_is_refused(tmp_path, tiny_tokenizer):
    url = {"teacher_model_server_url": "http://teacher"}
    with raises(ConfigError, "teacher_model_server_url"):
        make(
            tmp_path, tiny_tokenizer, teacher=None, cls=pt.ServerDistillationTrainer, config=pt.ServerDistillationConfig
        )
    for settings, value in (({"beta": 0.0, "loss_top_k": 0}, "0"), ({"beta": 0.5, "loss_top_k": 4}, "4")):
        with raises(ConfigError, f"loss_top_k={value}"):
            pt.ServerDistillationConfig(str(tmp_path), **BASE, **url, **settings)
    with raises(ConfigError, "reverse_kl_top_1_mode='argmax'"):
        pt.ServerDistillationConfig(str(tmp_path), **BASE, **url, reverse_kl_top_1_mode="argmax")
    assert pt.ServerDistillationConfig(str(tmp_path), **BASE, **url).vllm_server_port == 8001


def test_a_teacher_is_loaded_with_the_older_name_of_its_dtype(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path / "teacher")
    build_model(len(tiny_tokenizer), seed=1).save_pretrained(tmp_path / "teacher")
    args = pt.DistillationConfig(
        str(tmp_path), teacher_model_init_kwargs={"torch_dtype": "bfloat16"}, report_to="none", use_cpu=True
    )
    teacher = load_teacher(str(tmp_path / "teacher"), args, build_model(len(tiny_tokenizer)))
    assert next(teacher.parameters()).dtype == torch.bfloat16
