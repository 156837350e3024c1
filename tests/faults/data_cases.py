"""Faults of data, templates, tokenizers and pairs."""

from __future__ import annotations

import datasets

from tests.faults import build
from tests.faults.scene import Case, Scene


def wrong_column(scene: Scene) -> None:
    """The text stands in a column of another name."""
    build.sft(scene, datasets.Dataset.from_list([{"txt": "What is the answer?"}] * 8))


def no_rows(scene: Scene) -> None:
    """A filter left nothing."""
    build.sft(scene, build.chats().select([]))


def empty_messages(scene: Scene) -> None:
    """Half of the conversations have no turn."""
    build.sft(scene, build.chats(change=lambda i, row: {"messages": []} if i % 2 else None))


def no_assistant(scene: Scene) -> None:
    """Conversations that nobody answers."""
    build.sft(scene, build.chats(change=lambda i, row: {"messages": row["messages"][:1]}), assistant_only_loss=True)


def missing_text(scene: Scene) -> None:
    """None where a completion should be."""
    build.sft(scene, build.texts(change=lambda i, row: row | {"completion": None} if i == 3 else None))


def empty_completions(scene: Scene) -> None:
    """A third of the answers is empty."""
    build.sft(scene, build.texts(change=lambda i, row: row | {"completion": ""} if i % 3 == 0 else None))


def doubled_bos(scene: Scene) -> None:
    """Texts that hold the bos token already, tokenised with special tokens on."""
    scene.tokenizer.bos_token = "<|endoftext|>"
    rows = [{"text": f"<|endoftext|><|endoftext|>{build.words(8, i)}"} for i in range(12)]
    build.sft(scene, datasets.Dataset.from_list(rows))


def eos_untrained(scene: Scene) -> None:
    """The template's mask ends before the token that ends the turn."""
    scene.tokenizer.chat_template = scene.tokenizer.chat_template.replace(
        "{{- message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{- message['content'] }}{% endgeneration %}{{- '<|im_end|>' }}",
    )
    build.sft(scene, assistant_only_loss=True)


def no_template(scene: Scene) -> None:
    """Conversations, and a tokenizer that cannot render them."""
    scene.tokenizer.chat_template = None
    build.sft(scene)


def broken_template(scene: Scene) -> None:
    """A template that does not parse."""
    scene.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }"
    build.sft(scene)


def all_cut(scene: Scene) -> None:
    """Prompts longer than max_length: no answer is left."""
    build.sft(scene, build.texts(), max_length=6)


def foreign_ids(scene: Scene) -> None:
    """Rows tokenised with another, larger tokenizer."""
    build.sft(scene, datasets.Dataset.from_list([{"input_ids": [5, 40_000 + i, 7, 2]} for i in range(8)]))


def damaged(scene: Scene) -> None:
    """A file read in a wrong encoding."""
    build.sft(
        scene, build.texts(change=lambda i, row: row | {"completion": " caf\ufffd \ufffd\ufffd"} if i % 2 else None)
    )


def repeats(scene: Scene) -> None:
    """Half of the rows are copies."""
    rows = list(build.texts(8))
    build.sft(scene, datasets.Dataset.from_list(rows + rows))


def small_embedding(scene: Scene) -> None:
    """A tokenizer with more tokens than the model has rows."""
    policy = build.model(scene)
    scene.tokenizer.add_tokens([f"<extra{i}>" for i in range(5)])
    build.sft(scene, build.texts(change=lambda i, row: row | {"completion": f" <extra{i % 5}>."}), policy=policy)


def pad_is_eos(scene: Scene) -> None:
    """Pad equal to eos in the tokenizer, where masks made of pad ids would drop the end of every answer."""
    policy = build.model(scene)
    scene.tokenizer.pad_token = scene.tokenizer.eos_token
    policy.generation_config.pad_token_id = scene.tokenizer.eos_token_id
    build.sft(scene, policy=policy, save_strategy="steps", save_steps=1, max_steps=1)


def too_long(scene: Scene) -> None:
    """Rows beyond the positions that the model has."""
    policy = build.model(scene, max_position_embeddings=16)
    build.sft(scene, policy=policy, max_length=None)


