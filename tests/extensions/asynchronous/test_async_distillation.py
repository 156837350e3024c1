"""Distillation on rollouts that other processes write: what it trains, whom it asks, what it refuses."""

import contextlib

import datasets
import pytest
import torch

import posttrain as pt
from posttrain.errors import ConfigError, DataError
from tests.conftest import build_model
from tests.extensions.asynchronous.helpers import StubTransfer, StubWorker, sample, steps
from tests.extensions.server.stub_server import StubServer
from tests.methods.helpers import SHORT, losses, prompts
from tests.methods.test_distillation_scores import FakeServer
from tests.methods.test_distillation_teachers import NAMES, dense_mixture, named, teachers
from tests.wordings import raises

ASYNC = SHORT | {"per_device_train_batch_size": 4, "max_completion_length": 8, "use_cpu": True, "optim": "sgd"}
ASYNC |= {"max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.5}


def run(folder, tokenizer, *, make=None, data=None, model=None, **settings):
    """With a stub worker where ``make`` is given, else with real processes."""
    keys = ("teacher_model", "teacher_server", "eval_dataset", "teacher_processing_class")
    given = {key: settings.pop(key) for key in keys if key in settings}
    if make is not None:
        given |= {"rollout_worker": StubWorker(make), "weight_transfer": StubTransfer()}
    args = pt.AsyncDistillationConfig(str(folder), **(ASYNC | settings))
    data = named(prompts(8)) if data is None else data
    return pt.AsyncDistillationTrainer(model or build_model(len(tokenizer)), args, data, tokenizer, **given)


WRITTEN = [((1, 5, 9), (7, 8)), ((1, 5, 9), (11,)), ((2, 6), (20, 21, 22)), ((3, 4, 8, 9), (30, 31))]


def written(number, version):
    """Four rollouts, in turn of each teacher."""
    prompt, answer = WRITTEN[number % 4]
    made = sample(number, version, prompt=prompt, written=answer, metrics={"turns": 1.0})
    made.teacher_id = NAMES[number % 2]
    return made


@pytest.mark.parametrize("weights", [None, {"math": 0.3, "code": 0.7}], ids=["by_row", "weighted"])
def test_a_step_on_given_rollouts_is_the_dense_divergence_from_each_ones_teachers(weights, tmp_path, tiny_tokenizer):
    shares = [weights or {NAMES[i % 2]: 1.0} for i in range(4)]
    rows = [(list(prompt), list(answer)) for prompt, answer in WRITTEN]
    far = {"teacher_server_urls": {name: f"http://{name}" for name in NAMES}, "teacher_top_k": len(tiny_tokenizer) - 1}
    models = teachers(tiny_tokenizer)
    servers = {"teacher_server": {name: FakeServer(model, top_k=400) for name, model in models.items()}, **far}
    for beta, given in ((0.0, {"teacher_model": models}), (0.6, {"teacher_model": models}), (0.0, servers)):
        trainer = run(tmp_path, tiny_tokenizer, make=written, beta=beta, teacher_weights=weights, **given)
        student = build_model(len(tiny_tokenizer))
        loss = dense_mixture(student, teachers(tiny_tokenizer), rows, shares, beta)
        loss.backward()
        trainer.train()
        assert losses(trainer)[0] == pytest.approx(loss.item(), abs=1e-5)
        for (name, ours), theirs in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
            assert torch.allclose(ours, theirs - 0.5 * theirs.grad, atol=1e-5), name
        log = trainer.state.log_history[0]
        assert ("perf/teacher_wait_s" in log) == ("teacher_server" in given)
        assert {"teacher_jsd/math", "teacher_jsd/code", "kl", "async/trained"} <= log.keys() and "reward" not in log


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("engine", ["native", "server"])
def test_workers_write_on_policy_while_servers_score_what_arrived(engine, tmp_path, tiny_tokenizer):
    """Workers sample with a copy of the student, or ask a rollout server that the trainer pushes to, beside the teachers'."""
    servers = {name: FakeServer(model) for name, model in teachers(tiny_tokenizer).items()}
    asked = {name: [] for name in NAMES}
    for name, server in servers.items():
        score = server.score
        server.score = lambda ids, *a, n=name, s=score, **kw: asked[n].extend(ids) or s(ids, *a, **kw)
    with contextlib.closing(StubServer(build_model(len(tiny_tokenizer), seed=9))) as stub:
        far = {"vllm_server_base_url": [stub.url], "vllm_server_timeout": 20.0} if engine == "server" else {}
        trainer = run(
            tmp_path, tiny_tokenizer, teacher_server=servers, max_steps=2, max_staleness=0, learning_rate=0.1,
            teacher_server_urls={name: f"http://{name}" for name in NAMES}, eval_dataset=named(prompts(4)), **far,
        )  # fmt: skip
        trainer.train()
        assert (stub.version == "default") == (engine == "native")
    rows = steps(trainer)
    assert len(rows) == 2 and all(row["sample/staleness_max"] == 0 and abs(row["kl"]) < 1e-6 for row in rows)
    account = trainer.account()
    assert account["async/trained"] == 8 and account["async/in_flight"] == 0
    assert account["async/produced"] == account["async/trained"] + account["async/dropped"]
    # The handshake, and then each rollout that arrived, by the one that its row names.
    assert sum(len(ids) - 1 for ids in asked.values()) >= 8 and rows[0]["distill/divergence"] > 0
    assert trainer.evaluate()["eval_distill/divergence"] > 0


def test_a_row_whose_teacher_nobody_knows_ends_the_run_by_name(tmp_path, tiny_tokenizer):
    stream = datasets.IterableDataset.from_generator(lambda: iter(named(prompts(8))))

    def unknown(number, version):
        made = written(number, version)
        made.teacher_id = "history"
        return made

    with raises(DataError, "teacher_id='history'", "['math', 'code']"):
        run(tmp_path, tiny_tokenizer, make=unknown, data=stream, teacher_model=teachers(tiny_tokenizer)).train()


def test_fields_of_other_losses_and_two_names_for_one_thing_are_refused(tmp_path, tiny_tokenizer):
    for settings, value in (
        ({"delta": 3.0}, "delta=3.0"), ({"loss_top_k": 4}, "teacher_top_k"),
        ({"lmbda": 0.5}, "lmbda=0.5"), ({"use_vllm": True}, "use_vllm"), ({"beta": 1.5}, "beta=1.5"),
        ({"teacher_server_urls": "http://a", "teacher_model_server_url": "http://b"}, "names of the same option"),
    ):  # fmt: skip
        with raises(ConfigError, value):
            pt.AsyncDistillationConfig(str(tmp_path), **ASYNC, **settings)
    with raises(ConfigError, "no teacher is set"):
        run(tmp_path, tiny_tokenizer)
    with raises(ConfigError, "train_dataset"):
        pt.AsyncDistillationTrainer(build_model(len(tiny_tokenizer)))
    url = '{"math": "http://a", "code": "http://b"}'
    args = pt.AsyncDistillationConfig(str(tmp_path), **ASYNC, teacher_server_urls=url)
    assert args.teacher_model_server_url == args.teacher_server_urls == {"math": "http://a", "code": "http://b"}
    assert args.axes().support == "teacher_topk" and args.axes().top_k == 8
