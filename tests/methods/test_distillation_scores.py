"""Teachers that are not there: a file of scores, and a server."""

from types import SimpleNamespace

import datasets
import peft
import pytest
import torch
import transformers

import posttrain as pt
from posttrain.cli.main import main
from posttrain.cli.teacher_scores import run as teacher_scores
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.extensions.serve.engine import ServedEngine
from posttrain.methods.distillation import teacher
from posttrain.methods.distillation.teacher import ScoreFile, score_dataset
from posttrain.rollouts.native.engine import NativeEngine
from tests.checks.test_tokenizers import byte_level
from tests.conftest import build_model
from tests.extensions.serve.support import serving
from tests.methods.helpers import losses, prompts
from tests.methods.test_distillation import answers, dense_loss, make
from tests.wordings import raises


def scored(path, tokenizer, data=None, **settings):
    score_dataset(build_model(len(tokenizer), seed=1), data or answers(), tokenizer, path, batch_size=3, **settings)
    return str(path)


def from_file(folder, tokenizer, path, **settings):
    own = {"teacher": None, "lmbda": 0.0, "max_steps": 1, "per_device_train_batch_size": 8, "teacher_scores": path}
    return make(folder, tokenizer, **(own | settings))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_file_of_almost_all_ids_is_the_teacher_itself(beta, tmp_path, tiny_tokenizer):
    path = scored(tmp_path / "scores.arrow", tiny_tokenizer, top_k=len(tiny_tokenizer) - 1)
    trainer = from_file(tmp_path, tiny_tokenizer, path, beta=beta)
    trainer.train()
    size = len(tiny_tokenizer)
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    truth = dense_loss(build_model(size), build_model(size, seed=1), rows, beta).item()
    assert losses(trainer)[0] == pytest.approx(truth, abs=2e-4) and trainer.teacher_model is None


def test_few_ids_say_what_mass_they_hold(tmp_path, tiny_tokenizer):
    trainer = from_file(tmp_path, tiny_tokenizer, scored(tmp_path / "scores.arrow", tiny_tokenizer, top_k=4), beta=0.0)
    trainer.train()
    assert 0 < trainer.state.log_history[0]["distill/support_mass"] < 1


def test_of_a_file_the_first_ids_are_read_where_fewer_are_asked_for(tmp_path, tiny_tokenizer):
    paths = [scored(tmp_path / f"{k}.arrow", tiny_tokenizer, top_k=k) for k in (9, 3)]
    wide, narrow = (
        from_file(tmp_path / str(k), tiny_tokenizer, path, beta=0.0, loss_top_k=k)
        for path, k in zip(paths, (3, 0), strict=True)
    )
    wide.train()
    narrow.train()
    assert losses(wide)[0] == pytest.approx(losses(narrow)[0], abs=1e-6)
    with pytest.raises(ConfigError, match="loss_top_k=4"):
        from_file(tmp_path, tiny_tokenizer, paths[1], beta=0.0, loss_top_k=4)
    one = scored(tmp_path / "one.arrow", tiny_tokenizer, top_k=1)
    with pytest.raises(ConfigError, match="tail"):
        from_file(tmp_path, tiny_tokenizer, one, beta=0.0, loss_add_tail=False)


def test_padded_rows_of_the_student_have_no_mass_beside_a_file(tmp_path, tiny_tokenizer):
    size = len(tiny_tokenizer)
    path = scored(tmp_path / "scores.arrow", tiny_tokenizer, top_k=size)
    student, same = build_model(size + 16), build_model(size + 16)
    trainer = from_file(tmp_path, tiny_tokenizer, path, beta=0.5, model=student)
    rows, total, count = [(r["prompt_ids"], r["completion_ids"]) for r in trainer.train_dataset], 0.0, 0
    for prompt, answer in rows:
        ids = torch.tensor([prompt + answer])
        x, y = (m(input_ids=ids).logits[0, len(prompt) - 1 : -1, :size] for m in (same, build_model(size, seed=1)))
        q, p = x.double().softmax(-1), y.double().softmax(-1)
        m = (p + q) / 2
        total, count = total + (p * (p / m).log() + q * (q / m).log()).sum() / 2, count + len(answer)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx((total / count).item(), abs=1e-5)


