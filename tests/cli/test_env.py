"""`posttrain env`: versions, machine, ports and the verdict about them, ready to paste."""

import re
import socket
import subprocess

from posttrain.checks import machine as versions
from posttrain.cli import check as env


def test_the_block_is_one_key_a_line_with_commit_ports_and_verdict():
    text = env.report()
    rows = dict(re.findall(r"^- ([^:]+): ?(.*)$", text, re.M))
    assert re.fullmatch(r"\d+\.\d+\.\d+( \([0-9a-f]{7}\))?", rows["posttrain version"])
    assert rows["vllm version"] == "not installed" or re.match(r"\d", rows["vllm version"])
    assert re.fullmatch(r"8000 \(rollout server\) (free|in use), 51216 \(weight updates\) (free|in use)", rows["Ports"])
    assert rows["Compatibility"] == "all installed packages fit" or rows["Compatibility"] == ""
    assert rows["Free disk here"].endswith("GiB")


def test_a_taken_port_and_a_package_that_does_not_fit_are_named(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(env, "PORTS", {port: "rollout server"})
        assert env._ports() == f"{port} (rollout server) in use"
    assert env._ports() == f"{port} (rollout server) free"
    monkeypatch.setattr(versions, "installed_version", lambda name: "0.33.0" if name == "vllm" else None)
    assert "\n  - PT-V003 (warning): use_vllm=True was tested with vllm>=0.27.0,<=0.32.0" in env._compatibility()


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(env, "__file__", str(tmp_path / "a" / "b" / "env.py"))
    assert env._commit() == ""
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert re.fullmatch(r" \([0-9a-f]{7}\)", env._commit())
