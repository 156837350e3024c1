"""What each process of the test of asynchronous ranks runs: three steps on rollouts that the first one alone has."""

import sys

from posttrain.extensions.asynchronous import rollouts
from tests.conftest import build_tokenizer
from tests.extensions.asynchronous.helpers import Recovering, sample, trainer
from tests.ranks import leave, part, step_taken, weights


def main(folder, batch):
    """Train, and leave what became of the weights; in the second step servers lack theirs, and all ranks push again."""
    rollouts.LOOK_S = 0.01

    def make(number, version):
        if number == 6:
            return None
        written = range(7, 9 + 3 * (number % 4))  # Of uneven lengths, so that ranks have unequal numbers of tokens.
        return sample(number, version, prompt=(1, 5, 9 + number), written=written, advantage=0.5 - number % 3)

    transfer = Recovering(lacks=1)
    run = trainer(
        folder, build_tokenizer(), make, weight_transfer=transfer, per_device_train_batch_size=batch, optim="sgd",
        learning_rate=0.5, use_cpu=True,
    )  # fmt: skip
    before = weights(run)
    run.train()
    if run.accelerator.is_main_process:
        leave(step_taken(run, before) | {"calls": transfer.calls, "account": run.account()})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    part()
