"""A game as an environment: the model plays 2048 by calling a tool, and the board's score is what it learns from."""

import random
import sys

from posttrain import GRPOConfig, GRPOTrainer

RULES = "2048: every move slides all tiles one way; equal neighbours merge and score their sum. Play on with move.\n"


def slide(row: list[int]) -> tuple[list[int], int]:
    """One row pushed to its left end, and what its merges score: [2, 2, 0, 4] becomes [4, 4, 0, 0] and scores 4."""
    tiles, merged, score = [tile for tile in row if tile], [], 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            score += tile
        merged.append(tile)
    return merged + [0] * (len(row) - len(merged)), score


class Game2048:
    """The game of 2048, as an environment: `reset` begins, `move` is the model's tool, `score` what it has reached."""

    def reset(self, group_seed: int = 0, **row) -> str:
        """A new board; completions that are compared with each other get the same one."""
        self.draw, self.board = random.Random(group_seed), [[0] * 4 for _ in range(4)]
        self.score, self.moves, self.done = 0, 0, False
        for _ in range(2):
            self._place()
        return RULES + self._shown()

    def move(self, direction: str) -> str:
        """Slide all tiles.

        Args:
            direction: One of left, right, up, down.
        """
        if direction not in ("left", "right", "up", "down"):
            raise ValueError("direction must be left, right, up or down")
        board, gained = self._after(direction)
        if board == self.board:
            return "Nothing moves that way.\n" + self._shown()
        self.board, self.score, self.moves = board, self.score + gained, self.moves + 1
        self._place()
        self.done = all(self._after(way)[0] == self.board for way in ("left", "right", "up", "down"))
        return self._shown()

    def _after(self, direction: str) -> tuple[list[list[int]], int]:
        """The board after a move without a new tile, and the move's score."""
        lines = [list(line) for line in (zip(*self.board, strict=True) if direction in ("up", "down") else self.board)]
        back = direction in ("right", "down")
        slid = [slide(line[::-1] if back else line) for line in lines]
        lines = [line[::-1] if back else line for line, _ in slid]
        board = [list(line) for line in zip(*lines, strict=True)] if direction in ("up", "down") else lines
        return board, sum(score for _, score in slid)

    def _place(self) -> None:
        y, x = self.draw.choice([(y, x) for y in range(4) for x in range(4) if not self.board[y][x]])
        self.board[y][x] = 4 if self.draw.random() < 0.1 else 2

    def _shown(self) -> str:
        return "\n".join(" ".join(str(tile or ".") for tile in row) for row in self.board) + f"\nscore {self.score}"


def score(environments: list, **_) -> list[float]:
    """What the game says. Scores run into the thousands: log1p keeps one lucky game from taking all the credit."""
    return [float(game.score + game.moves) for game in environments]


def make_trainer(model, output_dir: str, steps: int = 50, processing_class=None, **options) -> GRPOTrainer:
    """GRPO on the game alone: no dataset, 8 games on each of 4 boards a step."""
    sizes = {"num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": 1024}
    config = GRPOConfig(output_dir, max_steps=steps, reward_transform=["log1p"], **(sizes | options))
    return GRPOTrainer(model, score, config, processing_class=processing_class, environment_factory=Game2048)


if __name__ == "__main__":
    make_trainer(sys.argv[1], "runs/game_2048").train()  # A model trained with tools, such as Qwen3-0.6B.
