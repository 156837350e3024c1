"""Notes about code that runs, but behaves differently than in older TRL releases. `changed_defaults` lists options whose
default changed. `PACKING` and `EOS` are notes about packing and the EOS token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from posttrain.compat.trl_names import rows

WRAPPED = 'packing_strategy="wrapped"'
PACKING = (
    'packing: TRL up to 0.18 joined rows and cut them at max_length, which is now packing_strategy="wrapped". The default '
    '"bfd" truncates rows that are longer than max_length. Set packing_strategy.'
)
EOS = (
    "SFTTrainer: TRL 0.7 to 0.15 appended no EOS token to plain text that is not packed. posttrain appends one and trains it, as "
    "TRL has done since 0.16. To train without it, pass tokenized rows (input_ids)."
)
# Arguments that TRL removed before it added packing_strategy. A script that uses one of them was written for an older release.
REMOVED = {"tokenizer", "max_seq_length", "evaluation_strategy", "num_of_sequences", "chars_per_token"}


def changed_defaults(kind: type, given: Collection[str]) -> str:
    """Return a note about the unset options of a config whose default changed. It contains the old defaults, or is empty."""
    owners = {base.__name__ for base in kind.__mro__} | {"Config"}
    names = {item.name for item in fields(kind)} - {*given}
    defaults = []
    for row in rows():
        owner, _, name = row.name.partition(".")
        if row.kind == "default" and owner in owners and name in names:
            releases = "-".join(dict.fromkeys(row.releases.split("-")))
            defaults.append(f"{name}={row.replacement} [TRL {releases}]")
    text = ", ".join(defaults)
    return text and f"{kind.__name__}: some defaults changed. To keep the older values, set {text}."