def test_evaluation_reads_a_file_of_its_own(tmp_path, tiny_tokenizer):
    size, held_out = len(tiny_tokenizer), answers(5)
    paths = {"teacher_scores": scored(tmp_path / "train.arrow", tiny_tokenizer, top_k=size - 1)}
    own = scored(tmp_path / "eval.arrow", tiny_tokenizer, data=held_out, top_k=size - 1)
    trainer = from_file(
        tmp_path, tiny_tokenizer, paths["teacher_scores"], beta=0.5, eval_dataset=held_out, eval_teacher_scores=own,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.eval_dataset]
    truth = dense_loss(build_model(size), build_model(size, seed=1), rows, 0.5).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(truth, abs=2e-4)
    trainer.train()
    with pytest.raises(DataError, match="another dataset"):
        trainer.evaluate(answers(3))


def test_evaluation_without_scores_is_refused_before_training(tmp_path, tiny_tokenizer):
    path = scored(tmp_path / "s.arrow", tiny_tokenizer)
    with pytest.raises(ConfigError, match="eval_teacher_scores"):
        from_file(tmp_path, tiny_tokenizer, path, eval_dataset=answers(5))
    with pytest.raises(DataError, match="another dataset"):
        from_file(tmp_path, tiny_tokenizer, path, eval_dataset=answers(5), eval_teacher_scores=path)
    with pytest.raises(ConfigError, match="eval_teacher_scores"):
        pt.GKDConfig(str(tmp_path), bf16=False, use_cpu=True, eval_teacher_scores=path)


def test_a_file_of_other_rows_another_template_or_tokenizer_is_refused_by_name_and_hash(tmp_path, tiny_tokenizer):
    path = scored(tmp_path / "scores.arrow", tiny_tokenizer)
    facts = ScoreFile(path).facts
    with pytest.raises(DataError, match=f"dataset.*{facts['dataset'][:12]}"):
        from_file(tmp_path, tiny_tokenizer, path, data=answers(6), per_device_train_batch_size=2)
    with pytest.raises(DataError, match="dataset"):
        from_file(tmp_path, tiny_tokenizer, path, max_prompt_length=2)
    tiny_tokenizer.chat_template += " "
    with pytest.raises(DataError, match=f"template.*{facts['template'][:12]}"):
        from_file(tmp_path, tiny_tokenizer, path)
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template[:-1]
    tiny_tokenizer.add_tokens(["<new>"])
    with pytest.raises(DataError, match=f"tokenizer.*{facts['tokenizer'][:12]}"):
        from_file(tmp_path, tiny_tokenizer, path, model=build_model(len(tiny_tokenizer)))
    with pytest.raises(ConfigError, match="temperature"):
        from_file(tmp_path, tiny_tokenizer, path, temperature=2.0)


def test_what_is_no_file_of_scores_is_refused(tmp_path):
    (tmp_path / "x.arrow").write_bytes(b"no arrow")
    for name in ("absent.arrow", "x.arrow"):
        with pytest.raises(ConfigError):
            ScoreFile(tmp_path / name)


