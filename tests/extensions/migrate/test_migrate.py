"""Scripts, notebooks and YAML files are rewritten by the table of names; what has no equivalent is listed with its line."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from posttrain.errors import DataError, MissingDependencyError
from posttrain.extensions.migrate.commands import migrate
from posttrain.extensions.migrate.files import hide_magics, migrate_file
from posttrain.extensions.migrate.scripts import migrate_script

ROOT = Path(__file__).parents[3]


def rewritten(text):
    after, notes = migrate_script(text, "script.py")
    assert migrate_script(after, "script.py")[0] == after  # A second time changes nothing.
    return after, [f"{note.line}: {note.text}" for note in notes if not note.check]


def checks(text):
    return [f"{note.line}: {note.text}" for note in migrate_script(text, "script.py")[1] if note.check]


SFT = """\
# Keep me.
from transformers import AutoTokenizer, TrainingArguments
from trl import SFTTrainer, DataCollatorForCompletionOnlyLM, set_seed  # and me

args = TrainingArguments(
    output_dir="out",
    evaluation_strategy="steps",  # often
    warmup_ratio=0.1,
    # no tracker
    report_to="none",  # none
)
trainer = SFTTrainer(
    "model",
    args=args,
    tokenizer = tokenizer,  # the tokenizer
    max_seq_length=2048,
    packing=False,
)
"""
SFT_NOW = """\
# Keep me.
from transformers import AutoTokenizer
from posttrain import SFTTrainer, DataCollatorForCompletionOnlyLM, SFTConfig  # and me
from transformers import set_seed  # and me

