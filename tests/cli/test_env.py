"""`posttrain env`: versions, machine, ports and the verdict about them, ready to paste."""

import re
import socket

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
    monkeypatch.setattr(versions, "installed_version", lambda name: "0.26.0" if name == "vllm" else None)
    assert "\n  - PT-V003 (warning): use_vllm=True was tested with vllm>=0.17.0,<=0.25.1" in env._compatibility()


def test_the_commit_is_read_from_the_checkout_loose_or_packed(tmp_path, monkeypatch):
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    monkeypatch.setattr(env, "__file__", str(tmp_path / "a" / "b" / "env.py"))
    assert env._commit() == ""
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack\n" + "c" * 40 + " refs/heads/main\n")
    assert env._commit() == " (ccccccc)"
    (git / "refs" / "heads" / "main").write_text("d" * 40 + "\n")
    assert env._commit() == " (ddddddd)"
    (git / "HEAD").write_text("e" * 40)
    assert env._commit() == " (eeeeeee)"
