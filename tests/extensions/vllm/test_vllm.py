"""A real vLLM in this process: the engine contract, weights pushed into it, log-probs on both sides. See `make test-serving`."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import pytest
import torch

from posttrain.integrations import is_available

if not is_available("vllm"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

from posttrain.checks.server import check_parity, probe_sequences
from posttrain.extensions.vllm.engine import VLLMEngine
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Row, Sampling
from tests.conftest import build_model, build_tokenizer
from tests.rollouts import test_contract as contract

pytestmark = pytest.mark.slow

VOCAB = contract.VOCAB
# vLLM's CPU attention wants heads of 32 or more.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """One engine for all tests: loading takes a minute; it starts with other weights than those that are pushed."""
    folder = tmp_path_factory.mktemp("model")
    build_model(VOCAB, seed=9, **SHAPE).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    made = VLLMEngine.create(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=64, skip_tokenizer_init=True
    )
    yield made
    made.close()


@pytest.fixture
def engine(loaded):
    loaded.model = build_model(VOCAB, **SHAPE)
    loaded.load_weights(Weights(loaded.model, checkpoint_names=True), 1)
    return loaded


def _gaps(engine):
    sequences = probe_sequences(VOCAB, engine.context)
    rows = [Row(ids[:1], [ids[1:]], [[1] * (len(ids) - 1)]) for ids in sequences]
    with torch.no_grad():
        ours = [logp.tolist() for logp in sequence_logps(engine.model, rows)]
    return ours, engine.score(sequences, [1] * len(sequences))["vllm"]


def test_parity_fails_before_a_push_and_holds_after_it(engine):
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert check_parity("vllm", *_gaps(engine), dtype=engine.dtype, version=1).code == "PT-S004"
    engine.load_weights(Weights(engine.model, checkpoint_names=True), 2)
    ours, theirs = _gaps(engine)
    assert check_parity("vllm", ours, theirs, dtype=engine.dtype, version=2) is None
    assert max(abs(a - b) for m, t in zip(ours, theirs, strict=True) for a, b in zip(m, t, strict=True)) < 1e-3


def test_a_pushed_adapter_is_what_vllm_samples_from(engine):
    from tests.rollouts.test_weights import adapted

    engine.model = adapted(build_model(VOCAB, **SHAPE))
    engine.load_weights(Weights(engine.model, checkpoint_names=True), 3)
    assert check_parity("vllm", *_gaps(engine), dtype=engine.dtype, version=3) is None


def test_truncated_sampling_gives_processed_log_probs(engine):
    rollouts = engine.generate(contract.requests(2), Sampling(4, top_k=1, seed=0))
    assert all(abs(x) < 1e-4 for r in rollouts for x in r.processed_logp)  # The only token left has probability 1.


def test_rollouts_carry_the_version_of_the_weights(engine):
    engine.load_weights([], version=7)
    assert engine.generate([contract.Request([5])], Sampling(1, seed=0))[0].version == 7


def test_seeds_hold_for_more_prompts_than_a_step_reads(engine):
    """64 x 100 tokens are more than the 4096 of a step: read in pieces, a request with a seed would end this build."""
    asked = [contract.Request([3 + (7 * i + k) % (VOCAB - 3) for k in range(100)]) for i in range(64)]
    sampling = Sampling(4, seed=5)
    whole = [r.token_ids for r in engine.generate(asked, sampling)]
    engine.load_weights([], version=8)  # Forgets what it read.
    assert [r.token_ids for r in engine.generate(asked, sampling)] == whole
    assert [r.token_ids for r in engine.generate(asked[:3], sampling)] == whole[:3]


# The engine contract, claim by claim.
test_rollouts_come_request_by_request = contract.test_rollouts_come_request_by_request_with_their_prompts
test_generation_stops = contract.test_generation_stops_after_the_stop_token_and_keeps_it
test_logps_equal_a_plain_forward = contract.test_logps_equal_a_plain_forward_to_1e3
test_a_seed_reproduces_and_another_differs = contract.test_a_seed_reproduces_and_another_differs
test_without_a_seed_two_calls_differ = contract.test_without_a_seed_two_calls_differ
test_completions_of_one_prompt_differ = contract.test_completions_of_one_prompt_differ
test_greedy_equals_generate = contract.test_greedy_equals_generate
test_the_distribution_is_the_one_asked_for = contract.test_the_distribution_is_the_one_asked_for
test_repetition_penalty_makes_repeats_rarer = contract.test_repetition_penalty_makes_repeats_rarer
test_the_engine_works_after_an_exception = contract.test_the_engine_works_after_an_exception
