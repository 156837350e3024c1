"""What each process of the refusal tests runs: a first batch that one finds fault with, or rows that all or one cannot read."""

import os
import sys
import time

import datasets
from accelerate import PartialState

from posttrain import DataError, PreflightError
from posttrain.checks import registry as core
from posttrain.models import parallel
from tests.conftest import build_tokenizer
from tests.methods.helpers import sft
from tests.ranks import leave, part

looked = []


@core.probe("first_batch", "PT-D001")
def fault(context):
    """Seen by one."""
    looked.append(True)
    yield core.Finding("PT-D001", "error", "seen by one", "here", "why.", "fix.")


def unsendable():
    """An error that no other process could read, on one of them."""

    class Local(Exception):
        pass

    if not PartialState().is_main_process:
        raise Local("of process one alone")


def main(kind, folder):
    """Train until refused, and leave what each rank heard."""
    heard, begun = {}, time.monotonic()
    alone = kind == "alone" and os.environ["RANK"] == "1"
    try:
        rows = {"txt": "no column that is known"} if alone else {"input_ids": [1, 99999]}
        data = datasets.Dataset.from_list([rows] * 8) if kind == "data" or alone else None
        sft(folder, build_tokenizer(), data=data, use_cpu=True).train()
    except PreflightError as error:
        heard = {"code": error.findings[0].code, "said": str(error), "looked": bool(looked)}
    except DataError as error:
        heard = {"said": str(error), "seconds": time.monotonic() - begun}
    if kind == "alone":
        try:
            parallel.run_and_share(unsendable, PartialState())
        except Exception as error:
            heard |= {"then": str(error), "kind": type(error).__name__}
    everyone = parallel.all_gather_objects([heard], PartialState())
    if PartialState().is_main_process:
        leave(everyone)


if __name__ == "__main__":
    main(*sys.argv[1:])
    part()
