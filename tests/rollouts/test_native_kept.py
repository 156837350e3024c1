"""What the native engine finds again: turns of an episode, common beginnings of some prompts; and when it must not."""

import contextlib

import pytest
import torch

from posttrain.data.chat import with_template
from posttrain.data.templates import FAMILIES as TEMPLATES
from posttrain.data.templates import training_template
from posttrain.rollouts.adapters import fingerprint
from posttrain.rollouts.episodes.loop import roll_out_with_tools
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.native.prefix_cache import PrefixCache, match
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.models.test_forward import FAMILIES, family
from tests.rollouts.test_native_memory import agree, passes

SYSTEM, OTHER = list(range(3, 43)), list(range(44, 4, -1))


def engine(model=None, **options) -> NativeEngine:
    return NativeEngine(model or build_model(50), pad_token_id=0, **options)


def second_turn(rollouts, results) -> list[Request]:
    return [Request(r.prompt_ids + r.token_ids + result) for r, result in zip(rollouts, results, strict=True)]


RESULTS = [[9], [10, 11, 12], [13, 14], [15, 16, 17, 18, 19]]


def two_turns(e: NativeEngine, *, keep: bool):
    sampling = Sampling(6, seed=1)
    with e.prefix_cache() if keep else contextlib.nullcontext():
        first = e.generate([Request([*SYSTEM, 5, 6], 2), Request([*SYSTEM, 7], 2)], sampling)
        second = e.generate(second_turn(first, RESULTS), sampling)
        return first, second, dict(e.counts)


def test_turn_two_computes_its_new_tokens_alone():
    """Of each sequence the last drawn token and what its tool said are new: 1 + 1, 1 + 3, 1 + 2, 1 + 5 tokens, padded to 6."""
    model = build_model(50)
    seen = passes(model)
    _, second, counts = two_turns(engine(model), keep=True)
    width = [shape for shape in seen if shape[1] > 1]
    assert width == [(1, 40), (2, 2), (4, 6)]
    assert counts["prefilled"] == 24
    assert counts["reused"] == sum(len(r.prompt_ids) for r in second) - (2 + 4 + 3 + 6) - 3 * 40  # Common ones once.
    agree(model, second, atol=1e-5)


