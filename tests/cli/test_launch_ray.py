"""`--launcher ray` without a cluster: how a command is taken apart, what is refused, how what runs is followed."""

import dataclasses
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

from posttrain.cli import launch_ray, train
from posttrain.cli.launch_ray import Plan
from posttrain.errors import ConfigError, MissingDependencyError, RolloutServerError
from posttrain.integrations.ray import CONFIG_FILE, Need, RayCluster, State

MODEL = ["--model_name_or_path", "m"]


def plan(*tokens, name="grpo"):
    return Plan.of(name, ["--launcher", "ray", *tokens])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "grpo.yaml"
    wanted = {"launcher": "ray", "rollout_servers": 3, "rollout_server_args": "--engine hf --max_model_len 64"}
    path.write_text(yaml.safe_dump(wanted | {"model_name_or_path": "m", "max_steps": 2, "use_peft": False}))
    return str(path)


class Scripted:
    """A command that says what it was told to say."""

    url = "http://10.0.0.2:8000"

    def __init__(self, name, *states, healthy=True):
        self.need, self.states, self.answer, self.stopped = Need(name), list(states), healthy, []

    def __str__(self):
        return f"the {self.need.name} on 10.0.0.2"

    def poll(self, wait=0.0):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def healthy(self):
        return self.answer

    def stop(self, number=signal.SIGTERM):
        self.stopped.append(number)


def test_the_launcher_is_found_on_the_command_line_and_in_the_config_file(tmp_path, file):
    assert launch_ray.is_wanted(["--launcher", "ray"]) and launch_ray.is_wanted(["--launcher=ray"])
    assert launch_ray.is_wanted(["--config", file])
    other = tmp_path / "other.yaml"
    other.write_text("max_steps: 1\n")
    assert not launch_ray.is_wanted(["--config", str(other), "--dataset_name", "launcher"])


def test_the_trainer_gets_all_options_but_those_of_the_launcher(file):
    made = plan("--config", file, "--rollout_servers", "2", "--learning_rate", "1e-5", "--num_processes", "4")
    assert made.options.rollout_servers == 2  # The command line wins over the file.
    assert made.config == {"model_name_or_path": "m", "max_steps": 2, "use_peft": False}
    urls = ["http://a:1", "http://b:2"]
    own = ["--learning_rate", "1e-5", "--num_processes", "4"]
    assert made.trainer_arguments(urls) == [
        "grpo", "--config", CONFIG_FILE, *own,
        "--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", "http://a:1,http://b:2",
    ]  # fmt: skip
    assert plan(*MODEL, name="async-grpo").trainer_arguments(urls) == [
        "async-grpo", *MODEL, "--worker_engine", "server", "--vllm_server_base_url", *urls,
    ]  # fmt: skip
    assert plan("--rollout_servers", "0", name="sft").trainer_arguments([]) == ["sft"]


def test_servers_serve_the_trainers_model(file):
    made = plan("--config", file, "--model-name-or-path=n", "--model_revision", "abc")
    words = made.serve_arguments("10.0.0.2", 8123)
    assert words == [
        "--model", "n", "--host", "10.0.0.2", "--port", "8123", "--revision", "abc", "--engine", "hf", "--max_model_len", "64",
    ]  # fmt: skip


def test_where_vllm_is_installed_its_own_server_serves(monkeypatch):
    monkeypatch.setattr("posttrain.cli.launch_ray.is_available", lambda name: True)
    args = ["--rollout_server_args", "--tensor-parallel-size 4"]
    made = plan(*MODEL, *args, "--rollout_servers", "1", "--trust_remote_code", "true")
    assert made.serving == "vllm-serve"
    assert made.serve_arguments("h", 1)[-3:] == ["--trust_remote_code", "--tensor-parallel-size", "4"]
    assert made.needs(with_gpus=True)[1].gpus == 4
    with pytest.raises(ConfigError, match="logprobs-mode"):
        plan(*MODEL, "--rollout_servers", "1", "--rollout_server_args", "--logprobs-mode raw_logprobs")


def test_needs_are_one_trainer_and_its_servers_with_gpus_only_where_there_are_some():
    made = plan(*MODEL, "--rollout_servers", "2", "--num_processes", "6")
    assert [(n.name, n.cpus, n.gpus) for n in made.needs(with_gpus=True)] == [
        ("trainer", 1, 6), ("rollout server 1", 1, 1), ("rollout server 2", 1, 1),
    ]  # fmt: skip
    assert {n.gpus for n in made.needs(with_gpus=False)} == {0}
    assert [n.gpus for n in plan(*MODEL, "--trainer_gpus", "2", "--rollout_server_gpus", "0.5").needs(False)] == [
        2,
        0.5,
    ]


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("sft", MODEL, "posttrain sft does not generate with rollout servers"),
        ("xpo", MODEL, "--rollout_servers 0"),
        ("grpo", [], "--model_name_or_path is missing"),
        ("grpo", [*MODEL, "--vllm_server_base_url", "http://x:1"], "both say where rollouts come from"),
        ("grpo", [*MODEL, "--rollout_servers", "-1"], "rollout_servers=-1 must be 0 or more"),
        ("grpo", [*MODEL, "--ray_timeout", "0"], "ray_timeout=0.0 must be above 0"),
        ("grpo", [*MODEL, "--rollout_server_args", "--max_num_seqs 0"], "max_num_seqs=0 must be above 0"),
        ("grpo", [*MODEL, "--rollout_server_args", "--engin hf"], "did you mean 'engine'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_placed(name, tokens, message):
    with pytest.raises(ConfigError, match=message):
        plan(*tokens, name=name)


def test_the_commands_with_servers_are_those_whose_trainers_ask_servers():
    from posttrain.training.online_config import OnlineConfig

    configs = {name: train._load(command.config) for name, command in train.COMMANDS.items()}
    asking = {
        n for n, c in configs.items() if issubclass(c, OnlineConfig) and not getattr(c, "in_process_because", None)
    }
    assert asking == set(launch_ray.SERVED)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "posttrain\[ray\]"'):
        launch_ray.run("grpo", ["--launcher", "ray", *MODEL])


def test_without_a_cluster_the_error_names_the_address_and_how_to_start_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", sys)  # Never reached.
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"ray_address='127.0.0.1:9'.*ray start --head"):
        RayCluster("127.0.0.1:9")
    assert time.monotonic() - started < 10
    with pytest.raises(ConfigError, match="Ray's client"):
        RayCluster("ray://127.0.0.1:10001")


