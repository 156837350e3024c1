"""Images in the forward pass: cached image features, three-dimensional rotary positions, and bidirectional attention."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from posttrain.errors import ModelError
from posttrain.extensions.images.picture import Picture, Placed
from posttrain.extensions.images.processors import PictureProcessor
from posttrain.models.architecture import image_token
from posttrain.models.heads import LANGUAGE, PassInputs, causal_lm, picture_encoder
from posttrain.models.parallel import gathers_in_forward, shards_parameters
from posttrain.types import Batch, Row, Segment

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, ProcessorMixin

logger = logging.getLogger(__name__)

# Parts of module names that identify the projector between the vision tower and the text model.
PROJECTOR = {
    "aligner", "connector", "deepstack_merger_list", "image_newline", "merger", "merger_list", "multi_modal_projector",
    "projector",
}  # fmt: skip
SAMPLES = 16  # Number of elements of each trained weight that are compared in order to detect changes of the weight.
# Sizes (width, height) in pixels of the images with which processors and models are tested.
PROBED = ((56, 56), (112, 56), (84, 140))


class PictureEncoder:
    """Encodes images with the vision tower of a model. An image that occurs several times in a pass is encoded once.

    Features without gradient are cached for later passes.

    Args:
        processor: Processor that converts images to pixel tensors.
        cache_bytes: Size of the feature cache in bytes. If the cache is full, features are removed in LRU
            order.

    Attributes:
        encoded, reused: Number of images that were encoded, and number of images whose features were taken from the cache,
            since the start.
        seconds: Number of seconds for preparing and encoding images. On an accelerator, this is the time until the work is
            queued.
        next: Encoder of another model that will encode the same images in its next pass. This encoder receives the prepared
            pixels.
        given: Pixels that another encoder has prepared for the next pass.
    """

    def __init__(self, processor: PictureProcessor, cache_bytes: int) -> None:
        self.processor, self.cache_bytes = processor, cache_bytes
        self.next: PictureEncoder | None = None
        self.given: dict[Picture, dict[str, Tensor]] = {}
        self.encoded = self.reused = 0
        self.seconds = 0.0
        # One entry per level of features. True: the model's forward method expects a list with one tensor per image. False:
        # it expects one tensor.
        self._listed: list[bool] = []
        self._kept: OrderedDict[Any, list[Tensor]] = OrderedDict()
        self._size = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PictureEncoder:
        return PictureEncoder(self.processor, self.cache_bytes)

    @property
    def always(self) -> bool:
        """Whether every prompt must contain an image."""
        return self.processor.family.block == "prompt"

    def inputs(self, model: nn.Module, placed: Sequence[Placed], kept: Tensor | None = None) -> dict[str, Any]:
        """Return the image features as keyword arguments of the model's forward method. The features are in the order of
        the placeholders.

        The argument is ``mm_encoder_outputs``. Families with cross-attention get ``cross_attention_states`` and ``tiles``
        instead. If an image occurs several times, it is encoded once.

        Args:
            model: Transformers model without wrappers.
            placed: Images in the order of their placeholders in the batch.
            kept: Mask of the features that the pass needs, in the order of the placeholders. None: all features.

        Raises:
            ModelError: The number of features differs from the number of placeholders.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        counts = {image.picture: image.count for image in placed}
        weights = tower_parameters(model).values()
        # If the tower is trained, encode images in every pass, because cached features have no autograd graph. If the tower
        # is sharded, encode images in every pass, because the tower's collectives need all processes.
        trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        fresh = trains or gathers_in_forward(_tower(model))
        layers = (module for module in _tower(model) if isinstance(module, BaseTunerLayer))
        adapters = tuple((str(layer.active_adapters), layer.disable_adapters) for layer in layers)
        versions = None if fresh else hash((adapters, *map(_state, weights)))
        features_of = {picture: None if fresh else self._recall((*_shown(picture), versions)) for picture in counts}
        missing = [picture for picture, features in features_of.items() if features is None]
        self.encoded, self.reused = self.encoded + len(missing), self.reused + len(counts) - len(missing)
        if missing:
            began = time.perf_counter()
            # Build no graph for a frozen tower, even if its inputs require gradients. Other processes build no graph either.
            with torch.set_grad_enabled(trains):
                encoded = self._encode(model, missing, counts)
            for picture, features in zip(missing, encoded, strict=True):
                features_of[picture] = features
                if not fresh:
                    self._keep((*_shown(picture), versions), features)
            self.seconds += time.perf_counter() - began
        features = [features_of[image.picture] or [] for image in placed]
        levels = [torch.cat(level) for level in zip(*features, strict=True)]
        if kept is not None:
            levels = [level[kept.to(level.device)] for level in levels]
        if self.processor.family.cross:
            return {"cross_attention_states": levels[0][None], "tiles": levels[1].view(len(placed), -1)}
        return {"mm_encoder_outputs": {"image": self._output(levels)}}

    def probe_rows(self) -> list[Row]:
        """Return two prompts with three completions each. Each prompt contains one image, and the images have different
        sizes.
        """
        words = self.processor.tokenizer("which one is it, and where?", add_special_tokens=False)["input_ids"]
        rows = []
        for picture in probe_pictures(self.processor)[:2]:
            ids, placed = self.processor.encode(f"a {self.processor.placeholder} b", [picture], prompt=True)
            answers = [words[:5], words[2:5], words[1:4]]
            rows.append(Row(ids, answers, [[1] * len(a) for a in answers], pictures=[placed, [], [], []]))
        return rows

    def call_key(self, index: int, placed: Sequence[Placed]) -> tuple[int, ...]:
        """Return a key of a request. Requests with different keys cannot share a call of ``generate``.

        In families with cross-attention, all rows of a call must have the same number of images, because tokens
        would also attend to padding images. In an unknown family, padding was not tested, so a request with images runs
        alone.

        Args:
            index: Index of the request.
            placed: Images of the request.
        """
        family = self.processor.family
        return (index if placed and not family.models else -1, len(placed) if family.cross else -1)

    def whole(self, model: nn.Module, ids: Tensor, rows: Sequence[Sequence[Placed]]) -> dict[str, Any]:
        """Return the processor's tensors for the images of each row. Models that do not accept image features need these
        tensors.
        """
        began, pictures = time.perf_counter(), [[image.picture for image in row] for row in rows]
        inputs = self.processor.plain_inputs(ids.cpu(), pictures)
        self.encoded, self.seconds = self.encoded + sum(map(len, rows)), self.seconds + time.perf_counter() - began
        return for_tower(model, inputs)

    def crossed(self, model: nn.Module, batch: Batch, placed: Sequence[Placed]) -> dict[str, Any]:
        """Return the cross-attention features of one prefix tree, and a mask of the features to which each token attends."""
        inputs = self.inputs(model, placed)
        inputs["cross_attention_mask"] = self.processor.cross_mask(batch.input_ids, inputs.pop("tiles"))
        return inputs

    def _beside(self, model: nn.Module, joined: dict[str, Tensor]) -> list[list[Tensor]]:
        """Return features ``(tiles · tokens, H)`` and a mask ``(tiles,)`` for each image. The mask is 1 for tiles that
        contain a part of the image.
        """
        inner = model.model
        output = inner.vision_model(**joined).last_hidden_state  # (1, N, tiles, tokens, width)
        features = inner.multi_modal_projector(output)[0].flatten(1, 2)  # (N, tiles · tokens, H)
        return [list(pair) for pair in zip(features, joined["aspect_ratio_mask"][0], strict=True)]

    def idle(self, model: nn.Module) -> dict[str, Any]:
        """Give the image parameters a gradient of zero in a pass without images, because other processes may have images.

        Image parameters are the vision tower and, in families with cross-attention, the layers that attend to image
        features. A pass without images skips these parameters, so they get no gradient. DDP reduces gradients in the order
        in which they are ready. Other processes would therefore wait forever, or would reduce their gradients with the
        gradients of another parameter. To avoid this, a probe image is encoded and its features are multiplied by zero. A
        sharded tower is run even without gradients, because its layers are gathered from all processes.
        """
        trained = [w for w in tower_parameters(model).values() if w.requires_grad and torch.is_grad_enabled()]
        beside = [w for w in self._crossing(model) if w.requires_grad and torch.is_grad_enabled()]
        if not trained and gathers_in_forward(_tower(model)):
            with torch.no_grad():
                self._probe_sum(model)
        if not trained and not beside:
            return {}
        zero = 0 * sum((weight.flatten()[0] for weight in beside), self._probe_sum(model) if trained else 0)

        def add(embeddings: Any, inputs: Any, output: Tensor) -> Tensor:
            handle.remove()
            return output + zero.to(output.dtype)

        handle = model.get_input_embeddings().register_forward_hook(add)
        return {}

    def _crossing(self, model: nn.Module) -> list[Tensor]:
        """Return the parameters of the text model's cross-attention layers, or an empty list if the family has no
        cross-attention.
        """
        if not self.processor.family.cross:
            return []
        layers = model.model.language_model.layers
        return [
            weight for i in model.config.get_text_config().cross_attention_layers for weight in layers[i].parameters()
        ]

    def _probe_sum(self, model: nn.Module) -> Tensor:
        """Encode a small probe image, and return the sum of its features."""
        pictures = probe_pictures(self.processor)[:1]
        (levels,) = self._encode(model, pictures, {p: self.processor.expansion(p).count for p in pictures})
        return torch.stack([level.float().sum() for level in levels]).sum()

    def unreached(self, model: nn.Module) -> set[str]:
        """Return the names of tower parameters that do not influence the features. An example is the last layer for
        ``vision_feature_layer=-2``.
        """
        named = {name: parameter for name, parameter in tower_parameters(model).items() if parameter.requires_grad}
        if not named or self.processor.family.whole:
            return set()
        with torch.enable_grad():
            grads = torch.autograd.grad(self._probe_sum(model), list(named.values()), allow_unused=True)
        return {name for name, grad in zip(named, grads, strict=True) if grad is None}

    def _encode(self, model: nn.Module, pictures: list[Picture], counts: dict[Picture, int]) -> list[list[Tensor]]:
        """Return a list of tensors ``(tokens, H)`` for each image: the features, and the features of each deepstack level."""
        pixels = [self.given.get(picture) or self.processor.prepare(picture) for picture in pictures]
        self.given = {}
        if self.next is not None:
            self.next.given = dict(zip(pictures, pixels, strict=True))
        joined = for_tower(model, self.processor.join(pixels))
        if self.processor.family.cross:
            return self._beside(model, joined)
        self._listed, flat = image_features(model, joined)
        sizes = [counts[picture] for picture in pictures]
        if any(len(level) != sum(sizes) for level in flat):
            raise ModelError(
                f"PT-G004: the vision tower of {type(model).__name__} returned {len(flat[0])} features for images "
                f"with {sum(sizes)} placeholders ({', '.join(p.where for p in pictures)}). Fix: use the processor "
                "that belongs to this model."
            )
        return [list(parts) for parts in zip(*(level.split(sizes) for level in flat), strict=True)]

    def _output(self, levels: list[Tensor]) -> Any:
        """Return the features of all images of a pass in the format that the model's forward method expects."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        first, *deeper = self._listed
        # In transformers before 5.18, SmolVLM reads the second dimension of the tensor as the number of tokens per image.
        # The number of image tokens of each row must be a multiple of this number, so use 1.
        output: Any = BaseModelOutputWithPooling(pooler_output=[levels[0]] if first else levels[0][:, None])
        output.deepstack_features = [[x] if listed else x for x, listed in zip(levels[1:], deeper, strict=True)]
        return output

    def _recall(self, key: Any) -> list[Tensor] | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def _keep(self, key: Any, features: list[Tensor]) -> None:
        self._kept[key] = features
        self._size += sum(level.nbytes for level in features)
        while self._size > self.cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._size -= sum(level.nbytes for level in oldest)


def _shown(picture: Picture) -> tuple[str, str]:
    """Return the digest and the background of an image. The pixels depend on these two values. Use them as cache key,
    because the image object must not be part of a cache key.
    """
    return picture.digest, picture.background


def _state(weight: Tensor) -> tuple[int, int, float]:
    """Return a value that changes whenever the weight changes.

    Fused optimizers do not increase ``_version``, so the value also contains the sum of some elements of trained weights.
    """
    read = weight.detach().flatten()[:: max(1, weight.numel() // SAMPLES)] if weight.requires_grad else None
    return weight.data_ptr(), weight._version, 0.0 if read is None else float(read.double().sum())


def image_features(model: nn.Module, joined: Mapping[str, Tensor]) -> tuple[list[bool], list[Tensor]]:
    """Encode images. Return the features ``(sum of tokens, H)`` of the output and of each deepstack level. Also return, for
    each of them, whether the model returned them as a list.
    """
    encode = getattr(model, "get_image_features", None) or model.model.get_image_features
    output = encode(**joined, return_dict=True)
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [not isinstance(level, Tensor) for level in levels], [_flat(level) for level in levels]


def _accepts_features(model: nn.Module) -> bool:
    """Return whether the forward method has the argument ``mm_encoder_outputs``. Transformers 5.18 introduced this argument."""
    return "mm_encoder_outputs" in inspect.signature(model.forward).parameters


def _use_features(base: nn.Module, args: tuple[()], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Make ``get_image_features`` return ``mm_encoder_outputs`` during a forward pass of transformers before 5.18.

    The forward hook `_drop_features` restores ``get_image_features``.
    """
    features = kwargs.pop("mm_encoder_outputs", None)
    if features is not None:
        output = features["image"]
        # Pass any tensor as pixels. The forward method uses images only if it gets pixels, but the pixel values are not read.
        kwargs["pixel_values"] = output.pooler_output[0]
        base.get_image_features = lambda *_, **__: output
    return args, kwargs


