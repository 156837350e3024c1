"""The reference that follows the policy: by name, exact in half precision, saved, refused where it cannot work."""

import pytest
import torch
import transformers
from transformers import TrainerControl, TrainerState

from posttrain.errors import CheckpointError, ConfigError, ModelError
from posttrain.loop.sync_reference import SyncRefModelCallback, is_sharded, resumed_from
from posttrain.models.reference import Reference, create_reference_model
from tests.conftest import build_model
from tests.extensions.trl_helpers.test_bema import Watch, build_trainer
from tests.wordings import raises


def settings(folder, steps=2, alpha=0.6, **options):
    args = transformers.TrainingArguments(str(folder), report_to="none", use_cpu=True, **options)
    args.ref_model_sync_steps, args.ref_model_mixup_alpha = steps, alpha
    return args


def build(folder, model, reference, steps=3, alpha=0.6, **options):
    callback = SyncRefModelCallback(reference, None)
    run = build_trainer(folder, model, callback, **options)
    run.args.ref_model_sync_steps, run.args.ref_model_mixup_alpha = steps, alpha
    return run


def test_the_reference_is_mixed_with_the_policy_at_every_multiple_of_the_sync_steps(tmp_path, tiny_model):
    reference = create_reference_model(tiny_model)
    run, watch = build(tmp_path, tiny_model, reference, steps=4, alpha=0.25), Watch()
    run.add_callback(watch)
    run.train()
    for name, parameter in reference.named_parameters():
        start, four, eight = (watch.steps[t][name] for t in (0, 4, 8))
        wanted = 0.75 * (0.75 * start + 0.25 * four) + 0.25 * eight
        torch.testing.assert_close(parameter.double(), wanted, atol=1e-6, rtol=0)
        assert not parameter.requires_grad
    assert (watch.steps[8]["model.norm.weight"] - watch.steps[0]["model.norm.weight"]).abs().max() > 1e-3


def test_parameters_are_paired_by_name_and_not_by_order(tiny_model):
    reference = create_reference_model(tiny_model)
    attention = reference.model.layers[0].self_attn
    attention._modules = dict(reversed(attention._modules.items()))
    with torch.no_grad():
        for name, parameter in tiny_model.named_parameters():
            parameter.fill_(sum(map(ord, name)) % 97)
    assert [n for n, _ in reference.named_parameters()] != [n for n, _ in tiny_model.named_parameters()]
    SyncRefModelCallback(reference, None).sync(tiny_model, 1.0)
    named = dict(tiny_model.named_parameters())
    assert all(torch.equal(p, named[name]) for name, p in reference.named_parameters())


def test_a_small_share_moves_a_half_precision_reference(tiny_model):
    """0.01 of a gap of 2 ** -6 at 1.0 is under half a unit of bfloat16: mixed in place, it would never move."""
    policy = tiny_model.to(torch.bfloat16)
    reference = create_reference_model(policy)
    with torch.no_grad():
        for p in reference.parameters():
            p.fill_(1.0)
        for p in policy.parameters():
            p.fill_(1.0 + 2**-6)
    callback = SyncRefModelCallback(reference, None)
    for _ in range(100):
        callback.sync(policy, 0.01)
    weight = reference.model.norm.weight
    assert weight.dtype == torch.bfloat16
    # 1 - 0.99 ** 100 = 0.634 of the gap; bfloat16 has steps of half a gap here.
    torch.testing.assert_close(weight.float(), torch.full_like(weight, 1 + 2**-7, dtype=torch.float32))