def test_the_command_writes_what_gkd_reads(tmp_path, tiny_model_dir, capsys):
    answers().to_json(tmp_path / "rows.jsonl")
    options = ["--teacher_model_name_or_path", tiny_model_dir, "--model_name_or_path", tiny_model_dir, "--top_k", "8"]
    options += ["--dataset_name", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "scores.arrow")]
    assert main(["teacher-scores", *options]) == 0 and "8 answers" in capsys.readouterr().out
    train = ["--model_name_or_path", tiny_model_dir, "--dataset_name", str(tmp_path / "rows.jsonl"), "--lmbda", "0"]
    train += [
        "--teacher_scores",
        str(tmp_path / "scores.arrow"),
        "--output_dir",
        str(tmp_path / "out"),
        "--max_steps",
        "1",
    ]
    train += ["--per_device_train_batch_size", "4", "--report_to", "none", "--bf16", "False", "--use_cpu", "True"]
    assert main(["gkd", *train, "--num_generations", "1"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_file_that_could_not_be_finished_leaves_the_one_before(tmp_path, tiny_tokenizer, monkeypatch):
    path = scored(tmp_path / "scores.arrow", tiny_tokenizer)
    before = (tmp_path / "scores.arrow").read_bytes()
    real, calls = teacher._scores, []

    def fails_later(*args, **settings):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*args, **settings)

    monkeypatch.setattr(teacher, "_scores", fails_later)
    with pytest.raises(KeyboardInterrupt):
        scored(path, tiny_tokenizer, top_k=3)
    assert (tmp_path / "scores.arrow").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["top_k", "batch_size"])
def test_sizes_below_one_are_refused(name, tmp_path, tiny_tokenizer):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        score_dataset(build_model(len(tiny_tokenizer)), answers(), tiny_tokenizer, tmp_path / "x.arrow", **{name: 0})


TEMPLATE = "{{ word | default('plain') }}{% for m in messages %} {{ m['content'] }}{% endfor %}"


def test_the_command_renders_with_the_same_template_arguments_as_the_run(tmp_path, tiny_model_dir, tiny_tokenizer):
    tiny_tokenizer.chat_template = TEMPLATE
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    turns = [{"prompt": [{"role": "user", "content": "ab"}], "completion": [{"role": "assistant", "content": "c"}]}]
    data = datasets.Dataset.from_list(turns * 2)
    data.to_json(tmp_path / "rows.jsonl")
    options = ["--teacher_model_name_or_path", tiny_model_dir, "--model_name_or_path", str(tmp_path / "tokenizer")]
    options += ["--dataset_name", str(tmp_path / "rows.jsonl"), "--top_k", "8", "--output"]
    own = tmp_path / "new" / "folder" / "own.arrow"
    assert main(["teacher-scores", *options, str(own), "--chat_template_kwargs", '{"word": "other"}']) == 0
    assert main(["teacher-scores", *options, str(tmp_path / "plain.arrow")]) == 0
    kwargs = {"word": "other"}
    expected = scored(tmp_path / "expected.arrow", tiny_tokenizer, data, chat_template_kwargs=kwargs, max_length=1024)
    hashes = [ScoreFile(path).facts["dataset"] for path in (own, expected, tmp_path / "plain.arrow")]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("text", ["{word: 1}", "[1]", "3"])
def test_the_command_refuses_template_arguments_that_are_no_object_before_it_loads(text, tmp_path):
    options = ["--teacher_model_name_or_path", "absent", "--model_name_or_path", "absent", "--dataset_name", "absent"]
    options += ["--output", str(tmp_path / "x.arrow"), "--chat_template_kwargs", text]
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        teacher_scores(options)


def test_the_command_names_a_split_that_is_not_there(tmp_path):
    answers().to_json(tmp_path / "rows.jsonl")
    options = ["--teacher_model_name_or_path", "absent", "--model_name_or_path", "absent", "--dataset_name"]
    options += [str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "x.arrow"), "--dataset_train_split", "dev"]
    with pytest.raises(DataError, match="dev"):
        teacher_scores(options)


