"""`tools/dump.py` records everything of a run, and finds one changed bit."""

import json

from tests import forks
from tools.dump import compare


def test_a_dump_holds_every_kind_of_event_and_a_changed_bit_is_named(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    forks.run(["tools/dump.py", one, "--only", "sft_accumulated"], check=True)
    events = [json.loads(line) for line in (one / "sft_accumulated.jsonl").read_text().splitlines()]
    assert {event["what"] for event in events} == {"rows", "pass", "loss", "gradient", "log", "weights"}
    assert [event["step"] for event in events if event["what"] == "log"][:8] == list(range(1, 9))
    assert compare(one, one) == 0
    changed = next(event for event in events if event["what"] == "pass" and event["step"] == 4)
    changed["outputs"]["logp"][0][-1] += 1e-9
    two.mkdir()
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    (two / "sft_accumulated.jsonl").write_text("\n".join(lines) + "\n")
    assert compare(one, two, without=["pass"]) == 0
    capsys.readouterr()
    assert compare(one, two) == 1
    found = capsys.readouterr().out
    place = f"outputs.logp[0][{len(changed['outputs']['logp'][0]) - 1}]: "
    assert found.startswith("sft_accumulated: step 4, pass (line ") and place in found