def test_what_is_kept_changes_no_draw_and_no_logp():
    (a, b, _), (c, d, counts) = (two_turns(engine(), keep=keep) for keep in (True, False))
    assert [r.token_ids for r in a + b] == [r.token_ids for r in c + d]
    assert counts["reused"] == 0
    for x, y in zip(b, d, strict=True):
        assert torch.allclose(torch.tensor(x.logp), torch.tensor(y.logp), atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_goes_on_from_what_is_kept_as_its_own_forward_does(name):
    e = engine(family(name, "eager"), prefill_tokens=9)
    _, second, counts = two_turns(e, keep=True)
    assert counts["reused"] == 40 + 2 * (2 + 5) + 2 * (1 + 5)
    agree(e.model, second)


def test_three_turns_reuse_all_that_was_said():
    e, asked = engine(), [Request([*SYSTEM, 5, 6], 3)]
    with e.prefix_cache():
        for turn in range(3):
            rollouts = e.generate(asked, Sampling(5, seed=turn))
            agree(e.model, rollouts, atol=1e-5)
            asked = second_turn(rollouts, [[20 + turn], [30 + turn], [40 + turn]])
            if turn:
                assert e.counts["prefilled"] == 3 * 2


@pytest.mark.parametrize("change", ["step", "data", "adapter", "version"])
def test_other_weights_forget_everything(change):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_model(50), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    e, requests = engine(model), [Request([*SYSTEM, 5]), Request([*SYSTEM, 6])]
    with e.prefix_cache():
        e.generate(requests, Sampling(3, seed=0))
        e.generate(requests, Sampling(3, seed=0))
        assert e.counts["reused"] == 40
        off = contextlib.nullcontext()
        if change == "step":
            trained = next(p for p in model.parameters() if p.requires_grad)
            trained.grad = torch.ones_like(trained)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        elif change == "data":
            model.get_base_model().model.norm.weight.data[3] += 0.5
        elif change == "adapter":
            off = model.disable_adapter()
        else:
            e.load_weights([], version=4)
        with off:
            rollouts = e.generate(requests, Sampling(3, seed=0))
            assert e.counts["reused"] == 0
            agree(model, rollouts)


def test_nothing_is_kept_outside_and_nothing_afterwards():
    e, requests = engine(), [Request([*SYSTEM, 5]), Request([*SYSTEM, 6])]
    for _ in range(2):
        e.generate(requests, Sampling(3, seed=0))
        assert e.counts["reused"] == 0
    with e.prefix_cache(), e.prefix_cache():
        e.generate(requests, Sampling(3, seed=0))
        assert e.kept.bytes > 0
    assert e.kept is None


def test_prompts_of_two_tasks_compute_each_system_prompt_once():
    model = build_model(50)
    seen = passes(model)
    requests = [
        Request([*SYSTEM, 5, 6], 2),
        Request([*OTHER, 7], 1),
        Request([*SYSTEM, 8], 1),
        Request([*OTHER, 9, 10], 1),
    ]
    e = engine(model)
    rollouts = e.generate(requests, Sampling(4, seed=0))
    assert sum(rows * width for rows, width in seen if width > 1) <= 40 + 40 + 4 * 2
    assert e.counts["reused"] == 4 * 40
    agree(model, rollouts, atol=1e-5)


def test_turns_with_tools_keep_what_was_computed(tiny_tokenizer):
    """The model's turn and all before it are found again when the tools have answered, and freed when the episodes end."""
    model = build_model(len(tiny_tokenizer), max_position_embeddings=2048)
    e, counts, prompts = engine(model), [], []
    generate = e.generate

    def watched(requests, sampling):
        prompts.append(sum(len(r.prompt_ids) for r in requests))
        rollouts = generate(requests, sampling)
        counts.append(e.counts)
        return rollouts

    e.generate = watched
    family = next(f for f in TEMPLATES if f.name == "Qwen2.5")
    own = with_template(tiny_tokenizer, training_template(family))
    said = iter([[{"function": {"name": "shout", "arguments": {"text": "a"}}}], []])

    def parse(tokenizer, ids, prefix, tools):
        return {"role": "assistant", "content": "", "tool_calls": next(said)}

    def shout(text: str) -> str:
        """Say it louder.

        Args:
            text: What to say.
        """
        return text.upper()

    stop = tuple(range(len(tiny_tokenizer)))  # Whatever is drawn ends the turn.
    question = [{"role": "user", "content": "Say a. " * 20}]
    (episode,) = roll_out_with_tools(
        e, own, [question], [shout], Sampling(200, stop_token_ids=stop, seed=0), parse=parse
    )
    assert episode.calls == 1
    assert counts[0]["reused"] == 0
    assert counts[1]["reused"] == prompts[0]  # The one token that was drawn has not been read yet.
    assert counts[1]["prefilled"] == prompts[1] - prompts[0]
    assert e.kept is None


# The tree ------------------------------------------------------------------------------------------------------------


def layers(tokens, layer=0):
    """Keys that are the tokens, so that what is found can be checked."""
    x = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None]
    return {layer: (x, -x)}


def test_the_tree_finds_the_longest_beginning_of_random_sequences():
    generator = torch.Generator().manual_seed(0)
    kept, known = PrefixCache(10**9), []
    for _ in range(300):
        tokens = torch.randint(
            0, 3, (int(torch.randint(1, 12, (1,), generator=generator)),), generator=generator
        ).tolist()
        length, found, _ = kept.find(tokens, len(tokens))
        assert length == max((match(tokens, k) for k in known), default=0)
        keys = torch.cat([piece[0][0] for piece in found], 2).flatten().tolist() if found else []
        assert keys == tokens[:length]
        kept.add(tokens, [layers(tokens[:4]), layers(tokens[4:])] if len(tokens) > 4 else [layers(tokens)], [])
        known.append(tokens)
    assert kept.bytes == sum(node.bytes for node in kept._nodes())


def test_what_was_used_longest_ago_goes_first():
    """Three sequences of 10 tokens at 8 bytes; 240 bytes hold three. The second was not read since: the fourth takes its place."""
    kept = PrefixCache(240)
    sequences = [[i] * 10 for i in range(4)]
    for tokens in sequences[:3]:
        kept.add(tokens, [layers(tokens)], [])
    kept.find(sequences[0], 10)
    kept.find(sequences[2], 10)
    kept.add(sequences[3], [layers(sequences[3])], [])
    assert [kept.find(tokens, 10)[0] for tokens in sequences] == [10, 0, 10, 10]
    assert kept.bytes == 240
    kept.add([7] * 31, [layers([7] * 31)], [])
    assert kept.find([7] * 31, 31)[0] == 0
    assert kept.bytes == 240


def test_no_more_is_found_than_asked_for():
    kept = PrefixCache(10**6)
    kept.add([1, 2, 3], [layers([1, 2, 3])], [])
    assert kept.find([1, 2, 3], 2)[0] == 2


def test_the_fingerprint_is_that_of_the_weights():
    model = build_model(50)
    before = fingerprint(model)
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    assert fingerprint(model) == before
    torch.optim.AdamW(model.parameters(), lr=1e-6).step()
    assert fingerprint(model) != before
