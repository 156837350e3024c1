"""disable_dropout_in_model: the dropout of the base model is disabled, the dropout of an adapter stays."""

import peft
import pytest
import torch
from torch import nn

from posttrain.models.reference import disable_dropout_in_model
from tests.conftest import build_model

RATE = 0.3
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS = {
    "BOFT": {"boft_block_size": 4, "boft_dropout": RATE},
    "Deft": {"deft_dropout": RATE},
    "Delora": {"r": 4, "module_dropout": RATE},
    "Frod": {"frod_dropout": RATE, "progressbar": False},
    "Gralora": {"r": 4, "gralora_dropout": RATE},
    "Hira": {"r": 4, "hira_dropout": RATE},
    "LoHa": {"r": 4, "rank_dropout": RATE, "module_dropout": RATE},
    "Lora": {"r": 4, "lora_dropout": RATE},
    "Miss": {"r": 4, "miss_dropout": RATE},
    "OFT": {"oft_block_size": 8, "module_dropout": RATE},
    "Psoft": {"r": 4, "psoft_dropout": RATE},
    "RandLora": {"r": 4, "randlora_dropout": RATE},
    "Supertuning": {"sparsity": 0.9, "r": 2, "lora_alpha": 4, "lora_dropout": RATE},
    "TinyLora": {"tinylora_dropout": RATE},
    "UniLora": {"unilora_dropout": RATE},
    "VBLoRA": {"r": 4, "num_vectors": 16, "vector_length": 16, "vblora_dropout": RATE},
    "Vera": {"r": 4, "vera_dropout": RATE},
}


def rates(model):
    """Return every dropout probability above 0 of the model's modules, by name."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if ("drop" in name or name == "p") and isinstance(value, float | dict) and value:
                found[f"{path}.{name}"] = value
    return found


@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if hasattr(peft, f"{kind}Config")])
def test_the_dropout_of_every_kind_of_adapter_stays(kind):
    base = build_model(37, attention_dropout=0.2)
    own = rates(base)
    model = peft.get_peft_model(base, getattr(peft, f"{kind}Config")(**ADAPTERS[kind], **TARGETS))
    before = rates(model)
    added = {name: value for name, value in before.items() if not name.endswith("attention_dropout")}
    assert own and added
    disable_dropout_in_model(model)
    assert rates(model) == added
    assert base.config.attention_dropout == 0.0


def test_dropout_inside_the_base_layer_of_an_adapter_is_disabled():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights, self.inner = nn.Parameter(torch.randn(2, 8, 8)), nn.Dropout(0.2)
            self.router_dropout = 0.2

        def forward(self, x):
            return self.inner(x @ self.weights[0])

    base = nn.Sequential(Experts())
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.weights"]))
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    disable_dropout_in_model(model)
    assert experts.inner.p == experts.router_dropout == 0.0


def test_the_dropout_of_a_prompt_encoder_stays():
    settings = {"num_virtual_tokens": 3, "encoder_reparameterization_type": "LSTM", "encoder_num_layers": 2}
    settings |= {"encoder_hidden_size": 16, "encoder_dropout": RATE, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(build_model(37), peft.PromptEncoderConfig(**settings))
    before = {name: rate for name, rate in rates(model).items() if "prompt_encoder" in name}
    assert set(before.values()) == {RATE}
    disable_dropout_in_model(model)
    assert {name: rates(model)[name] for name in before} == before
