"""Measure how each decoder family of transformers trains and samples here; write the table of `docs/models.md`.

    python -m tests.models.families                       # print a row per family
    python -m tests.models.families --page docs/models.md # replace the table of the page
    python -m tests.models.families qwen3_5_text gpt_oss  # only these

Models have random weights, two layers and a hidden size of 32. A row compares the chosen layout with transformers' own forward of
each sequence alone: losses, and gradients of all parameters relative to the largest one, for packed SFT, DPO and GRPO. Weights are
float64, unless the family computes in float32 only.
"""

import argparse
import copy
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from posttrain import DPOConfig, GRPOConfig, SFTConfig
from posttrain.data.forest import collate
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.dpo import DPO
from posttrain.methods.grpo.objective import GRPO
from posttrain.methods.sft import SFT
from posttrain.models.forward import forward
from posttrain.models.probe import probe_head, probe_layout
from posttrain.rollouts.native.engine import native_is_exact
from posttrain.types import ALONE, Row, State
from tests.models.architectures import ARCHITECTURES, SMALL, ids

# Fields of configs that make other families as small; each config gets those that it has.
SMALLER = SMALL | {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "d_model": 32, "n_heads": 4, "n_layers": 2, "ffn_dim": 48,
    "num_layers": 2, "num_heads": 4, "rotary_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "max_seq_len": 128,
    "word_embed_proj_dim": 32, "d_ff": 48, "attention_heads": 4, "max_window_layers": 1, "sliding_window": 24,
}  # fmt: skip
OTHERS = [
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "beam",
    "biogpt",
    "bitnet",
    "bloom",
    "codegen",
    "cohere",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "deepseek_v4",
    "diffllama",
    "doge",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone_moe",
    "falcon_mamba",
    "flex_olmo",
    "flint",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_bigcode",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hrm_text",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "inkling2_text",
    "inkling_text",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jetmoe",
    "kolibri1",
    "laguna",
    "lfm3",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral",
    "ministral3",
    "modernbert-decoder",
    "moshi",
    "mpt",
    "nanochat",
    "nemotron",
    "olmo",
    "olmoe",
    "openai-gpt",
    "opt",
    "persimmon",
    "phi",
    "qwen4_exp_text",
    "rwkv",
    "seed_oss",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xglm",
    "xlstm",
]
BY_TYPE = {kind: fields for kind, fields, *_ in reversed(ARCHITECTURES.values())}
FAMILIES = sorted({*BY_TYPE, *OTHERS})
BETA = 0.5


def built(kind):
    """A model in float32 in evaluation mode."""
    torch.manual_seed(0)
    settings = SMALL | BY_TYPE[kind] if kind in BY_TYPE else SMALLER
    if kind not in BY_TYPE:
        usual = CONFIG_MAPPING[kind]()
        settings = {name: value for name, value in settings.items() if hasattr(usual, name)}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings), dtype=torch.float32).eval()


def rows_of(lengths, **columns):
    """Rows from ``(prompt, completions)`` lengths."""
    rows = []
    for i, (prompt, answers) in enumerate(lengths):
        answers = [ids(n, 10 * i + j + 1) for j, n in enumerate(answers)]
        own = {name: values[i] for name, values in columns.items()}
        rows.append(Row(ids(prompt, 10 * i), answers, [[1] * len(a) for a in answers], own))
    return rows


ADVANTAGES = [[0.5, -1.0, 1.5], [-0.75, 0.75]]
KINDS = {
    "sft": (SFT(SFTConfig("unused", use_cpu=True)), rows_of([(0, (9,)), (0, (31,)), (0, (17,))])),
    "dpo": (
        DPO(DPOConfig("unused", use_cpu=True, beta=BETA)),
        rows_of([(21, (5, 9)), (8, (12, 3))], ref_logps=[[-3.0, -4.0], [-5.0, -1.0]]),
    ),
    "grpo": (GRPO(GRPOConfig("unused", use_cpu=True)), rows_of([(26, (4, 11, 7)), (5, (9, 2))], advantages=ADVANTAGES)),
}


def expected(kind, rows, model):
    """The loss by its formula, from the model's own forward of each sequence."""
    groups = [[logps(model, row.prompt_ids, c) for c in row.completions] for row in rows]
    count = sum(len(each) for group in groups for each in group)
    if kind == "sft":
        return -sum(each.sum() for group in groups for each in group) / count
    if kind == "grpo":
        pairs = [
            (each, a)
            for group, given in zip(groups, ADVANTAGES, strict=True)
            for each, a in zip(group, given, strict=True)
        ]
        return -sum(a * (each - each.detach()).exp().sum() for each, a in pairs) / count
    margins = []
    for group, row in zip(groups, rows, strict=True):
        chosen, rejected = (
            each.sum() - ref for each, ref in zip(group, row.sequence_columns["ref_logps"], strict=True)
        )
        margins.append(chosen - rejected)
    return -logsigmoid(BETA * torch.stack(margins)).mean()


