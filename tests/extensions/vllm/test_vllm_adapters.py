"""An adapter alone for a real vLLM in this process: log-probs of the trainer's forward, merged beside alone, a base that differs."""

import pytest
import torch

from posttrain.integrations import is_available
from posttrain.rollouts.adapters import AdapterWeights
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Sampling
from tests.conftest import build_model, build_tokenizer
from tests.extensions.vllm.test_vllm import SHAPE
from tests.rollouts import test_contract as contract
from tests.rollouts.test_adapters import gap
from tests.rollouts.test_weights import adapted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available("vllm"), reason="vLLM is not installed: make test-serving"),
    pytest.mark.timeout(1200),
]
VOCAB = contract.VOCAB
ASKED = [Request([5, 6, 7, 8], 4), Request([9, 10], 4)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from posttrain.extensions.vllm.engine import VLLMEngine

    folder = tmp_path_factory.mktemp("model")
    build_model(VOCAB, **SHAPE).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    made = VLLMEngine.create(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=64, skip_tokenizer_init=True,
        adapter_rank=4,
    )  # fmt: skip
    yield made
    made.close()


def test_several_versions_of_an_adapter_and_of_merged_weights(engine):
    assert engine.capabilities.adapter_rank == 8  # The next that vLLM has kernels for.
    said = {}
    for version in (1, 2):
        model = adapted(build_model(VOCAB, **SHAPE), seed=version)
        engine.load_weights(AdapterWeights(model, most=8), version)
        rollouts = engine.generate(ASKED, Sampling(12, seed=version))
        assert {r.version for r in rollouts} == {version}
        assert gap(model, rollouts) < 1e-5
        said[version] = engine.score(
            [r.prompt_ids + r.token_ids for r in rollouts], [len(r.prompt_ids) for r in rollouts]
        )
    engine.load_weights(Weights(model, checkpoint_names=True), 3)
    merged = engine.score([r.prompt_ids + r.token_ids for r in rollouts], [len(r.prompt_ids) for r in rollouts])
    for alone, whole in zip(said[2]["vllm"], merged["vllm"], strict=True):
        torch.testing.assert_close(torch.tensor(alone), torch.tensor(whole), atol=1e-5, rtol=0)


def test_a_base_that_is_not_the_trainers_is_pushed_once_it_was_found_out(engine):
    model = adapted(build_model(VOCAB, seed=5, **SHAPE))
    engine.load_weights(Weights(build_model(VOCAB, **SHAPE), checkpoint_names=True), 4)
    engine.load_weights(AdapterWeights(model, most=8), 5)
    assert gap(model, engine.generate(ASKED, Sampling(12, seed=0))) > 0.01
    engine.mark_stale()
    engine.load_weights(AdapterWeights(model, most=8), 6)
    assert gap(model, engine.generate(ASKED, Sampling(12, seed=0))) < 1e-5


def test_top_p_in_vllm_and_in_the_trainer_leave_the_same_tokens(engine):
    """What it says of its tokens is the trainer's log-prob less the mass that the trainer finds, at every cut."""
    from posttrain.data.forest import collate
    from posttrain.models.forward import forward
    from posttrain.types import Row, Truncation

    model = build_model(VOCAB, **SHAPE)
    engine.load_weights(Weights(model, checkpoint_names=True), 7)
    for cut in (Truncation(top_p=0.8), Truncation(top_k=5), Truncation(min_p=0.3), Truncation(20, 0.9, 0.05)):
        sampling = Sampling(24, 0.9, cut.top_k, cut.top_p, cut.min_p, seed=3)
        (rollout,) = engine.generate([Request([5, 6, 7])], sampling)
        row = Row(rollout.prompt_ids, [rollout.token_ids], [[1] * len(rollout.token_ids)])
        (batch,) = collate([row], pad_token_id=0)
        with torch.no_grad():
            out = forward(model, batch, temperature=0.9, truncation=cut)
        drawn = (out.logp - out.log_mass)[batch.loss_mask]
        torch.testing.assert_close(drawn, torch.tensor(rollout.processed_logp), atol=1e-4, rtol=0)
        assert float(out.log_mass[batch.loss_mask].mean()) < -0.02
