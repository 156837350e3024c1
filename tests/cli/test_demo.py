"""`posttrain demo` from end to end, with a tiny model."""

from types import SimpleNamespace

from posttrain.cli.demo import Forecast
from posttrain.cli.main import main


def test_after_its_second_step_the_demo_says_how_long_the_rest_will_take(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 40.0])  # The first step reads it once.
    monkeypatch.setattr("posttrain.cli.demo.time.perf_counter", lambda: next(clock))
    forecast, state = Forecast(), SimpleNamespace(max_steps=20)
    for state.global_step in (1, 2):
        forecast.on_step_begin(None, state, None)
        forecast.on_step_end(None, state, None)
    assert capsys.readouterr().out == "The other 18 steps will take about 9 min on this machine.\n"


def test_the_demo_leaves_the_page_of_its_run_and_says_where(tmp_path, tiny_model_dir, capsys):
    folder = tmp_path / "demo"
    assert main(["demo", "--model", str(tiny_model_dir), "--output_dir", str(folder), "--steps", "1"]) == 0
    page = folder / "report.html"
    assert 'data-panel="loss-' in page.read_text(encoding="utf-8")
    assert str(page) in capsys.readouterr().out.splitlines()