class FakeServer:
    """What the client of a server with ``prompt_logprobs`` says, by a model here."""

    def __init__(self, model, model_id="teacher", top_k=20, broken=False):
        self.model, self.facts, self.broken = model, {"model": model_id, "max_logprobs": top_k}, broken

    def info(self):
        return self.facts

    @torch.no_grad()
    def score(self, sequences, prompt_lengths, *, top):
        found = []
        for ids, start in zip(sequences, prompt_lengths, strict=True):
            logp = self.model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
            best = logp.topk(top, -1)
            actual = logp.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
            own = actual[:-1] if self.broken else actual
            found.append(SimpleNamespace(top_ids=best.indices.tolist(), top_logps=best.values.tolist(), logps=own))
        return found


def served(folder, tokenizer, **settings):
    server = settings.pop("server", None) or FakeServer(build_model(len(tokenizer), seed=1))
    own = {"teacher": None, "teacher_server": server, "data": prompts(4), "max_steps": 1}
    return make(folder, tokenizer, **(own | settings))


@pytest.mark.parametrize(("beta", "k"), [(0.0, 8), (1.0, 1), (0.4, 1)])
def test_a_server_is_the_sparse_loss_of_a_model_here(beta, k, tmp_path, tiny_tokenizer):
    remote = served(tmp_path / "a", tiny_tokenizer, beta=beta, loss_top_k=k, teacher_model_server_url="http://teacher")
    local = make(tmp_path / "b", tiny_tokenizer, beta=beta, loss_top_k=k, data=prompts(4), max_steps=1)
    remote.train(), local.train()
    assert losses(remote)[0] == pytest.approx(losses(local)[0], abs=1e-5) and losses(remote)[0] > 0


@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize(("beta", "k"), [(0.0, 8), (0.4, 1)])
def test_completions_that_are_left_out_need_no_scores(beta, k, ended, tmp_path, tiny_tokenizer):
    engine = pt.ScriptedEngine(lambda ids, index: [5, 6, 2] if index < ended else [5] * 8)
    settings = {
        "beta": beta,
        "loss_top_k": k,
        "mask_truncated_completions": True,
        "num_generations": 2,
        "data": prompts(4),
    }
    settings |= {"rollout_engine": engine, "max_steps": 1}
    remote = served(tmp_path / "a", tiny_tokenizer, teacher_model_server_url="http://teacher", **settings)
    local = make(tmp_path / "b", tiny_tokenizer, **settings)
    remote.train(), local.train()
    assert losses(remote)[0] == pytest.approx(losses(local)[0], abs=1e-5) and (losses(remote)[0] > 0) == bool(ended)


def test_servers_that_cannot_give_what_the_loss_needs_are_refused_at_the_start(tmp_path, tiny_tokenizer):
    model, url = build_model(len(tiny_tokenizer), seed=1), {"teacher_model_server_url": "http://teacher"}
    with pytest.raises(ConfigError, match="up to 20"):
        served(tmp_path, tiny_tokenizer, beta=0.0, loss_top_k=50, **url)
    # -1 is vLLM's word for no limit, with which `posttrain vllm-serve` starts it.
    boundless = FakeServer(model, top_k=-1)
    boundless.facts["vocab_size"] = len(tiny_tokenizer)
    served(tmp_path, tiny_tokenizer, beta=0.0, loss_top_k=50, server=boundless, **url)
    with pytest.raises(ConfigError, match=f"up to {len(tiny_tokenizer)}"):
        served(tmp_path, tiny_tokenizer, beta=0.0, loss_top_k=len(tiny_tokenizer) + 1, server=boundless, **url)
    with pytest.raises(ConfigError, match="temperature"):
        served(tmp_path, tiny_tokenizer, temperature=2.0, **url)
    with pytest.raises(ModelError):
        served(tmp_path, tiny_tokenizer, server=FakeServer(model, broken=True), **url)
    named = url | {"teacher_model_name_or_path": "organisation/qwen"}
    with pytest.raises(ConfigError, match=r"'other'.*'organisation/qwen'"):
        served(tmp_path, tiny_tokenizer, server=FakeServer(model, model_id="other"), **named)
    served(tmp_path, tiny_tokenizer, server=FakeServer(model, model_id="/models/qwen"), **named)


