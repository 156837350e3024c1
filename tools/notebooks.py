"""Run the notebooks of examples/notebooks with nbclient, and show them in the site with what they printed.

    python tools/notebooks.py [NAME ...] [--steps 3] [--model FOLDER] [--docs]

Without ``--model`` a tiny model is made, which CI runs: the notebooks work, and learn nothing. ``--docs`` writes docs/notebooks/NAME.md;
what is there was run with SmolLM2-135M-Instruct.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from nbclient.util import run_sync

ROOT = Path(__file__).parents[1]
SHOWN = ("sft_lora", "dpo", "grpo_reward", "agent")


def tiny(folder):
    """The tests' two-layer model with its tokenizer."""
    sys.path.insert(0, str(ROOT))
    from tests.conftest import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def text_of(output):
    """An output of a cell in Markdown; what went to stderr is left out."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{"".join(data["text/html"])}\n</div>'
    return f"```text\n{''.join(data.get('text/plain', ''))}\n```"


def markdown(book, name):
    parts = []
    for cell in book.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [text for output in cell.outputs if (text := text_of(output))]
    source = f"https://github.com/posttrain/posttrain/blob/main/examples/notebooks/{name}.ipynb"
    parts.insert(1, f"*Run by `tools/notebooks.py` with SmolLM2-135M-Instruct; [the notebook]({source}).*")
    return "\n\n".join(parts) + "\n"


def run(client, name, folder):
    """A notebook with what it printed, run in a folder of its own; all in one kernel, whose imports are made once."""
    here = Path(folder, name)
    here.mkdir()
    book = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    book.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {here}"))
    client.nb = book
    client.execute(cleanup_kc=False)
    del book.cells[0]
    return book


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=SHOWN)
    parser.add_argument("--steps", default="3")
    parser.add_argument("--model")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or tiny(f"{folder}/model")
        os.environ |= {"POSTTRAIN_STEPS": args.steps, "POSTTRAIN_MODEL": model}
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=1800)
        for name in args.names or SHOWN:
            book = run(client, name, folder)
            if args.docs:
                text = markdown(book, name).replace(f"{Path(sys.executable).parent}/", "")  # Of this machine.
                text = text.replace(model, "HuggingFaceTB/SmolLM2-135M-Instruct").replace(f"{folder}/{name}/", "")
                (ROOT / "docs" / "notebooks" / f"{name}.md").write_text(text, encoding="utf-8")
            sys.stdout.write(f"{name}: {sum(cell.cell_type == 'code' for cell in book.cells)} cells ran\n")
        run_sync(client.km.shutdown_kernel)(now=True)


if __name__ == "__main__":
    main()