def equal_pairs(scene: Scene) -> None:
    """Chosen and rejected are the same."""
    build.dpo(scene, build.pairs(change=lambda i, row: row | {"rejected": row["chosen"]}))


def both_orders(scene: Scene) -> None:
    """The same two answers are preferred both ways."""
    rows = list(build.pairs(16))
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:4]]
    build.dpo(scene, datasets.Dataset.from_list(rows + turned))


def flipped(share: float):
    """Pairs whose scores contradict their order, in so many of a hundred."""

    def act(scene: Scene) -> None:
        every = round(1 / share)
        columns = {
            "chosen_score": lambda i: 2.0 if i % every == 0 else 8.0 + i % 3,
            "rejected_score": lambda i: 9.0 if i % every == 0 else 3.0 + i % 2,
        }
        build.dpo(scene, build.pairs(40, **columns))

    return act


def missing_side(scene: Scene) -> None:
    """Pairs without rejected answers."""
    build.dpo(scene, build.pairs().remove_columns("rejected"))


def length_only(scene: Scene) -> None:
    """The chosen answer is always the longer one."""
    build.dpo(scene, build.pairs(40, change=lambda i, row: row | {"chosen": row["chosen"] + " " + build.words(9, i)}))


def one_label(scene: Scene) -> None:
    """Judged answers that are all good."""
    rows = [row | {"label": True} for row in build.texts(16)]
    build.kto(scene, datasets.Dataset.from_list(rows))


def both_labels(scene: Scene) -> None:
    """The same answers judged good and bad."""
    rows = [row | {"label": label} for row in build.texts(8) for label in (True, False)]
    build.kto(scene, datasets.Dataset.from_list(rows))


CASES = (
    Case("data", "wrong column name", wrong_column, r"txt|column", "data"),
    Case("data", "no rows", no_rows, r"empty|no rows|0 rows|holds no", "data"),
    Case("data", "half of the conversations empty", empty_messages, r"messages", "data"),
    Case("data", "no assistant turn, loss on answers", no_assistant, r"assistant|PT-D0(05|14)", "data"),
    Case("data", "None for a completion", missing_text, r"completion", "data"),
    Case("data", "empty completions", empty_completions, r"PT-D006|PT-D014|empty", "data"),
    Case("data", "bos doubled", doubled_bos, r"PT-D002|bos", "data"),
    Case("data", "every answer cut off", all_cut, r"max_length|PT-D005|PT-D014", "data"),
    Case("data", "ids of another tokenizer", foreign_ids, r"the tokenizer's ids|PT-D001", "data"),
    Case("data", "damaged characters", damaged, r"PT-D009", "data"),
    Case("data", "every row twice", repeats, r"PT-D007", "data"),
    Case("data", "rows longer than the model's positions", too_long, r"PT-T003|positions", "first batch"),
    Case("template", "eos never trained", eos_untrained, r"PT-D004|not learn to stop", "data"),
    Case("template", "no chat template", no_template, r"chat.template", "data"),
    Case("template", "template that does not parse", broken_template, r"template", "data"),
    Case("tokenizer", "more tokens than embedding rows", small_embedding, r"embedding", "first batch"),
    Case("tokenizer", "pad equals eos", pad_is_eos, r"PT-K101", "step 1"),
    Case("data", "chosen equals rejected", equal_pairs, r"PT-D01[23]|equal", "data"),
    Case("data", "pairs in both orders", both_orders, r"PT-D035", "data"),
    Case("data", "5 % of the pairs flipped", flipped(0.05), r"score", "data"),
    Case("data", "20 % of the pairs flipped", flipped(0.2), r"score", "data"),
    Case("data", "50 % of the pairs flipped", flipped(0.5), r"score", "data"),
    Case("data", "no rejected answers", missing_side, r"rejected", "data"),
    Case("data", "longer is always better", length_only, r"PT-D022", "data"),
    Case("data", "judged answers of one label", one_label, r"label", "data"),
    Case("data", "answers judged both ways", both_labels, r"PT-D026", "data"),
)
