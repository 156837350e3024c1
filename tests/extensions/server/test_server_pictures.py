"""Pictures to a server that speaks vLLM's ``/inference/v1/generate``: who expands them, what is compared, what is refused."""

import base64
import contextlib
import math
from io import BytesIO

import pytest
from PIL import Image

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.errors import BadRequest, RolloutError, RolloutServerError
from posttrain.extensions.images.encoder import install_pictures
from posttrain.extensions.images.picture import read_picture
from posttrain.extensions.images.processors import PictureProcessor
from posttrain.extensions.server.engine import ServerEngine
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.extensions.serve.test_host import asked_about, copied, gap
from tests.extensions.server.stub_server import Refused, StubServer
from tests.methods.test_vision_online import QUICK, prompts, short
from tests.vision_families import build
from tests.wordings import raises


class Generates(StubServer):
    """A vLLM: it gets ids with one placeholder a picture, expands them by its own processor, and samples with a real engine."""

    def __init__(self, processor):
        super().__init__(build_model(8))
        # Not the copy that the stub makes of its model.
        self.model = copied(processor)
        self.engine = NativeEngine(self.model, pad_token_id=256)
        self.reader, self.bodies, self.resets = PictureProcessor(processor), [], 0
        self.lies["facts"] = {"engine": "vllm", "tells_versions": False, "vocab_size": 320, "checkpoint_names": False}

    def on_v1_models(self, asked):
        return {"data": [{"id": "tiny", "root": "tiny", "parent": None, "max_model_len": 512}]}

    def on_collective_rpc(self, asked):
        return {"results": [{"transfer": "shared memory", "dtype": "float32"} | self.lies["facts"]]}

    def on_reset_encoder_cache(self, asked):
        self.resets += 1

    def on_inference_v1_generate(self, asked):
        if self.lies.get("disabled"):
            raise Refused(403, "Scale-out endpoints are disabled.")
        if "token_ids" not in asked:
            raise Refused(400, "token_ids: Field required")
        self.bodies.append(asked)
        sampling, held = asked["sampling_params"], []
        for part in asked["content_parts"]:
            image = Image.open(BytesIO(base64.b64decode(part["url"].partition(",")[2])))
            held.append(read_picture(image))
        text = self.reader.tokenizer.decode(asked["token_ids"])
        ids, placed = self.reader.encode(text, held, prompt=True)
        ids = ids + self.lies.get("more", [])
        bias = tuple((int(token), value) for token, value in sampling["logit_bias"].items())
        own = Sampling(sampling["max_tokens"], seed=sampling["seed"], logit_bias=bias, top_logps=sampling["logprobs"])
        with self.lock:
            rollouts = self.engine.generate([Request(ids, sampling["n"], pictures=placed)], own)
        choices = [
            {"index": i, "finish_reason": r.finish_reason, "token_ids": r.token_ids, "logprobs": {"content": content(r, own.top_logps)}}
            for i, r in enumerate(rollouts)
        ]  # fmt: skip
        return {"choices": choices, "prompt_token_ids": ids}


def content(rollout, most):
    """The sampled token first, and as many as were asked for in all, as vLLM 0.32 does."""
    made = []
    tops = rollout.top_logps or [[] for _ in rollout.token_ids]
    for token, logp, at in zip(rollout.token_ids, rollout.processed_logp or rollout.logp, tops, strict=True):
        entries = {token: logp} | dict(at)
        listed = [{"token_id": i, "logprob": value} for i, value in entries.items()]
        made.append({"token_id": token, "logprob": logp, "top_logprobs": listed[: max(most, 1)]})
    return made


@pytest.fixture(scope="module")
def made():
    model, processor = build("qwen2_vl")
    install_pictures(model, processor)
    reader = PictureProcessor(processor)
    with contextlib.closing(Generates(processor)) as stub:
        engine = ServerEngine(stub.url, reader=reader)
        yield stub, engine, model, reader
        engine.close()