@pytest.mark.parametrize(("beta", "k"), [(0.0, 325), (0.4, 1)])
def test_logits_of_a_server_beyond_the_students_are_mass_outside_of_the_support(beta, k, tmp_path, tiny_tokenizer):
    """A padded model whose padding is likely, which a trained one's is not."""
    size = len(tiny_tokenizer)
    wide = build_model(size + 16, seed=1)
    settings = {"beta": beta, "loss_top_k": k, "teacher_model_server_url": "http://teacher", "learning_rate": 0.0}
    trainer = served(tmp_path, tiny_tokenizer, server=FakeServer(wide, top_k=400), **settings)
    seen, sample = [], trainer.sample
    trainer.sample = lambda *given: seen.append(sample(*given)) or seen[-1]
    trainer.train()
    student, total, count = build_model(size), 0.0, 0
    for rollout in seen[0].rollouts:
        prompt, answer = rollout.prompt_ids, rollout.token_ids
        x, y = (
            m(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double().softmax(-1)
            for m in (student, wide)
        )
        for q, p, token in zip(x, y, answer, strict=True):
            ids = p.topk(k).indices.tolist() if beta == 0 else {int(p.argmax()), token}
            ids = [i for i in ids if i < size]
            q, p = (torch.cat([z[ids], (1 - z[ids].sum()).clamp_min(1e-7)[None]]) for z in (q, p))
            m = beta * p + (1 - beta) * q
            kl = (p * (p / m).log()).sum()
            total = total + (kl if beta == 0 else beta * kl + (1 - beta) * (q * (q / m).log()).sum())
        count += len(answer)
    assert losses(trainer)[0] == pytest.approx((total / count).item(), rel=1e-4)


def test_what_a_server_cannot_hold_is_refused_with_both_lengths(tmp_path, tiny_tokenizer):
    server = FakeServer(build_model(len(tiny_tokenizer), seed=1))
    server.facts["max_model_len"] = 12
    with raises(DataError, "11", "max_model_len=12"):
        served(tmp_path, tiny_tokenizer, server=server, loss_top_k=1, teacher_model_server_url="http://t").train()


def test_scores_of_completions_that_wait_are_in_the_checkpoint(tmp_path, tiny_tokenizer):
    settings = {"teacher_model_server_url": "http://teacher", "loss_top_k": 1, "steps_per_generation": 2}
    settings |= {"per_device_train_batch_size": 2}
    trainer = served(tmp_path, tiny_tokenizer, **settings)
    trainer.train()
    state = trainer.state_to_save()
    other = served(tmp_path / "b", tiny_tokenizer, **settings)
    other.load_saved_state(__import__("json").loads(__import__("json").dumps(state)))
    assert other.kept["train"].keys() == trainer.kept["train"].keys()
    key = next(iter(other.kept["train"]))
    assert other.kept["train"][key] == trainer.kept["train"][key]
    trainer.window.take()  # The second half: nothing waits.
    assert trainer.state_to_save()["kept"] == {} and trainer.state_to_save()["online"]["buffer"] is None


def test_streams_and_splits_are_scored_by_the_number_of_their_row(tmp_path, tiny_tokenizer):
    path = scored(tmp_path / "s.arrow", tiny_tokenizer, data=datasets.concatenate_datasets([answers()] * 20), top_k=3)
    file = ScoreFile(path)
    assert file.read(0).actual.tolist() == file.read(72).actual.tolist() and file.facts["top_k"] == 3
    assert (
        pt.GKDConfig(str(tmp_path), bf16=False, use_cpu=True, lmbda=0.0, teacher_scores=path).axes().support
        == "teacher_topk"
    )


def test_a_served_teacher_is_the_sparse_loss_of_a_model_here(tmp_path, tiny_tokenizer):
    size = len(tiny_tokenizer)
    engine = ServedEngine(NativeEngine(build_model(size, seed=1), pad_token_id=0))
    with serving(lambda: engine, context=256) as server:
        remote = make(
            tmp_path / "a", tiny_tokenizer, teacher=None, beta=0.0, loss_top_k=8, data=prompts(4), max_steps=1,
            teacher_model_server_url=server.url,
        )  # fmt: skip
        remote.train()
    local = make(tmp_path / "b", tiny_tokenizer, beta=0.0, loss_top_k=8, data=prompts(4), max_steps=1)
    local.train()
    assert losses(remote)[0] == pytest.approx(losses(local)[0], abs=1e-5) and losses(remote)[0] > 0


@pytest.fixture
def other_teacher(tmp_path):
    """A model loaded from a folder whose tokenizer gives the ids of the student's other meanings."""
    other = byte_level(size=320)
    build_model(len(other), seed=1).save_pretrained(tmp_path / "teacher")
    other.save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


def test_a_teachers_ids_are_compared_however_it_is_given(other_teacher, tmp_path, tiny_tokenizer, caplog):
    """By id, as an object, as a peft model, behind a server, and where its scores are written to a file."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(other_teacher)
    adapted = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(other_teacher), peft.LoraConfig(target_modules=["q_proj"])
    )
    for given in (other_teacher, loaded, adapted):
        with raises(ConfigError, "teacher and student disagree"):
            make(tmp_path / "a", tiny_tokenizer, teacher=given)
    url = {"teacher_model_server_url": "http://teacher", "loss_top_k": 1}
    server = FakeServer(loaded, model_id=other_teacher)
    with raises(ConfigError, "teacher and student disagree"):
        served(tmp_path / "b", tiny_tokenizer, server=server, **url)
    with raises(ConfigError, "teacher and student disagree"):
        score_dataset(loaded, answers(), tiny_tokenizer, tmp_path / "scores.arrow")
    assert not (tmp_path / "scores.arrow").exists()
    # What is known to fit may be said.
    make(tmp_path / "c", tiny_tokenizer, teacher=loaded, teacher_processing_class=tiny_tokenizer)
    served(tmp_path / "d", tiny_tokenizer, server=server, teacher_processing_class=tiny_tokenizer, **url)
    make(tmp_path / "e", tiny_tokenizer, teacher=loaded, tokenizer_check="off")
    score_dataset(loaded, answers(), tiny_tokenizer, tmp_path / "scores.arrow", tokenizer_check="off")
    assert "tokenizer is unknown" not in caplog.text
    make(tmp_path / "f", tiny_tokenizer)
    assert "the teacher's tokenizer was not found" in caplog.text


def test_gold_finds_the_tokenizer_of_a_teacher_object(other_teacher, tmp_path, tiny_tokenizer):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(other_teacher)
    options = {"cls": pt.GOLDTrainer, "config": pt.GOLDConfig, "use_uld_loss": True, "lmbda": 0.0, "max_steps": 1}
    trainer = make(tmp_path / "a", tiny_tokenizer, teacher=loaded, **options)
    trainer.train()
    assert len(trainer.teacher_tokenizer) == 320 and losses(trainer)[0] > 0


def test_what_has_no_answers_to_score_is_refused(tmp_path, tiny_tokenizer):
    model, path = build_model(len(tiny_tokenizer), seed=1), tmp_path / "scores.arrow"
    for data, said in (
        (datasets.Dataset.from_list([{"prompt": "a"}]), "prompt"),
        (answers().to_iterable_dataset(), "IterableDataset"),
        (datasets.Dataset.from_list([]), "scored"),
    ):
        with raises(DataError, said):
            score_dataset(model, data, tiny_tokenizer, path)
    assert not path.exists()


def test_a_teacher_that_scored_is_as_it_was(tmp_path, tiny_tokenizer):
    model = build_model(len(tiny_tokenizer), seed=1).train()
    score_dataset(model, answers(), tiny_tokenizer, tmp_path / "scores.arrow")
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