def test_a_run_shows_what_the_trainer_says_and_ends_with_its_code(capsys):
    trainer = Scripted("trainer", State(said=[(1, "step 1\n"), (2, "40 %\r")]), State(said=[(1, "done\n")]), State(3))
    assert launch_ray._follow(trainer, []) == 3
    out, err = capsys.readouterr()
    assert out == "step 1\ndone\n"
    assert err.startswith("40 %\r") and "the trainer on 10.0.0.2 ended with code 3" in err


def test_a_server_that_ends_is_told_with_its_last_lines_and_the_trainer_goes_on(capsys):
    trainer = Scripted("trainer", State(), State(), State(0))
    dead = Scripted("rollout server 1", State(1, tail="out of memory"))
    assert launch_ray._follow(trainer, [dead]) == 0
    err = capsys.readouterr().err
    assert err.count("the rollout server 1 on 10.0.0.2 ended with code 1") == 1 and "out of memory" in err


def test_a_trainer_whose_machine_is_lost_may_be_started_again(capsys):
    assert launch_ray._follow(Scripted("trainer", State(lost="the node died")), []) == 75
    assert "was lost: the node died" in capsys.readouterr().err


def test_a_server_that_does_not_start_ends_the_run_with_its_code_and_last_lines():
    servers = [Scripted("rollout server 1", State()), Scripted("rollout server 2", State(4, tail="no such model"))]
    with pytest.raises(
        RolloutServerError, match=r"(?s)rollout server 2 on 10.0.0.2 ended with code 4.*no such model"
    ) as error:
        launch_ray._wait_healthy(servers, 5)
    assert error.value.exit_code == 4


def test_a_server_that_is_never_healthy_ends_the_run_after_the_time_that_was_given():
    slow = Scripted("rollout server 1", State(tail="loading"), healthy=False)
    with pytest.raises(RolloutServerError, match=r"(?s)not healthy after 0.1 s.*loading") as error:
        launch_ray._wait_healthy([slow], 0.1)
    assert error.value.exit_code == 75


def test_the_environment_that_goes_along_has_a_token_and_no_strangers(monkeypatch):
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.delenv("POSTTRAIN_API_KEY", raising=False)
    made = launch_ray._environment()
    assert made["HF_HOME"] == "/models" and "AWS_SECRET_ACCESS_KEY" not in made
    assert (
        len(made["POSTTRAIN_API_KEY"]) >= 32
        and made["POSTTRAIN_API_KEY"] != launch_ray._environment()["POSTTRAIN_API_KEY"]
    )
    monkeypatch.setenv("POSTTRAIN_API_KEY", "mine")
    assert launch_ray._environment()["POSTTRAIN_API_KEY"] == "mine"


def test_the_table_of_options_is_that_of_the_code():
    from tests.test_docs import default_of, options

    written = options("clusters.md", "option")
    assert written.pop("launcher") == ""
    made = {f.name: f for f in dataclasses.fields(launch_ray.RayArguments) if f.name != "launcher"}
    assert list(written) == list(made)
    for name, field in made.items():
        assert written[name].strip("'") == default_of(field).strip("'"), name


def test_commands_that_only_look_accept_the_launchers_options():
    rest = ["--launcher", "ray", "--rollout_server_args", "--engine hf --port 1", "--num_processes", "2"]
    assert train._launch_flags(rest, "grpo") == ["--num_processes", "2"]


def test_auto_resumes_where_there_is_a_checkpoint_and_begins_anew_where_there_is_none(tmp_path):
    from posttrain.cli.train import resume_from
    from posttrain.report.checkpoints import MARKER

    def meaning(value):
        config = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=value)
        return resume_from(config), config.resume_from_checkpoint

    assert meaning("auto") == (None, None)
    (tmp_path / "checkpoint-4").mkdir()
    assert meaning("auto") == (None, None)  # Its writing was interrupted.
    (tmp_path / "checkpoint-4" / MARKER).write_text('{"run": "x", "time": 1.0, "files": {}}')
    assert meaning("auto") == (True, None)
    assert [meaning(v)[0] for v in ("true", "false", None, "runs/x")] == [True, None, None, "runs/x"]