def test_a_wrapped_policy_is_paired_with_a_bare_reference(tiny_model):
    reference = create_reference_model(tiny_model)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(3.0)
    SyncRefModelCallback(reference, None).sync(torch.nn.DataParallel(tiny_model), 0.5)
    assert torch.equal(reference.model.norm.weight, torch.full((32,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_reference_of_the_uninterrupted_one(tmp_path, tiny_tokenizer, dtype):
    ends, resume = [], None
    for _ in range(2):
        model = build_model(len(tiny_tokenizer))
        reference = create_reference_model(model).to(dtype)
        options = {"save_strategy": "steps", "save_steps": 4}
        build(tmp_path, model, reference, steps=3, alpha=0.2, **options).train(resume_from_checkpoint=resume)
        ends.append(reference.state_dict())
        resume = str(tmp_path / "checkpoint-4")
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not torch.equal(ends[0]["model.norm.weight"], torch.ones(32, dtype=dtype))


def test_a_resume_without_the_moved_reference_is_refused(tmp_path, tiny_model):
    options = {"save_strategy": "steps", "save_steps": 4}
    build_trainer(tmp_path, tiny_model, **options).train()
    run = build(tmp_path, tiny_model, create_reference_model(tiny_model), steps=3, **options)
    with raises(CheckpointError, "step 4"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    run = build(tmp_path, tiny_model, create_reference_model(tiny_model), steps=5, **options)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # It had not moved by then.


def test_the_folder_of_a_resumed_run_is_known_by_its_history(tmp_path, tiny_model):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    build_trainer(tmp_path / "a", tiny_model, **options).train()
    build_trainer(tmp_path / "b", tiny_model, **options).train()
    state = TrainerState.load_from_json(tmp_path / "a" / "checkpoint-4" / "trainer_state.json")
    assert resumed_from(settings(tmp_path / "a"), state) == tmp_path / "a" / "checkpoint-4"
    assert resumed_from(settings(tmp_path / "b"), state) is None
    args = settings(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert resumed_from(args, state) == tmp_path / "a" / "checkpoint-4"


def test_no_reference_does_nothing(tmp_path, tiny_model):
    callback, state = SyncRefModelCallback(None, None), TrainerState(global_step=2)
    for event in (callback.on_train_begin, callback.on_step_end, callback.on_save):
        event(settings(tmp_path), state, TrainerControl(), model=tiny_model)


def test_adapters_are_refused_on_either_side(tmp_path, tiny_model):
    import peft

    reference = create_reference_model(tiny_model)
    model = peft.get_peft_model(tiny_model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with raises(ModelError):
        SyncRefModelCallback(reference, None).on_train_begin(
            settings(tmp_path), TrainerState(), TrainerControl(), model=model
        )
    with raises(ModelError):
        SyncRefModelCallback(model, None)
    with raises(ModelError):
        SyncRefModelCallback(Reference(model, fresh_adapter=True), None)


def test_a_quantised_reference_is_refused(tiny_model):
    reference = create_reference_model(tiny_model)
    reference.lm_head.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with raises(ModelError):
        SyncRefModelCallback(reference, None)


def test_other_architectures_and_layouts_are_refused_by_name(tiny_model, tiny_tokenizer):
    deeper = build_model(len(tiny_tokenizer), num_hidden_layers=3)
    with raises(ModelError, "model.layers.2"):
        SyncRefModelCallback(deeper, None).sync(tiny_model, 0.5)
    wider = build_model(len(tiny_tokenizer), intermediate_size=128)
    with raises(ModelError, "'model.layers.0.mlp.gate_proj.weight'", "128", "32"):
        SyncRefModelCallback(wider, None).sync(tiny_model, 0.5)


def test_a_policy_sharded_differently_from_the_reference_is_refused(tiny_model):
    reference = create_reference_model(tiny_model)
    tiny_model.model.norm.weight.placements = ("Shard(0)",)
    with raises(ModelError):
        SyncRefModelCallback(reference, None).sync(tiny_model, 0.5)


@pytest.mark.parametrize(("steps", "alpha"), [(0, 0.6), (2, 1.5), (2, -0.1)])
def test_settings_out_of_range_are_refused(tmp_path, tiny_model, steps, alpha):
    callback = SyncRefModelCallback(create_reference_model(tiny_model), None)
    with pytest.raises(ConfigError, match=f"ref_model_sync_steps={steps} .* ref_model_mixup_alpha={alpha}"):
        callback.on_train_begin(settings(tmp_path, steps, alpha), TrainerState(), TrainerControl(), model=tiny_model)


def test_zero_3_gathers_both_models_and_only_rank_0_writes(tiny_model, monkeypatch):
    """DeepSpeed stands in as a module that notes what was gathered; parameters carry the mark that it leaves on them."""
    import sys
    import types
    from contextlib import contextmanager

    reference, calls = create_reference_model(tiny_model), []

    @contextmanager
    def gathered(parameters, modifier_rank):
        calls.append((len(parameters), modifier_rank))
        yield

    fake = types.ModuleType("deepspeed")
    fake.zero = types.SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    for model in (reference, tiny_model):
        for parameter in model.parameters():
            parameter.ds_id, parameter.ds_shape = 1, parameter.shape
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(3.0)
    for rank, value in ((1, 1.0), (0, 2.0)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        SyncRefModelCallback(reference, None).sync(tiny_model, 0.5)
        assert reference.model.norm.weight[0] == value
    assert calls == [(2 * len(list(tiny_model.parameters())), 0)] * 2


@pytest.fixture
def one_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard_in_place(model):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_by_wrapping(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


@pytest.mark.parametrize("shard", [shard_in_place, shard_by_wrapping])
def test_models_that_fsdp_sharded_alike_are_mixed_shard_by_shard(tiny_tokenizer, one_process_group, shard):
    from posttrain.extensions.trl_helpers.bema import BEMACallback

    plain, policy = (build_model(len(tiny_tokenizer), seed=seed, tie_word_embeddings=False) for seed in (0, 1))
    wanted = {n: torch.lerp(p, dict(policy.named_parameters())[n], 0.3) for n, p in plain.named_parameters()}
    wanted = sorted((name, value.detach().clone()) for name, value in wanted.items())
    unlike = build_model(len(tiny_tokenizer), tie_word_embeddings=False)
    reference, policy = shard(plain), shard(policy)
    callback = SyncRefModelCallback(reference, None)
    callback.sync(policy, 0.3)
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in reference.parameters()]
    assert sum(p.numel() for p in whole) == sum(value.numel() for _, value in wanted)
    torch.testing.assert_close(
        torch.cat([p.flatten() for p in whole]).sort()[0], torch.cat([v.flatten() for _, v in wanted]).sort()[0]
    )
    assert is_sharded(policy)
    with raises(ModelError):
        BEMACallback()._refuse(policy)
    if shard is shard_in_place:
        with raises(ModelError):
            SyncRefModelCallback(unlike, None).sync(policy, 0.3)


def test_buffers_move_with_the_weights_and_counters_are_copied():
    """Half of 2 into 0 is 1; a counter of 3 is 3."""
    from types import SimpleNamespace

    policy, reference = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    policy.running_mean.fill_(2.0)
    policy.num_batches_tracked.fill_(3)
    SyncRefModelCallback(reference, SimpleNamespace()).sync(policy, 0.5)
    assert reference.running_mean.tolist() == [1.0, 1.0]
    assert int(reference.num_batches_tracked) == 3