args = SFTConfig(
    output_dir="out",
    eval_strategy="steps",  # often
    warmup_steps=0.1,
    # no tracker
    report_to="none",  # none
    max_length=2048,
    packing=False,
    learning_rate=5e-05,
    bf16=False,
    logging_steps=500,
)
trainer = SFTTrainer(
    "model",
    args=args,
    processing_class = tokenizer,  # the tokenizer
)
"""


def test_keywords_of_a_trainer_move_into_its_config_and_comments_stay():
    assert rewritten(SFT) == (SFT_NOW, [])


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("from trl import PPOv2Config\nPPOv2Config(exp_name='n')", "from posttrain import PPOConfig\nPPOConfig(run_name='n')"),
        ("from trl import PPOv2Config as C\nC(exp_name='n')", "from posttrain import PPOConfig as C\nC(run_name='n')"),
        ("from trl.trainer.sft_trainer import SFTTrainer", "from posttrain import SFTTrainer"),
        ("from trl.trainer.reward_trainer import DataCollatorForPreference", "from posttrain.trainer.reward_trainer import DataCollatorForPreference"),
        ("from trl import *", "from posttrain import *"),
        ("import trl\ntrl.SFTConfig(use_liger=True)", "import posttrain\nposttrain.SFTConfig(use_liger_kernel=True)"),
        ("import trl as t\nt.SFTConfig(use_liger=True)", "import posttrain as t\nt.SFTConfig(use_liger_kernel=True)"),
        ("from trl import is_xpu_available", "from transformers.utils import is_torch_xpu_available as is_xpu_available"),
        ("from posttrain import SFTConfig\nSFTConfig(max_seq_length=n)", "from posttrain import SFTConfig\nSFTConfig(max_length=n)"),
        ("from trl import SFTConfig\nSFTConfig('o', max_seq_length=None, no_cuda=True)", "from posttrain import SFTConfig\nSFTConfig('o', use_cpu=True)"),
        ("from trl import SFTConfig\nSFTConfig('o', use_mps_device=True)", "from posttrain import SFTConfig\nSFTConfig('o')"),
        ("from trl import SFTConfig\nSFTConfig(group_by_length=True)", "from posttrain import SFTConfig\nSFTConfig(train_sampling_strategy='group_by_length')"),
        ("from trl import SFTConfig\nSFTConfig(warmup_ratio=.1, warmup_steps=0)", "from posttrain import SFTConfig\nSFTConfig(warmup_steps=.1)"),
        ("from trl import SFTConfig\nSFTConfig(torch_dtype='auto')", "from posttrain import SFTConfig\nSFTConfig(model_init_kwargs={\"dtype\": 'auto'})"),
        ("from trl import SFTConfig\nSFTConfig(torch_dtype=d, model_init_kwargs={'a': 1})", "from posttrain import SFTConfig\nSFTConfig(model_init_kwargs={'a': 1, \"dtype\": d})"),
        ("from trl import DPOConfig\nDPOConfig(rpo_alpha=a)", 'from posttrain import DPOConfig\nDPOConfig(loss_type=["sigmoid", "sft"], loss_weights=[1.0, a])'),
        ("from trl import DPOConfig\nDPOConfig(loss_type='ipo', rpo_alpha=2)", 'from posttrain import DPOConfig\nDPOConfig(loss_type=["ipo", "sft"], loss_weights=[1.0, 2])'),
        ("from trl import DPOConfig\nDPOConfig(generate_during_eval=False, beta=.1)", "from posttrain import DPOConfig\nDPOConfig(beta=.1)"),
        ("from trl import SFTTrainer\nSFTTrainer('m', packing=True, max_seq_length=9)", "from posttrain import SFTTrainer, SFTConfig\nSFTTrainer('m', args=SFTConfig(packing=True, max_length=9, packing_strategy=\"wrapped\"))"),
        ("from trl import SFTTrainer, SFTConfig\na = SFTConfig('o', dataset_text_field='a')\nSFTTrainer('m', a, dataset_text_field='b')", "from posttrain import SFTTrainer, SFTConfig\na = SFTConfig('o', dataset_text_field='b')\nSFTTrainer('m', a)"),
        ("from trl import SFTConfig\nSFTConfig('o', packing=p, max_seq_length=9)", "from posttrain import SFTConfig\nSFTConfig('o', packing=p, max_length=9, packing_strategy=\"wrapped\")"),
        ("from trl import SFTConfig\nSFTConfig('o', packing=True, packing_strategy='bfd', max_seq_length=9)", "from posttrain import SFTConfig\nSFTConfig('o', packing=True, packing_strategy='bfd', max_length=9)"),
        ("from trl import GRPOConfig\nGRPOConfig('o', vllm_device='cuda:1')", "from posttrain import GRPOConfig\nGRPOConfig('o')"),
        ("from trl import DPOTrainer\nfrom trl.trainer.utils import (\n  pad,\n  DPODataCollatorWithPadding,\n)\nDPOTrainer('m', data_collator=DPODataCollatorWithPadding())",
         "from posttrain import DPOTrainer\nfrom posttrain import (\n  pad,\n)\nDPOTrainer('m')"),
        ("from trl import DPOTrainer\nfrom trl.trainer.utils import DPODataCollatorWithPadding\nDPOTrainer('m', data_collator=DPODataCollatorWithPadding())", "from posttrain import DPOTrainer\nDPOTrainer('m')"),
        ("from trl import DPOTrainer, DPOConfig\nDPOTrainer('m', None, DPOConfig('o'), beta=.1)", "from posttrain import DPOTrainer, DPOConfig\nDPOTrainer('m', None, DPOConfig('o', beta=.1))"),
        ("from trl import SFTTrainer\nclass Mine(SFTTrainer): pass\nMine('m', tokenizer=t)", "from posttrain import SFTTrainer\nclass Mine(SFTTrainer): pass\nMine('m', processing_class=t)"),
        ("from trl import SFTTrainer\nt = SFTTrainer('m')\nt.tokenizer.save()", "from posttrain import SFTTrainer\nt = SFTTrainer('m')\nt.processing_class.save()"),
        ("from trl import ModelConfig, TrlParser\np = TrlParser((A, ModelConfig))\na, m = p.parse_args_and_config()\nm.torch_dtype",
         "from posttrain import ModelConfig, TrlParser\np = TrlParser((A, ModelConfig))\na, m = p.parse_args_and_config()\nm.dtype"),
        ("from transformers import HfArgumentParser, set_seed\nfrom trl import KTOConfig\np = HfArgumentParser((A, KTOConfig))\na, k = p.parse_args_into_dataclasses()\nk.no_cuda",
         "from transformers import set_seed\nfrom posttrain import KTOConfig, TrlParser\np = TrlParser((A, KTOConfig))\na, k = p.parse_args_and_config()\nk.use_cpu"),
        ("from trl import SFTConfig\nSFTConfig('o', dataset_kwargs={'append_concat_token': True, 'skip_prepare_dataset': True})",
         "from posttrain import SFTConfig\nSFTConfig('o', dataset_kwargs={'skip_prepare_dataset': True})"),
        ("import trl\nAutoModel.from_pretrained('m', torch_dtype=torch.bfloat16)", "import posttrain\nAutoModel.from_pretrained('m', dtype=torch.bfloat16)"),
        ('from trl import SFTConfig\nSFTConfig(packing_strategy="ffd")', 'from posttrain import SFTConfig\nSFTConfig(packing_strategy="bfd")'),
        ("from trl import ORPOConfig\nORPOConfig('o', max_completion_length=64)", "from posttrain import ORPOConfig\nORPOConfig('o')"),
        ("from trl import KTOConfig\nKTOConfig('o', max_completion_length=64, optim='adamw_hf')", "from posttrain import KTOConfig\nKTOConfig('o', optim='adamw_torch')"),
    ],
)  # fmt: skip
def test_one_spelling_becomes_the_present_one(old, now):
    assert rewritten(old) == (now, [])


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("from trl import BestOfNSampler", "1: BestOfNSampler does not exist in posttrain. Use posttrain.complete("),
        ("import trl\ntrl.TextEnvironment()", "2: TextEnvironment does not exist in posttrain. Use tools"),
        ("from trl import DPOConfig\nDPOConfig(\n  'o',\n  generate_during_eval=True,\n)", "4: generate_during_eval: use LogCompletions"),
        ("from trl import SFTConfig\nSFTConfig(max_length=4, max_seq_length=3)", "2: max_seq_length=3 and max_length=4 are both set."),
        ("from trl import SFTConfig\nSFTConfig(group_by_length=x)", "2: group_by_length: train_sampling_strategy="),
        ("from trl import SFTConfig\nSFTConfig(lerning_rate=1)", "2: SFTConfig has no argument lerning_rate."),
        ("from trl import SFTConfig\nSFTConfig(dataset_kwargs={'add_special_tokens': False})", "2: add_special_tokens: removed. Rows of messages"),
        ("from trl import SFTConfig\nSFTConfig(**options)", "2: SFTConfig(**options): names in the mapping were not checked."),
        ("from trl import SFTConfig\nk = dict(seed=1, no_cuda=True)\nSFTConfig(**k)", "3: no_cuda: use_cpu"),
        ("from trl import DPOTrainer\nDPOTrainer('m', generate_during_eval=True)", "2: generate_during_eval: use LogCompletions"),
        ("from trl import SFTTrainer\nSFTTrainer('m', args=make(), packing=True)", "2: packing: options of SFTConfig."),
        ("from trl import SFTTrainer, SFTConfig\na = SFTConfig('o')\nn = 9\nSFTTrainer('m', a, max_seq_length=n)", "4: n: assigned after SFTConfig(...)"),
        ("from trl import GRPOTrainer\nclass A(GRPOTrainer):\n  def _generate(self): pass", "3: A overrides _generate, which is never called."),
        ("from trl import DPOConfig\nDPOConfig(loss_type='kto_pair')", "2: loss_type='kto_pair': train with KTOTrainer"),
        ("from trl import GRPOConfig\nGRPOConfig('o', use_vllm=True, vllm_device='cuda:1')", "2: vllm_device: delete it if use_vllm is False."),
        ("from trl import DPODataCollatorWithPadding\nc = DPODataCollatorWithPadding()", "1: DPODataCollatorWithPadding does not exist in posttrain. Leave it out: posttrain.DPOTrainer builds"),
        ("from trl import DPOTrainer\nimport transformers\nclass C(transformers.TrainingArguments):\n  beta: float = 1\nclass P(HfArgumentParser): pass\np = P((A, C))\nDPOTrainer(m)",
         "6: C: transformers refuses options of older releases on the command line and in files (warmup_ratio, evaluation_strategy). Derive it from posttrain.DPOConfig, and read it with posttrain.TrlParser. Remove fields that it already has: beta."),
        ("from trl import PPOTrainer\nt = PPOTrainer(c)\nt.step(q, r, s)", "3: PPOTrainer.step does not exist in posttrain. Use train()"),
    ],
)  # fmt: skip
def test_what_needs_a_person_is_listed_with_its_line_and_reason(code, note):
    _, notes = rewritten(code)
    assert len(notes) == 1 and notes[0].startswith(note)


def test_a_field_of_another_dataclass_that_the_config_also_has_is_listed():
    text = "from transformers import HfArgumentParser, TrainingArguments\nfrom trl import SFTTrainer\nclass A:\n  packing: bool = True\np = HfArgumentParser((A, TrainingArguments))\na, t = p.parse_args_into_dataclasses()\nSFTTrainer('m', args=t, packing=a.packing)"
    notes = rewritten(text)[1]
    assert [note.split(":")[0] for note in notes] == ["4", "5", "7"]
    assert notes[0].startswith("4: A.packing: remove it when posttrain.SFTConfig replaces TrainingArguments")
    assert 'Also pass packing_strategy="wrapped"' in notes[2]


def test_what_runs_with_another_result_is_listed():
    assert checks("from trl import GRPOConfig\nGRPOConfig('o', bf16=True, gradient_checkpointing=True, temperature=1, beta=b)") == [
        "2: GRPOConfig: some defaults changed. To keep the older values, set loss_type='bnpo' ('grpo' in 0.14 and 0.15) [TRL 0.14-0.21], "
        "max_completion_length=256 [TRL 0.14-1.9], use_bias_correction_kl=False [TRL 0.14-1.9]."
    ]  # fmt: skip
    assert "temperature" not in checks("from trl import GRPOConfig\nk = {'temperature': 1}\nGRPOConfig(**k)")[0]
    assert not checks("from trl import GRPOConfig\nGRPOConfig(**k)") and not checks(
        "from posttrain import GRPOConfig\nGRPOConfig()"
    )
    parsed = checks(
        "from trl import TrlParser, GRPOConfig\nclass C(GRPOConfig):\n  beta: float = 0.1\nTrlParser((C, D))"
    )
    assert len(parsed) == 1 and parsed[0].startswith("4: GRPOConfig: some defaults") and "beta=" not in parsed[0]
    (packing,) = [
        text for text in checks("from trl import SFTConfig\nSFTConfig(packing=True)") if "defaults" not in text
    ]
    assert packing.startswith("2: packing: TRL up to 0.18 joined rows") and "Set packing_strategy." in packing
    old = "from trl import SFTTrainer\nSFTTrainer('m', args, {}tokenizer=t)"
    assert "appended no EOS token" in checks(old.format("formatting_func=f, "))[0] and not checks(old.format(""))
    assert not checks(old.format("formatting_func=f, ").replace("tokenizer", "processing_class"))
    assert not checks(old.format("formatting_func=f, packing=True, "))


def test_a_script_whose_migration_would_not_compile_is_not_changed(monkeypatch):
    monkeypatch.setattr(
        "posttrain.extensions.migrate.scripts.exchanged", lambda call, *rest: call.with_changes(args=call.args * 2)
    )
    text = "from trl import SFTConfig\nSFTConfig(max_seq_length=1)\n"
    after, notes = migrate_script(text, "script.py")
    assert after == text and "The file was not changed, because the migrated line 2 would be invalid" in notes[0].text


def test_a_script_without_trl_and_names_of_other_packages_stay():
    for text in (
        "SFTConfig(max_seq_length=1)\n",
        "from mine import SFTConfig\nimport trlx\nSFTConfig(max_seq_length=1)\n",
    ):
        assert rewritten(text) == (text, [])


def test_a_script_that_does_not_parse_names_file_and_line(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("from trl import SFTConfig\nSFTConfig(\n")
    (tmp_path / "good.py").write_text("from trl import SFTConfig\n")
    with pytest.raises(DataError, match=r"bad.py:\d: the file is not valid Python"):
        migrate_file(tmp_path / "bad.py")
    assert migrate([str(tmp_path), "--write"]) == 1
    assert (tmp_path / "good.py").read_text() == "from posttrain import SFTConfig\n"
    assert "bad.py" in capsys.readouterr().err
    with pytest.raises(DataError, match="neither a folder nor a file with the extension"):
        migrate([str(tmp_path / "missing.py")])
    (tmp_path / "bad.ipynb").write_text("{}")
    with pytest.raises(DataError, match="is not a notebook"):
        migrate_file(tmp_path / "bad.ipynb")


def test_without_write_the_differences_are_shown_and_nothing_changes(tmp_path, capsys):
    path = tmp_path / "sft.py"
    path.write_text(SFT)
    assert migrate([str(path)]) == 0 and path.read_text() == SFT
    shown = capsys.readouterr().out
    assert (
        '\n-    evaluation_strategy="steps",  # often\n' in shown
        and '\n+    eval_strategy="steps",  # often\n' in shown
    )
    assert "1 file to change (--write), 0 to do manually, 1 to check, 0 not read." in shown
    assert "\nTo check: the code runs, but not as in older releases:\n" in shown
    assert migrate([str(path), "--write"]) == 0 and path.read_text() == SFT_NOW
    assert migrate([str(path)]) == 0 and "0 files to change" in capsys.readouterr().out.splitlines()[-1]


CELLS = [
    "!pip install -q trl \\\n    peft\n%load_ext autoreload\nfrom trl import SFTConfig",
    "%%bash\nls",
    "if True:\n    !nvidia-smi\n    args = SFTConfig('o', torch_dtype=\"auto\", max_prompt_length=3)\nargs?",
    "from trl import SFTTrainer\ntrainer = SFTTrainer('m', args=args,\n  max_seq_length=8)",
]


def notebook(cells):
    parts = [{"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": c.splitlines(keepends=True)} for c in cells]  # fmt: skip
    text = {"cell_type": "markdown", "metadata": {}, "source": ["# Größe\n"]}
    content = {"cells": [text, *parts], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def test_cells_of_a_notebook_are_rewritten_and_the_rest_of_the_file_stays(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(notebook(CELLS), encoding="utf-8")
    result = migrate_file(path)
    now = list(CELLS)
    now[0] = now[0].replace("from trl", "from posttrain")
    now[2] = now[2].replace('torch_dtype="auto", max_prompt_length=3', 'model_init_kwargs={"dtype": "auto"}, max_prompt_length=3, max_length=8')  # fmt: skip
    now[3] = "from posttrain import SFTTrainer\ntrainer = SFTTrainer('m', args=args)"
    assert result.after == now and result.text == notebook(now)
    assert [note.at(path) for note in result.notes if not note.check] == [
        f"{path}:cell 3:3: max_prompt_length: filter the data, or set max_length"
    ]
    assert [(note.line, note.cell) for note in result.notes if note.check] == [(3, 3)]
    path.write_text(notebook(["x = 1", "def broken(:", "import trl"]), encoding="utf-8")
    with pytest.raises(DataError, match=r"a.ipynb:cell 2:\d: the file is not valid Python"):
        migrate_file(path)


def test_hidden_lines_of_ipython_keep_the_number_of_lines_but_for_continued_ones():
    hidden = hide_magics("%time x\n  !ls\ny = 1")
    assert hidden.count("\n") == 2 and hidden.endswith("y = 1")


RECIPE = """\
# Model
model_name_or_path: gpt2  # small
torch_dtype: bfloat16
use_liger: true