def sampling(reader, **more):
    return Sampling(5, seed=1, logit_bias=tuple((token, -math.inf) for token in reader.never(320)), **more)


def test_one_placeholder_a_picture_is_sent_and_log_probs_are_those_of_a_plain_forward(made):
    stub, engine, model, reader = made
    assert engine.capabilities.pictures
    asked = asked_about(reader)
    rollouts = engine.generate(asked, sampling(reader, top_logps=2))
    gaps = []
    for request, rollout in zip([one for one in asked for _ in range(2)], rollouts, strict=True):
        other = asked[1].pictures if request.pictures else ()
        gaps += [gap(model, reader, rollout, held) for held in (request.pictures, other)]
        assert rollout.prompt_ids == list(request.prompt_ids) and [len(at) for at in rollout.top_logps] == [2] * 5
    assert max(gaps[::2]) < 1e-4
    # The control: the first question's answers under the second's picture.
    assert min(gaps[1], gaps[3]) > 1e-2
    # Prompts of text alone go to the usual endpoint.
    assert len(stub.bodies) == 2 and all(len(body["content_parts"]) == 1 for body in stub.bodies)
    sent = next(body["token_ids"] for body in stub.bodies)
    assert sent.count(reader.token_id) == 1 < list(asked[0].prompt_ids).count(reader.token_id)


def test_features_of_pictures_are_forgotten_with_every_push(made):
    stub, engine, model, _ = made
    before = stub.resets
    engine.load_weights(Weights(model), 1)
    assert stub.resets == before + 1


def test_ratios_of_a_run_begin_at_one_although_placeholders_have_mass(tmp_path, monkeypatch):
    """Engines draw none, so that what they say is of the other ids alone; without the trainer's knowing, the control."""
    gaps = {}
    for followed in (True, False):
        model, processor = build("qwen2_vl")
        with contextlib.closing(Generates(processor)) as stub, monkeypatch.context() as patch:
            if not followed:
                patch.setattr(Sampling, "left_out", Sampling.truncation)
            server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url}
            args = GRPOConfig(str(tmp_path), **QUICK | {"max_steps": 1}, **server)
            trainer = GRPOTrainer(model, short, args, train_dataset=prompts(), processing_class=processor)
            trainer.train()
            (row,) = (row for row in trainer.state.log_history if "loss" in row)
            gaps[followed] = [row[f"sampling/sampling_logp_difference/{kind}"] for kind in ("mean", "max")]
            trainer.engine.close()
    assert gaps[True][0] < 1e-5 and gaps[True][1] < 1e-4 and gaps[False][0] > 0.1


def test_another_expansion_is_a_named_error_with_both_sides(made):
    stub, engine, _, reader = made
    (request,) = asked_about(reader, (0,))
    stub.lies["more"] = [65, 66]
    try:
        length = len(request.prompt_ids)
        with raises(BadRequest, "PT-G016", length, length + 2, "[65, 66]"):
            engine.generate([request], sampling(reader))
    finally:
        stub.lies.pop("more")


def test_a_reply_of_another_form_is_a_typed_error(made):
    stub, engine, _, reader = made
    usual, stub.on_inference_v1_generate = stub.on_inference_v1_generate, lambda asked: {"choices": [{}]}
    try:
        with raises(RolloutServerError, stub.url):
            engine.generate(asked_about(reader, (0,)), sampling(reader))
    finally:
        stub.on_inference_v1_generate = usual


def test_a_server_without_the_endpoint_takes_no_pictures(made):
    stub, _, _, reader = made
    stub.lies["disabled"] = True
    try:
        engine = ServerEngine(stub.url, pushes=False, reader=reader)
        assert not engine.capabilities.pictures
        with raises(RolloutError, "request 0"):
            engine.generate(asked_about(reader, (0,)), sampling(reader))
        engine.close()
    finally:
        stub.lies.pop("disabled")
