"""`OnlineTrainer`: prompts to rollouts to rewards to advantages to rows, for every method that generates as it trains."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from posttrain.algorithms.base import PostTrainer
from posttrain.algorithms.online_config import OnlineConfig
from posttrain.data.chat import terminal_token_ids
from posttrain.data.forest import collate, split_by_sequence
from posttrain.data.formats import is_conversational
from posttrain.data.prompts import check_prompts
from posttrain.data.samplers import RepeatSampler, repeat_iterable_dataset
from posttrain.data.tokenize import tokenize_prompts
from posttrain.errors import ConfigError, DataError
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.reference import Reference
from posttrain.rewards.base import RewardRunner, RewardTable
from posttrain.rollouts.base import RolloutEngine, create_engine
from posttrain.rollouts.generation import Generation
from posttrain.types import Batch, Request, Row, Sampling

__all__ = ["Generation", "OnlineConfig", "OnlineTrainer"]

logger = logging.getLogger(__name__)


class OnlineTrainer(PostTrainer):
    """Adds generation, scoring and the buffer of scored rollouts to the training loop.

    A subclass gives ``advantages(table) -> Tensor`` over the global rows and the objective.
    """

    config_class: ClassVar[type[OnlineConfig]] = OnlineConfig
    zero_gradient_is_normal = True
    args: OnlineConfig

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: OnlineConfig | None = None,
        *,
        reward_processing_classes: Any = None,
        rollout_engine: RolloutEngine | None = None,
        **kwargs: Any,
    ) -> None:
        self.rewards = RewardRunner(
            reward_funcs,
            reward_weights=args.reward_weights if args is not None else None,
            processing_classes=reward_processing_classes,
        )
        self._step = 0
        self._generations = 0
        self._buffer: list[list[Row]] | None = None
        self._buffer_born = 0
        super().__init__(model, args, **kwargs)
        self.stop_ids = terminal_token_ids(self.processing_class, getattr(self.model, "generation_config", None))
        self.engine = rollout_engine or create_engine(
            self.args.rollout_engine, self.accelerator.unwrap_model(self.model), pad_token_id=self.pad_token_id
        )
        self.reference = Reference(self.model, fresh_adapter=self.fresh_adapter) if self.args.beta else None
        if self.reference is not None and self.reference.copy is not None:
            self.reference.copy.to(self.args.device)
        self._check_context()

    # Before the model loads --------------------------------------------------------------------------------------

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Refuse prompts that cannot be generated from, then try the reward functions on two rows."""
        head: list[dict[str, Any]] = []
        for name, dataset in {"train_dataset": train, **_splits(evaluation)}.items():
            rows = check_prompts(dataset, name, self.processing_class)
            head = head or rows
        self._check_dataset_size(train)
        if self.args.check_rewards:
            self.rewards.dry_run(head[:2], conversational=is_conversational(head[0]))
        return train, evaluation

    def _check_dataset_size(self, train: Any) -> None:
        if not isinstance(train, datasets.Dataset):
            return
        args = self.args
        wanted = (args.generation_batch_size or 0) // args.num_generations
        if len(train) < wanted:
            raise ConfigError(
                f"train_dataset has {len(train)} prompts, but one generation takes {wanted} (generation_batch_size="
                f"{args.generation_batch_size} / num_generations={args.num_generations}): nothing would ever be trained. "
                f"Give at least {wanted} prompts, or lower per_device_train_batch_size or gradient_accumulation_steps."
            )
        dropped = len(train) % wanted
        if dropped > 0.05 * len(train):
            logger.warning(
                "%d of %d prompts do not fill a last generation of %d and are skipped in every epoch.",
                dropped,
                len(train),
                wanted,
            )

    def _check_context(self) -> None:
        text: Any = self.model.config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None)
        if limit is not None and self.args.max_completion_length >= limit:
            raise ConfigError(
                f"max_completion_length={self.args.max_completion_length} leaves no room for a prompt in the model's context "
                f"of {limit} tokens. Lower it."
            )

    # Loaders -----------------------------------------------------------------------------------------------------

    def collator(self) -> Any:
        """Rows stay rows until their completions exist."""
        return list

    def get_train_dataloader(self) -> DataLoader:
        """Batches of ``per_device_train_batch_size * steps_per_generation`` rows, every prompt repeated G times."""
        args, dataset = self.args, self.train_dataset
        if isinstance(dataset, datasets.IterableDataset):
            shuffled = dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
            dataset = repeat_iterable_dataset(shuffled, args.num_generations, *self._repeats())
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self._train_batch_size * (args.steps_per_generation or 1),
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _repeats(self) -> tuple[int, int]:
        args = self.args
        prompts = (args.generation_batch_size or 0) // args.num_generations
        return prompts, args.num_iterations * (args.steps_per_generation or 1)

    def _get_train_sampler(self, train_dataset: Any = None) -> RepeatSampler:
        prompts, repeats = self._repeats()
        return RepeatSampler(
            train_dataset if train_dataset is not None else self.train_dataset,
            mini_repeat_count=self.args.num_generations,
            batch_size=prompts,
            repeat_count=repeats,
            shuffle=self.args.shuffle_dataset,
            seed=self.args.seed,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> RepeatSampler:
        return RepeatSampler(eval_dataset, mini_repeat_count=self._group_size("eval"), seed=self.args.seed)

    def _group_size(self, mode: str) -> int:
        args = self.args
        return (args.num_generations_eval or args.num_generations) if mode == "eval" else args.num_generations

    # Micro-batches -----------------------------------------------------------------------------------------------

    def micro_batch(self, inputs: list[dict[str, Any]], index: int) -> list[Batch]:
        """The next slice of the buffer; a new generation first, when the buffer is used up."""
        args = self.args
        slices = args.steps_per_generation or 1
        if self._buffer is None or self._step % (slices * args.num_iterations) == 0:
            generation = self.generate_and_score(inputs, "train")
            self._buffer, self._buffer_born = self._slices(generation, slices), self.state.global_step
        rows = self._buffer[self._step % slices]
        self._step += 1
        self.log_metrics_now({"staleness/mean_updates": mean(float(self.state.global_step - self._buffer_born))})
        return collate(rows, pad_token_id=self.pad_token_id, layout=self.layout)

    def _slices(self, generation: Generation, count: int) -> list[list[Row]]:
        """Whole groups in random order, cut into ``count`` equal slices (a group may straddle two)."""
        groups = generation.groups()
        generator = torch.Generator().manual_seed(self.args.seed + self._generations)
        order = [i for g in torch.randperm(len(groups), generator=generator).tolist() for i in groups[g]]
        size = len(order) // count
        skip = self.args.mask_truncated_completions
        return [generation.rows(order[k * size : (k + 1) * size], skip_truncated=skip) for k in range(count)]

    def eval_batches(self, inputs: list[dict[str, Any]]) -> list[Batch]:
        """Generate, score and collate one evaluation batch."""
        generation = self.generate_and_score(inputs, "eval")
        rows = generation.rows(range(len(generation.rollouts)), skip_truncated=self.args.mask_truncated_completions)
        return collate(rows, pad_token_id=self.pad_token_id, layout=self.layout)

    # Generation and scoring --------------------------------------------------------------------------------------

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> Generation:
        """Sample a completion for each (already repeated) example, score it, and attach what the loss needs."""
        generation = self.generate(examples, mode)
        table, start = self.score(generation, mode)
        advantages = self.advantages(table, self._group_size(mode), mode)
        stop = start + len(generation.rollouts)
        generation.advantages = advantages[start:stop].tolist()
        self._attach_logps(generation, mode)
        self.record.add_completions(self._completion_rows(generation, table, start), evaluation=mode == "eval")
        return generation

    def advantages(self, table: RewardTable, group_size: int, mode: str) -> Tensor:
        """``(n,)`` advantages of the rows of all ranks; the heart of a subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define advantages(table, group_size, mode).")

    def generate(self, examples: list[dict[str, Any]], mode: str) -> Generation:
        """One completion per example; equal neighbours share their prompt."""
        begin = time.perf_counter()
        prompts = tokenize_prompts(
            examples, self.processing_class, chat_template_kwargs=self.args.chat_template_kwargs or {}
        )
        requests: list[Request] = []
        for prompt in prompts:
            if requests and requests[-1].prompt_ids == prompt:
                requests[-1] = Request(prompt, requests[-1].n + 1)
            else:
                requests.append(Request(prompt, 1))
        self._check_lengths(requests)
        with self.inference(), parallel.whole_parameters(self.model_wrapped, self.accelerator):
            rollouts = self.engine.generate(requests, self.sampling(mode))
        self._generations += mode == "train"
        texts = self.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        for rollout, text in zip(rollouts, texts, strict=True):
            rollout.text = text
        chat = is_conversational(examples[0])
        completions = [[{"role": "assistant", "content": t}] if chat else t for t in texts]
        generation = Generation(examples, rollouts, completions, born=self.state.global_step)
        self._log_lengths(generation, mode, time.perf_counter() - begin)
        return generation

    def sampling(self, mode: str) -> Sampling:
        """Sampling settings of the next call; the seed is a function of the run's seed, the rank and the call's number."""
        args = self.args
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        number = self._generations if mode == "train" else 10_000_019 + self.state.global_step
        settings: dict[str, Any] = {
            "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "stop_token_ids": self.stop_ids,
            "seed": (args.seed * 1_000_003 + number * world + rank) % 2**63,
        }
        overrides = dict(args.generation_kwargs or {})
        overrides.pop("do_sample", None)
        unknown = sorted(set(overrides) - set(settings))
        if unknown:
            raise ConfigError(f"generation_kwargs has unknown keys {unknown}. Known: {sorted(settings)}.")
        return Sampling(**(settings | overrides))

    def _check_lengths(self, requests: list[Request]) -> None:
        text: Any = self.model.config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None)
        longest = max(len(request.prompt_ids) for request in requests)
        if limit is not None and longest + self.args.max_completion_length > limit:
            raise DataError(
                f"a prompt of {longest} tokens plus max_completion_length={self.args.max_completion_length} does not fit the "
                f"model's context of {limit} tokens. Drop or shorten the prompt, or lower max_completion_length."
            )

    def score(self, generation: Generation, mode: str) -> tuple[RewardTable, int]:
        """Rewards of all ranks' rows, and where this rank's rows start among them."""
        reserved = ("prompt", "completion", "completion_ids")
        columns = {k: [e.get(k) for e in generation.examples] for k in generation.examples[0] if k not in reserved}
        table = parallel.run_and_share(
            lambda: self.rewards(
                prompts=[example["prompt"] for example in generation.examples],
                completions=generation.completions,
                completion_ids=[rollout.token_ids for rollout in generation.rollouts],
                columns=columns,
                trainer_state=self.state,
            ),
            self.accelerator,
        )
        counts = parallel.all_gather_objects([len(generation.rollouts)], self.accelerator)
        rows = parallel.all_gather_objects(table.values.tolist(), self.accelerator)
        self.log_metrics_now(table.metrics, mode)
        whole = dataclasses.replace(table, values=torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1))
        return whole, sum(counts[: self.accelerator.process_index])

    def _attach_logps(self, generation: Generation, mode: str) -> None:
        """Old log-probs where the buffer outlives its weights, reference log-probs where a KL is charged."""
        args = self.args
        slices = args.steps_per_generation or 1
        rows = generation.rows(range(len(generation.rollouts)), skip_truncated=False)
        if mode == "train" and args.gradient_accumulation_steps % (slices * args.num_iterations):
            with self.inference() as policy:
                generation.token_columns["old_logp"] = self.logps(policy, rows)
        if self.reference is not None:
            with self.inference() as policy, self.reference.active(policy) as reference:
                generation.token_columns["ref_logp"] = self.logps(reference, rows)

    @torch.no_grad()
    def logps(self, model: nn.Module, rows: list[Row]) -> list[list[float]]:
        """Per-token log-probs of every completion, by the same forward that trains."""
        device, temperature = self.args.device, self.args.temperature
        result: dict[int, list[float]] = {}
        for batch in collate(rows, pad_token_id=self.pad_token_id, layout=self.layout):
            batch = batch.to(device)
            logp = forward(model, batch, temperature=temperature).logp
            for origin, values in zip(batch.origin, split_by_sequence(logp, batch), strict=True):
                result[origin] = values.tolist()
        return [result[i] for i in range(len(result))]

    # Metrics -----------------------------------------------------------------------------------------------------

    def _log_lengths(self, generation: Generation, mode: str, seconds: float) -> None:
        lengths = torch.tensor([float(sum(generation.loss_mask(i, False))) for i in range(len(generation.rollouts))])
        ended = torch.tensor([r.finish_reason == "stop" for r in generation.rollouts])
        metrics: dict[str, Metric] = {
            "completions/mean_length": mean(lengths),
            "completions/min_length": minimum(lengths),
            "completions/max_length": maximum(lengths),
            "completions/clipped_ratio": mean((~ended).float()),
            "completions/mean_terminated_length": mean(lengths, ended),
            "completions/min_terminated_length": minimum(lengths[ended]),
            "completions/max_terminated_length": maximum(lengths[ended]),
            "rollouts/tokens_per_second": mean(float(lengths.sum()) / max(seconds, 1e-9)),
            "rollouts/seconds": mean(seconds),
        }
        if self.args.mask_truncated_completions:
            metrics["completions/masked_ratio"] = mean((~ended).float())
        self.log_metrics_now(metrics, mode)
        if mode == "train":
            tokens = float(lengths.sum()) + sum(len(r.prompt_ids) for r in generation.rollouts)
            self.counters["num_tokens"] += parallel.all_reduce_sum([tokens], self.accelerator)[0]

    def count_tokens_seen(self, tokens: float) -> None:
        """Counted at generation instead, each prompt once per completion."""

    def _completion_rows(self, generation: Generation, table: RewardTable, start: int) -> list[dict[str, Any]]:
        rows = []
        for i, rollout in enumerate(generation.rollouts):
            rewards = dict(zip(table.names, table.values[start + i].tolist(), strict=True))
            extra = {name: column[i] for name, column in table.extra_columns.items()}
            prompt = self.processing_class.decode(rollout.prompt_ids)
            advantage = generation.advantages[i]
            rows.append(
                {
                    "step": self.state.global_step,
                    "prompt": prompt,
                    "completion": rollout.text,
                    **rewards,
                    **extra,
                    "advantage": advantage,
                }
            )
        return rows

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """Where the run stands inside its window, with the scored rollouts it has not trained yet."""
        buffer = None if self._buffer is None else [[dataclasses.asdict(row) for row in rows] for rows in self._buffer]
        online = {"step": self._step, "generations": self._generations, "born": self._buffer_born, "buffer": buffer}
        return super().state_to_save() | {"online": online}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        online = state["online"]
        self._step, self._generations, self._buffer_born = online["step"], online["generations"], online["born"]
        buffer = online["buffer"]
        self._buffer = None if buffer is None else [[Row(**row) for row in rows] for rows in buffer]


def _splits(evaluation: Any) -> dict[str, Any]:
    if evaluation is None:
        return {}
    if isinstance(evaluation, dict):
        return {f"eval_dataset[{key!r}]": value for key, value in evaluation.items()}
    return {"eval_dataset": evaluation}