def logps(model, prompt, completion):
    tokens = torch.tensor([[*prompt, *completion]])
    logp = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, tokens[0, 1:, None])[max(len(prompt) - 1, 0) :, 0]


def computed(method, rows, model, layout):
    """The loss as the loop computes it."""
    options = {"whole_rows": method.traits.whole_rows, "together": method.traits.single_pass}
    batches = collate(rows, pad_token_id=0, layout=layout, **options)
    counts = Denominators(
        sum(b.num_loss_tokens for b in batches), sum(b.num_episodes for b in batches), len(batches), 1,
        method.counts(batches),
    )  # fmt: skip
    total = torch.zeros(())
    for batch in batches:
        outputs = forward(model, batch, method.traits.needs, temperature=method.temperature)
        total = total + reduce(method.objective(outputs, batch, State(0, 0.0, ALONE, method.start())), counts)
    return total


def gradients(loss, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(trained, found, strict=True)]
    )


def gap(kind, model, layout):
    """The difference of the losses, and of the gradients relative to the largest; of float64 weights where they run."""
    try:
        exact = gap_of(kind, copy.deepcopy(model).double(), layout)
    except RuntimeError:  # Some layer wants float32.
        return gap_of(kind, model, layout)
    return min(exact, gap_of(kind, model, layout))


def gap_of(kind, model, layout):
    """`gap` with the weights as they are."""
    method, rows = KINDS[kind]
    plain = expected(kind, rows, model)
    truth = gradients(plain, model)
    ours = computed(method, rows, model, layout)
    found = gradients(ours, model)
    return max(float((plain - ours).detach().abs()), float((truth - found).abs().max() / truth.abs().max()))


@torch.no_grad()
def removed(model):
    """The smallest change of a log-prob if one kind of submodule of all layers returns 0, and that kind."""
    prompt, completion = ids(20, 1), ids(12, 2)
    usual = logps(model, prompt, completion)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    layers = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
    children = [dict(layer.named_children()) for layer in layers]
    names = {name for own in children for name, child in own.items() if next(child.parameters(), None) is not None}
    found = {}
    for name in sorted(name for name in names if "norm" not in name and not name.startswith(("ln", "pre_ln"))):
        hooks = [own[name].register_forward_hook(zero) for own in children if own.get(name) is not None]
        try:
            found[name] = float((logps(model, prompt, completion) - usual).abs().max())
        finally:
            for hook in hooks:
                hook.remove()
    return min(((value, name) for name, value in found.items()), default=(float("nan"), ""))


def zero(module, args, output):
    if isinstance(output, torch.Tensor):
        return torch.zeros_like(output)
    return type(output)((torch.zeros_like(output[0]), *output[1:]))


def lora_gap(kind):
    """The gap of GRPO with an adapter on all linear layers; NaN if peft cannot adapt all of them."""
    model = built(kind)
    try:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
        logps(model, ids(3, 1), ids(3, 2))
    except (ValueError, RuntimeError, AttributeError):
        return float("nan")
    probe_head(model)
    return gap("grpo", model, probe_layout(model))


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    family: str
    layout: str
    engine: str
    sft: float
    dpo: float
    grpo: float
    lora: float
    weakest: str

    def line(self):
        """As Markdown."""
        cells = [getattr(self, field.name) for field in fields(self)]
        texts = [
            cell if isinstance(cell, str) else "peft fails" if math.isnan(cell) else f"{cell:.0e}" for cell in cells
        ]
        return f"| `{texts[0]}` | " + " | ".join(texts[1:]) + " |"


def measure(kind):
    """The row of a family."""
    model = built(kind)
    probe_head(model)
    layout = probe_layout(model)
    shape = {"tree": "packed trees"}.get(layout.kind, layout.kind) + (", dense mask" if layout.dense_mask else "")
    gaps = {name: gap(name, model, layout) for name in KINDS}
    change, name = removed(model)
    engine = "native" if native_is_exact(model) is None else "hf"
    return Measured(kind, shape, engine, **gaps, lora=lora_gap(kind), weakest=f"{change:.2g} ({name})")


HEAD = "| family | layout | engine | SFT | DPO | GRPO | GRPO, LoRA | smallest change without one kind of layer |\n|---|---|---|---|---|---|---|---|"


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--page")
    args = parser.parse_args(argv)
    lines = []
    for kind in args.families or FAMILIES:
        lines.append(measure(kind).line())
        print(lines[-1], flush=True)
    if args.page:
        page = Path(args.page)
        old = re.search(rf"^{re.escape(HEAD)}\n(\|.*\n)*", text := page.read_text(encoding="utf-8"), re.MULTILINE)
        page.write_text(text.replace(old[0], "\n".join([HEAD, *lines]) + "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
