"""What each process of the refusal tests runs: a first batch that the main process finds fault with, or rows nobody can read."""

import sys

import datasets
from accelerate import PartialState

from posttrain import DataError, PreflightError
from posttrain.checks import core
from posttrain.models import parallel
from tests.algorithms.helpers import sft
from tests.conftest import build_tokenizer
from tests.ranks import leave, part

looked = []


@core.probe("first_batch", "PT-D001")
def fault(context):
    """Seen by one."""
    looked.append(True)
    yield core.Finding("PT-D001", "error", "seen by one", "here", "why.", "fix.")


def main(kind, folder):
    """Train until refused, and leave what each rank heard."""
    heard = {}
    try:
        data = datasets.Dataset.from_list([{"input_ids": [1, 99999]}] * 8) if kind == "data" else None
        sft(folder, build_tokenizer(), data=data, use_cpu=True).train()
    except PreflightError as error:
        heard = {"code": error.findings[0].code, "said": str(error), "looked": bool(looked)}
    except DataError as error:
        heard = {"said": str(error)}
    everyone = parallel.all_gather_objects([heard], PartialState())
    if PartialState().is_main_process:
        leave(everyone)


if __name__ == "__main__":
    main(*sys.argv[1:])
    part()