# Training
output_dir: out
max_seq_length: 512  # tokens
evaluation_strategy: "no"
overwrite_output_dir: true
group_by_length: true
warmup_ratio: 0.1
dataset_text_field: text
packing: false
tpu_num_cores: 8
save_safetensors: true
"""
RECIPE_NOW = """\
# Model
model_name_or_path: gpt2  # small
dtype: bfloat16
use_liger_kernel: true

# Training
output_dir: out
max_length: 512  # tokens
eval_strategy: "no"
train_sampling_strategy: group_by_length
warmup_steps: 0.1
dataset_text_field: text
packing: false
tpu_num_cores: 8
"""


def test_a_recipe_is_rewritten_line_by_line(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(RECIPE)
    result = migrate_file(path)
    assert result.text == RECIPE_NOW
    assert [note.at(path) for note in result.notes] == [
        f"{path}:15: tpu_num_cores: start processes with accelerate launch --tpu",
        f"{path}:1: SFTConfig: some defaults changed. To keep the older values, set bf16=False [TRL 0.7-0.18], "
        "gradient_checkpointing=False [TRL 0.7-0.21], learning_rate=5e-05 [TRL 0.9-0.11].",
    ]
    path.write_text("output_dir: out\npacking: true\nmax_seq_length: 9\n")
    assert migrate_file(path).text == "output_dir: out\npacking: true\npacking_strategy: wrapped\nmax_length: 9\n"
    path.write_text("output_dir: out\npacking: true\nuse_liger: true\n")
    assert "packing: TRL up to 0.18 joined rows" in migrate_file(path).notes[0].text
    path.write_text("output_dir: out\nuse_vllm: false\nvllm_device: cuda:1\nnum_generations: 4\n")
    assert migrate_file(path).text == "output_dir: out\nuse_vllm: false\nnum_generations: 4\n"


def test_old_values_in_a_recipe_are_replaced_or_noted(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(
        "output_dir: out\nlearning_rate: 1e-5\npacking: true\npacking_strategy: 'ffd'  # first fit\noptim: adamw_hf\n"
    )
    assert migrate_file(path).text == (
        "output_dir: out\nlearning_rate: 1e-5\npacking: true\npacking_strategy: bfd  # first fit\noptim: adamw_torch\n"
    )
    path.write_text("output_dir: out\nbeta: 0.1\nmax_length: 64\nprecompute_ref_log_probs: true\nloss_type: kto_pair\n")
    assert [note.at(path) for note in migrate_file(path).notes] == [f"{path}:5: loss_type='kto_pair': train with KTOTrainer, which reads pairs too"]  # fmt: skip


SHELL = """\
#!/bin/bash
# trl sft is run here
export N=1
CUDA_VISIBLE_DEVICES=0 trl sft \\
    --model_name_or_path gpt2 \\
    --max_seq_length 512 \\
    --torch-dtype bfloat16 \\
    --no_cuda --overwrite_output_dir true \\
    --packing_strategy ffd --output_dir "a b" && echo done
