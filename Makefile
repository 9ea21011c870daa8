# Each target does its own set-up: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
GPU_WORKERS ?= 8

.PHONY: setup demo test test-variant test-trainers test-slow test-gpu lint format bench studies readme docs clean

setup: $(READY)

# What users need; who only wants to see the demo does not wait for the tools of developers.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report]'
	touch $(RUNS)

$(READY): $(RUNS)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# Triton's interpreter runs kernels for CUDA in tests (tests/interpreter.py). It wants an older numpy: both in a folder of their own.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton triton==3.6.0 numpy==2.2.6
	touch $(READY)

demo: $(RUNS)
	$(BIN)/lowp demo

# Passive: threads that wait do not take the other worker's core. Bytecode is kept, also where the environment says otherwise:
# tests start hundreds of processes, and each would compile lowp's sources again.
test test-variant test-trainers test-slow: export PYTHONDONTWRITEBYTECODE =

test: setup
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal

# The tests that compare bits, as a processor with other vector instructions would compute them: torch, oneDNN and MKL each have
# a switch. (MKL_ENABLE_INSTRUCTIONS does nothing on AMD's processors; MKL_CBWR works on all.) LOWP_MARCH is that of our kernels.
test-variant: SHORT_VECTORS = $(if $(filter x86_64,$(shell uname -m)),x86-64,native)
test-variant: setup
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE LOWP_MARCH=$(SHORT_VECTORS) OMP_NUM_THREADS=1 \
	  OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal -m 'other_cpu and not slow and not gpu'

# lowp.integrations against the real libraries, and every script of examples/, on two ranks.
test-trainers: setup
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal -m 'trainers and not slow'

test-slow: setup
	$(BIN)/pytest -m slow --timeout 3600

# On a machine with a CUDA device. Without network there: make test-gpu PYTEST="python3 -m pytest".
ifdef PYTEST
test-gpu:
else
test-gpu: PYTEST = $(BIN)/pytest
test-gpu: setup
endif
	PYTHONPATH=src $(PYTEST) -p no:benchmark -m gpu -n $(GPU_WORKERS) --dist worksteal --ignore tests/gpu/test_nccl.py --ignore tests/peers
	# By themselves: processes that share a GPU take turns, and ranks that wait for their turn seem to hang.
	PYTHONPATH=src $(PYTEST) -p no:benchmark -m gpu -n 1 tests/gpu/test_nccl.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --only missing-module-attribute tests benchmarks
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make bench NAME=links OPTIONS=--quick; without a name the operations on numbers. `python -m benchmarks` lists the names.
NAME ?= operations
bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks $(NAME) $(OPTIONS)

# What each study of a paper's claims needs and what came of it; its pages are made again from the recorded results.
studies: setup
	$(BIN)/python -m studies

readme: setup
	$(BIN)/python -m lowp.cli.readme README.md
	$(BIN)/python -m lowp.predict.page docs/prediction.md
	$(BIN)/python -m benchmarks.step_table README.md

# The site, in site/: static files that need no network. Every warning is an error, and links are checked.
docs: $(RUNS)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto -b html -d site/.doctrees docs site

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis
