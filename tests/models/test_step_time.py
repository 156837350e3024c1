"""Times of a step from rates that are given, against operations counted by hand."""

import pytest
from transformers import LlamaConfig

from posttrain.data.forest import Layout, collate
from posttrain.models.memory_estimate import Generating, Workload
from posttrain.models.memory_trace import Part, Shadow
from posttrain.models.step_time import BESIDE_PRODUCTS, Rates, measure_rates, step_time
from posttrain.types import Row

CONFIG = LlamaConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
RATES = Rates(training=1e9, decoding=2e8, bandwidth=1e9, rows=64, slots=4, device="cpu")
# Of a token of a row of 32: projections of queries, keys, values and outputs, scores, three products of the MLP.
LAYER = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64) + 4 * 64 * 32 + 6 * 64 * 160
HEAD = 2 * 1000 * 64
SLOW = BESIDE_PRODUCTS["cpu"]


def work(**changes):
    batches = collate([Row([], [[0] * 32], [[0] * 8 + [1] * 24])] * 2, pad_token_id=0, layout=Layout("tree", 32, 64))
    return Workload(**({"policy": Part("policy", CONFIG), "batches": batches, "checkpointing": False} | changes))


def seconds(asked, **settings):
    shadow = Shadow(asked.policy, checkpointing=asked.checkpointing, kept_layers=asked.kept_layers)
    return step_time(asked, shadow, RATES, **({"accumulation": 1} | settings)).parts


def test_a_step_is_its_products_three_times_and_the_head_four_times():
    """The head is multiplied once in forward, and in backward once more before its two gradients."""
    expected = SLOW * (64 * 3 * LAYER * 3 + 48 * HEAD * 4) / 1e9
    assert seconds(work())["forward and backward"] == pytest.approx(expected)
    assert seconds(work(), accumulation=4)["forward and backward"] == pytest.approx(4 * expected)


def test_what_is_computed_again_costs_a_forward_of_those_layers():
    plain = seconds(work())["forward and backward"]
    again = seconds(work(checkpointing=True, kept_layers=1))["forward and backward"]
    assert again - plain == pytest.approx(SLOW * 64 * 2 * LAYER / 1e9)


def test_a_reference_costs_a_forward_and_sampling_its_prompts_and_completions():
    asked = work(
        reference="copy", generating=Generating(prompts=2, prompt_tokens=20, completion_tokens=10, sequences=8)
    )
    parts = seconds(asked, generations=0.5)
    assert parts["reference"] == pytest.approx(SLOW * (64 * 3 * LAYER + 48 * HEAD) / 1e9)
    read, written = 2 * 20 * 3 * LAYER / 1e9, 8 * 10 * (3 * LAYER + HEAD) / 2e8
    assert parts["sampling"] == pytest.approx(0.5 * SLOW * (read + written))


def test_rates_are_measured_with_the_rows_of_the_run():
    asked = work(generating=Generating(prompts=2, prompt_tokens=20, completion_tokens=10, sequences=8))
    found = measure_rates(asked, Shadow(asked.policy))
    assert (found.rows, found.slots) == (64, 8)
    assert min(found.training, found.decoding, found.bandwidth) > 1e6
