"""Scripts and manifests under examples/serving: they parse, and every option in them exists."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from posttrain.cli.parser import PosttrainArgumentParser
from posttrain.extensions.serve.config import ServeConfig
from posttrain.extensions.vllm.engine import vllm_command

FOLDER = Path(__file__).parents[3] / "examples" / "serving"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))


def documents():
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text()) if one]


def understood(words):
    """The options of one `posttrain` command; shell variables stand for values."""
    from posttrain.cli import train

    name, *rest = words
    rest = [re.sub(r"^\$\w+$|^\$\(\w+\)$|^\$\(\(.*\)\)$", "1", word) for word in rest]
    if name == "vllm-serve":
        return vllm_command(rest, cpu=False)
    if name == "serve":
        return PosttrainArgumentParser(ServeConfig).parse_args_and_config(rest)
    at = rest.index("--config")
    rest = rest[:at] + rest[at + 2 :]
    *_, unknown = train.parser_for(name).parse_args_and_config(rest, return_remaining_strings=True)
    train._launch_flags(unknown, name)  # Others than accelerate's are refused.
    return None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_their_options_exist(path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_API_KEY", "as the scripts make one")
    if shutil.which("bash"):
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    text = path.read_text().replace("\\\n", " ")
    text = re.sub(r'"http://[^"]*"', "http://127.0.0.1:8000", text)
    lines = re.findall(r"(?:posttrain|posttrain\.cli\.main) (vllm-serve [^&\n]*|(?:serve|grpo) [^&'\n]*)", text)
    assert len(lines) == 2
    for line in lines:
        understood(shlex.split(line))


def test_manifests_hold_a_server_that_is_probed_and_guarded_and_a_trainer_that_is_tried_again(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_API_KEY", "as the Secret holds one")
    found = {one["kind"]: one for one in documents()}
    assert set(found) == {"Deployment", "Service", "NetworkPolicy", "Secret", "Job", "PersistentVolumeClaim"}
    server = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = server["containers"]
    assert container["command"] == ["posttrain", "vllm-serve"]
    words = vllm_command(container["args"], cpu=False)
    assert words[words.index("--host") + 1] == "0.0.0.0" and "--middleware" in words
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert "httpGet" not in container["livenessProbe"]
    assert any(e["name"] == "POSTTRAIN_API_KEY" for e in container["env"])
    (trainer,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    assert trainer["command"][-1] == "grpo"
    understood(["grpo", *trainer["args"]])
    assert (
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
        == found["Deployment"]["spec"]["selector"]["matchLabels"]
    )