def _drop_features(base: nn.Module, *_: object) -> None:
    vars(base).pop("get_image_features", None)


def traced_features(model: nn.Module, pixels: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return features for prepared images, computed on fake tensors.

    Some towers cannot run on fake tensors, because they read the values of tensors. For such towers, the result is a tensor
    with as many elements as the saved activations.

    Args:
        model: Model with fake tensors as parameters.
        pixels: Prepared images, see `posttrain.models.memory_estimate.Workload`.
        dtype: Dtype of the tower.
    """
    inputs = {
        name: torch.zeros(x.shape, dtype=dtype if x.is_floating_point() else x.dtype) if x.is_meta else x
        for name, x in pixels.items()
    }
    try:
        return torch.cat(image_features(model, inputs)[1])
    except (DynamicOutputShapeException, DataDependentOutputException):
        return torch.zeros(_tower_activations(model, pixels), dtype=dtype)


def _tower_activations(model: nn.Module, pixels: Mapping[str, Tensor]) -> int:
    """Return the number of activation elements that the tower saves. It is computed from the config as patches x width x
    layers.

    For each patch, a layer with checkpointing saves its input. A trained layer without checkpointing saves about 8 widths
    and 2 inner widths. A frozen layer saves nothing. In addition, the layer that is being computed needs 8 widths and 2
    inner widths.
    """
    config, trained = model.config.vision_config, any(p.requires_grad for p in tower_parameters(model).values())
    width = getattr(config, "embed_dim", None) or config.hidden_size
    inner = getattr(config, "intermediate_size", None) or int(width * getattr(config, "mlp_ratio", 4))
    layers = getattr(config, "num_hidden_layers", None) or config.depth
    size = config.patch_size
    first = pixels["pixel_values"]
    patches = len(first) if first.dim() == 2 else first.numel() // (3 * size**2)
    whole = 8 * width + 2 * inner
    recomputed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    each = (width if recomputed else whole) * layers if trained else 0
    return first.numel() + patches * (each + whole)


def _flat(features: Any) -> Tensor:
    """Flatten features to ``(tokens, H)``. ``features`` is a tensor ``(N, tokens, H)``, or a list with one tensor per image
    or row.
    """
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([tensor.flatten(0, -2) for tensor in features])


def probe_pictures(processor: PictureProcessor) -> list[Picture]:
    """Return images of three sizes. The first and the third are rotated."""
    return [processor.shaded(size, turned=i % 2 == 0) for i, size in enumerate(PROBED)]


def plain_inputs(model: nn.Module, sequence: Tensor, row: Row, index: int) -> dict[str, Tensor]:
    """Return the processor's inputs for one sequence ``(1, T)``: the prompt of a row and its completion ``index``."""
    encoder = picture_encoder(model)
    segments = [*row.pictures[:1], *row.pictures[index + 1 : index + 2]]
    pictures = [image.picture for segment in segments for image in segment]
    if encoder is None or not pictures:
        return {}
    return for_tower(model, encoder.processor.plain_inputs(sequence.cpu(), [pictures], len(row.prompt_ids)))


def prefill_inputs(model: nn.Module, ids: Tensor, placed: Sequence[Sequence[Placed]]) -> dict[str, Any]:
    """Return the inputs that ``generate`` needs in addition to token ids: image features, and the token types of the model
    family.

    Args:
        model: Model prepared with `install_pictures`.
        ids: Token ids ``(B, T)`` of all rows, padded on the left.
        placed: Images of each row. If an image occurs several times, it is encoded once.

    Raises:
        ModelError: The model was not prepared for images, or a row has another number of placeholders than its images need
            (PT-G011).
    """
    encoder = picture_encoder(model)
    if encoder is None:
        raise ModelError(f"{type(causal_lm(model)).__name__} is not prepared for images. Fix: call install_pictures.")
    inner, processor, at_pictures = causal_lm(model), encoder.processor, ids == encoder.processor.token_id
    wanted = [sum(image.count for image in row) for row in placed]
    if at_pictures.sum(1).tolist() != wanted:
        raise ModelError(
            f"PT-G011: prompts have {at_pictures.sum(1).tolist()} image placeholders, but their images need {wanted}."
        )
    if processor.family.cross or processor.family.whole or not _accepts_features(inner):
        # The model encodes images itself. In families with cross-attention, all rows of a call have the same number of
        # images.
        return encoder.whole(inner, ids, placed) | processor.token_types(ids, ids.shape[1])
    flat = [image for row in placed for image in row]
    inputs = encoder.inputs(inner, flat) | processor.token_types(ids, ids.shape[1])
    if processor.family.positions == "grid":
        merge = int(processor.processor.image_processor.merge_size)
        grids = [(image.grid[0], image.grid[1] * merge, image.grid[2] * merge) for image in flat if image.grid]
        inputs["image_grid_thw"] = torch.tensor(grids, device=ids.device)
    return inputs


def for_tower(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move inputs to the tower's device, and cast pixels to its dtype."""
    weight = next(iter(tower_parameters(model).values()))
    return {k: v.to(weight.device, weight.dtype if v.is_floating_point() else None) for k, v in inputs.items()}


def tower_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of vision tower and projector by name. These are all parameters that do not belong to the text
    model and its head.
    """
    return {name: parameter for name, parameter in causal_lm(model).named_parameters() if not _of_text(name)}


def _tower(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules of vision tower and projector."""
    return (module for name, module in causal_lm(model).named_modules() if name and not _of_text(name))


def _of_text(name: str) -> bool:
    return any(part in name.split(".") for part in LANGUAGE)


def frozen_parameters(model: nn.Module, choice: Any, *, images: bool) -> dict[str, nn.Parameter]:
    """Return the parameters of vision tower and projector that will be frozen, by name.

    These are the parameters that ``choice`` freezes, and the parameters that do not influence the loss.

    Args:
        model: Model without wrappers.
        choice: Value of the option ``freeze_vision``.
        images: Whether rows have images.
    """
    tower = tower_parameters(model)
    if choice is True or (choice == "auto" and not images):
        return tower
    chosen = {name for name in tower if choice == "tower" and not PROJECTOR & set(name.split("."))}
    encoder: PictureEncoder | None = model.__dict__.get("picture_encoder")
    unreached = encoder.unreached(model) if encoder is not None and choice != False else set()  # noqa: E712
    return {name: parameter for name, parameter in tower.items() if name in chosen | unreached}


def adapter_of_text(model: nn.Module, config: PretrainedConfig, choice: Any) -> Any:
    """Return a copy of an adapter config whose target modules are restricted to the text model.

    If ``choice`` is False, or the target modules are a regular expression, the config is returned unchanged.
    """
    if config is None or choice is False or not hasattr(config, "target_modules"):
        return config
    targets = config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        return config
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    text = {name for name in linear if set(LANGUAGE) & set(name.split(".")) and not name.endswith("lm_head")}
    if targets is None or targets == "all-linear":
        selected = text
    else:
        paths = {target for target in targets if "." in target}
        selected = paths | {name for name in text if name.rsplit(".", 1)[-1] in targets}
    narrowed = copy.deepcopy(config)
    narrowed.target_modules = selected
    logger.info(
        "the adapter is added to %d layers of the text model. Set freeze_vision=False to include the vision tower.",
        len(selected),
    )
    return narrowed


def freeze_tower(
    model: nn.Module, config: PretrainedConfig, choice: object, *, images: bool
) -> tuple[Any, list[nn.Parameter]]:
    """Apply the option ``freeze_vision``: freeze `frozen_parameters`, and restrict the adapter config with
    `adapter_of_text`. Return the adapter config and the frozen parameters.
    """
    config = adapter_of_text(model, config, choice)
    frozen = list(frozen_parameters(model, choice, images=images).values())
    for parameter in frozen:
        parameter.requires_grad_(False)
    return config, frozen


@torch.no_grad()
def install_pictures(model: nn.Module, processor: ProcessorMixin, *, cache_bytes: int = 2**30) -> PictureEncoder:
    """Prepare a model for batches with images. Return its image encoder.

    Args:
        model: Model with a vision tower, with or without wrappers.
        processor: Processor of `transformers` for this model.
        cache_bytes: Size of the feature cache in bytes.

    Raises:
        ModelError: PT-G004: processor and model differ in their family, their placeholder, or the number of features per
            image. The error is also raised for an unknown family if packed rows with images give other results than the
            processor's own inputs.
    """
    inner: Any = causal_lm(model)
    installed = picture_encoder(inner)
    if installed is not None:
        return installed
    encoder = PictureEncoder(PictureProcessor(processor), cache_bytes)
    family, config = encoder.processor.family, inner.config
    wanted = image_token(config)
    if config.model_type not in (family.models or (config.model_type,)) or wanted != encoder.processor.token_id:
        raise ModelError(
            f"PT-G004: {type(processor).__name__} is for {', '.join(family.models) or 'no known family'} with the placeholder id "
            f"{encoder.processor.token_id}, but the model is {config.model_type} with {wanted}. Fix: pass the processor of this "
            "model as processing_class."
        )
    if family.models:
        counts = {picture: encoder.processor.expansion(picture).count for picture in probe_pictures(encoder.processor)}
        for picture in counts:
            encoder._encode(inner, [picture], counts)
    inner.picture_encoder = encoder
    for base in () if _accepts_features(inner) else inner.children():
        if hasattr(base, "get_image_features"):
            base.register_forward_pre_hook(_use_features, with_kwargs=True)
            base.register_forward_hook(_drop_features, always_call=True)
    if not family.models:
        from posttrain.extensions.images.probe import prove_pictures

        prove_pictures(inner)
    return encoder


def refuse_skipped_layers(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise an error if a pass without images on one process could make other processes wait forever.

    Raises:
        ModelError: The model has cross-attention to images (Mllama) and sharded parameters. A process without images would
            then skip layers that other processes gather. The error is also raised if the model encodes images itself and
            its tower is sharded or trained.
    """
    encoder = picture_encoder(model)
    if encoder is None or accelerator.num_processes == 1:
        return
    family, sharded = encoder.processor.family, shards_parameters(accelerator)
    trained = any(weight.requires_grad for weight in tower_parameters(model).values())
    if (family.cross and sharded) or (family.whole and (sharded or trained)):
        raise ModelError(
            f"{type(causal_lm(model)).__name__} on {accelerator.num_processes} processes "
            f"({str(accelerator.distributed_type).rpartition('.')[2]}) is not supported. A pass without images skips layers, "
            "so processes with images would wait forever. Fix: use DDP or "
            f"ZeRO-2{', with freeze_vision=True' * family.whole}."
        )


def view(model: nn.Module, batch: Batch, columns: slice | None = None) -> PassInputs:
    """Return positions, bidirectional blocks and image features of a batch. For a batch without images, return the positions
    of its text.

    Args:
        model: Model prepared with `install_pictures` if the batch has images.
        batch: Batch of whole rows.
        columns: Columns whose image features this pass needs. Positions and blocks are always returned for whole rows.
            None: all columns.

    Raises:
        ModelError: The batch has images, but the model was not prepared for images. The error is also raised if the number
            of placeholders differs from the number that the images need (PT-G011).
    """
    encoder, placed = picture_encoder(model), [image for *_, image in batch.pictures]
    if encoder is None:
        if placed:
            raise ModelError(
                f"a batch has {len(placed)} images, but {type(model).__name__} is not prepared for images."
            )
        token = image_token(causal_lm(model).config)
        if token is not None and bool((batch.input_ids == token).any()):
            raise ModelError(
                f"PT-G011: a pass has the image placeholder {token} but no images, so "
                f"{type(causal_lm(model)).__name__} would use the embedding of the placeholder itself. Fix: put images in "
                "the column 'image' or 'images' or in messages, or remove the placeholder from the text. (A streamed dataset "
                "must have images in its first rows.)"
            )
        return PassInputs(batch.position_ids)
    at_pictures = batch.input_ids == encoder.processor.token_id
    if int(at_pictures.sum()) != sum(image.count for image in placed) or not all(
        at_pictures[b, c] for b, c, _ in batch.pictures
    ):
        raise ModelError(
            f"PT-G011: a pass has {int(at_pictures.sum())} image placeholders, but its {len(placed)} images need "
            f"{sum(image.count for image in placed)}. Fix: do not change rows after their images were placed."
        )
    if not placed:
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return PassInputs(batch.position_ids, inputs=encoder.idle if several else None)
    family = encoder.processor.family
    if family.whole:
        rows = [[image for b, _, image in batch.pictures if b == row] for row in range(len(batch.input_ids))]
        return PassInputs(None, inputs=lambda inner: encoder.whole(inner, batch.input_ids, rows))
    if family.cross:
        roots = sum(segment.parent < 0 for segment in batch.segments)
        branches = [segment for segment in batch.segments if segment.parent >= 0]
        if roots > 1 or any(
            branch.row == b and branch.start <= c < branch.stop for b, c, _ in batch.pictures for branch in branches
        ):
            raise ModelError(
                f"{type(causal_lm(model)).__name__}: a pass has several prompts, or an answer has images. A text would "
                "attend to all images of its row, including later images and images of other prompts. Fix: use images only in "
                "prompts."
            )
        return PassInputs(batch.position_ids, inputs=lambda inner: encoder.crossed(inner, batch, placed))
    positions = grid_positions(batch) if family.positions == "grid" else batch.position_ids
    spans = block_spans(batch, at_pictures, family.block) if family.block != "none" else None
    mask = None
    # Call nonzero() only for a part of the columns, because it waits for the device.
    if columns is not None:
        where = at_pictures.nonzero()[:, 1]  # (sum of tokens,), in the order of the features
        mask = (where >= columns.start) & (where < columns.stop)
    return PassInputs(positions, spans, lambda inner: encoder.inputs(inner, placed, mask))


def prompt_view(
    model: nn.Module, ids: Tensor, lengths: Sequence[int], placed: Sequence[Sequence[Placed]]
) -> PassInputs:
    """Return the `PassInputs` of a pass over prompts. Each row contains one prompt.

    Args:
        model: Model prepared with `install_pictures`.
        ids: Token ids ``(P, T)``, padded on the right.
        lengths: Number of tokens of each prompt.
        placed: Images of each prompt.
    """
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    real, none = columns < torch.tensor(lengths, device=ids.device)[:, None], torch.zeros_like(ids)
    pictures = [(row, image.start, image) for row, of_prompt in enumerate(placed) for image in of_prompt]
    until = real * torch.tensor(lengths, device=ids.device)[:, None]
    segments = tuple(Segment(row, 0, length, length, -1, 0) for row, length in enumerate(lengths))
    batch = Batch(ids, columns, until, none, none.bool(), none - 1, 0, segments, pictures=pictures)
    return view(model, batch)


def grid_positions(batch: Batch) -> Tensor:
    """Return the positions of all tokens in time, height and width, ``(3, B, T)``.

    An image advances positions by its longer side. The positions of a branch continue from the end of its prefix.

    Reference: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    positions = batch.position_ids.expand(3, -1, -1).clone()  # (3, B, T)
    columns = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    for b, c, image in batch.pictures:
        t, h, w = image.grid
        axes = torch.meshgrid(*(torch.arange(n, device=columns.device) for n in (t, h, w)), indexing="ij")
        later = (columns >= c + image.count) & (columns < batch.seen_until[b, c])
        positions[:, b, c : c + image.count] = positions[:, b, c, None] + torch.stack(axes).flatten(1)
        positions[:, b, later] += max(h, w) - image.count
    return positions


def block_spans(batch: Batch, placeholders: Tensor, block: str) -> Tensor:
    """Return the index of each token's bidirectional block, ``(B, T)``. Tokens outside of all blocks have the index -1.

    Args:
        batch: Packed batch.
        placeholders: Bool mask ``(B, T)`` of image placeholders.
        block: "image": adjacent placeholders are one block. "prompt": each prompt is one block.
    """
    if block == "prompt":
        number = torch.full_like(batch.sequence, -1)
        for index, segment in enumerate(batch.segments):
            number[segment.row, segment.start : segment.stop] = index
        return torch.where(batch.sequence < 0, number, -1)
    before = torch.nn.functional.pad(placeholders, (1, 0))[:, :-1]
    begins = placeholders & ~before
    for segment in batch.segments:
        begins[segment.row, segment.start] = placeholders[segment.row, segment.start]
    return torch.where(placeholders, begins.long().cumsum(1), -1)