trl grpo --config grpo.yaml; trl vllm-serve --model x
pip install trl
trl chat --model_name_or_path gpt2
if true; then trl dpo --generate_during_eval --beta 0.1 > log; fi
accelerate launch trl/scripts/kto.py --beta 1
"""
SHELL_NOW = """\
#!/bin/bash
# trl sft is run here
export N=1
CUDA_VISIBLE_DEVICES=0 posttrain sft \\
    --model_name_or_path gpt2 \\
    --max_length 512 \\
    --dtype bfloat16 \\
    --use_cpu \\
    --packing_strategy bfd --output_dir "a b" && echo done
posttrain grpo --config grpo.yaml; posttrain vllm-serve --model x
pip install trl
trl chat --model_name_or_path gpt2
if true; then posttrain dpo --generate_during_eval --beta 0.1 > log; fi
accelerate launch trl/scripts/kto.py --beta 1
"""


def test_commands_of_a_shell_script_are_rewritten_with_their_options(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SHELL)
    result = migrate_file(path)
    assert result.text == SHELL_NOW
    assert [(note.line, note.text.split(":")[0]) for note in result.notes] == [
        (12, "trl chat"), (13, "--generate_during_eval"), (14, "trl/scripts/kto.py"),
    ]  # fmt: skip
    path.write_text(SHELL_NOW)
    assert migrate_file(path).text == SHELL_NOW
    path.write_text("trl sft --packing true --max_seq_length 9\n")
    assert migrate_file(path).text == "posttrain sft --packing true --packing_strategy wrapped --max_length 9\n"


def test_commands_in_a_notebook_are_rewritten(tmp_path):
    cells = ["x = 1\n!pip install trl vllm\n!trl sft --max_seq_length 8 \\\n  --output_dir o\nfrom trl import SFTConfig\nSFTConfig('o', no_cuda=True)",
             "%%bash\ntrl dpo --no_cuda true\n", "text = 'trl sft --no_cuda true'\n"]  # fmt: skip
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    after = [cell["source"] for cell in json.loads(migrate_file(path).text)["cells"]]
    assert after == [
        "x = 1\n!pip install trl vllm\n!posttrain sft --max_length 8 \\\n  --output_dir o\nfrom posttrain import SFTConfig\nSFTConfig('o', use_cpu=True)",
        "%%bash\nposttrain dpo --use_cpu true\n", cells[2],
    ]  # fmt: skip


def test_a_recipe_is_read_as_that_of_the_config_that_knows_its_options(tmp_path):
    path = tmp_path / "dpo.yaml"
    path.write_text(
        "output_dir: o\nbeta: 0.1\nmax_length: 9\nmax_prompt_length: 5\nrpo_alpha: 1.0\nloss_type: [sigmoid]\ntorch_dtype: null\n"
    )
    result = migrate_file(path)
    assert result.text == path.read_text().replace("torch_dtype: null\n", "")
    assert [note.line for note in result.notes] == [5, 1] and "add 'sft' to loss_type" in result.notes[0].text
    path.write_text("output_dir: o\nmax_length: 9\nmax_seq_length: 8\n")
    assert "max_seq_length=8 and max_length=9 are both set" in migrate_file(path).notes[0].text
    path.write_text("compute_environment: LOCAL\nno_cuda: true\n")  # A file of accelerate.
    assert migrate_file(path).text == path.read_text() and not migrate_file(path).notes
    path.write_text("output_dir: o\nno_cuda: true\n---\nb: 1\n")  # Several documents.
    assert migrate_file(path).text == path.read_text()
    path.write_text("a: [\n")
    with pytest.raises(DataError, match=r"dpo.yaml:2: the file is not valid YAML"):
        migrate_file(path)


def test_the_command_and_its_extra_are_registered():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["posttrain.commands"]["migrate"] == "posttrain.extensions.migrate.commands:migrate"
    assert project["optional-dependencies"]["migrate"] == ["libcst"]


def test_without_libcst_the_error_names_the_extra_and_recipes_are_rewritten_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    (tmp_path / "a.py").write_text("import trl")
    (tmp_path / "a.yaml").write_text("output_dir: o\nno_cuda: true\n")
    with pytest.raises(MissingDependencyError, match=re.escape('pip install "posttrain[migrate]"')):
        migrate_file(tmp_path / "a.py")
    assert migrate_file(tmp_path / "a.yaml").text == "output_dir: o\nuse_cpu: true\n"


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "examples").rglob("*.yaml")) + sorted((ROOT / "examples").glob("*.py")),
    ids=lambda path: path.name,
)
def test_the_examples_are_in_the_present_spelling(path):
    result = migrate_file(path)
    assert result.before == result.after and not [note for note in result.notes if "were not checked" not in note.text]
