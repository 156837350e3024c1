"""`logits_chunk_size`: how many positions have logits at once."""

import pytest

from posttrain.errors import ConfigError
from posttrain.models import heads
from tests.algorithms.helpers import grpo, grpo_args


@pytest.mark.parametrize("size", [None, 3])
def test_it_reaches_the_loss_and_changes_no_number(size, tiny_tokenizer, tmp_path, monkeypatch):
    seen, whole = set(), heads.token_logprobs

    def watched(*args, chunk_size=None, **kwargs):
        seen.add(chunk_size)
        same = whole(*args, **kwargs)
        out = whole(*args, chunk_size=chunk_size, **kwargs)
        assert (out.logp - same.logp).abs().max() < 1e-5
        return out

    trainer = grpo(tmp_path, tiny_tokenizer, logits_chunk_size=size, max_steps=1)
    monkeypatch.setattr(heads, "token_logprobs", watched)
    trainer.train()
    assert seen == {size}


def test_it_is_a_number_of_positions(tmp_path):
    with pytest.raises(ConfigError, match="logits_chunk_size=0 must be at least 1"):
        grpo_args(tmp_path, logits_chunk_size=0)
