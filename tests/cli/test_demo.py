"""`posttrain demo` from end to end, with a tiny model."""

from posttrain.cli.main import main


def test_the_demo_leaves_the_page_of_its_run_and_says_where(tmp_path, tiny_model_dir, capsys):
    folder = tmp_path / "demo"
    assert main(["demo", "--model", str(tiny_model_dir), "--output_dir", str(folder), "--steps", "1"]) == 0
    page = folder / "report.html"
    assert 'data-panel="loss-' in page.read_text(encoding="utf-8")
    assert str(page) in capsys.readouterr().out.splitlines()
