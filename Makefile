# Every target makes .venv when it is missing or older than its description, so a fresh
# clone needs only python3 (3.10 or later), git and make.

PYTHON ?= python3
# Processes that share the test files; JOBS=0 runs all of them in one, in order.
JOBS ?= 2
# Steps of the soak of make long.
STEPS ?= 2000
# More arguments for pytest: ARGS=--full-matrix runs every combination of parameters.
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
PIP := $(PY) $(INSTALL)
DEV := $(VENV)/.stamp-dev
DOCS := $(VENV)/.stamp-docs
SHARED := -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)
PYTEST := $(PY) -m pytest $(SHARED)
# Lightning, accelerate, peft, trl, torchtitan, timm, diffusers, s3fs, moto, torchao and
# torchft have an environment of their own: the package and all other tests must work
# without them.
INTEGRATIONS := .venv-integrations

# Without caches, each of the processes compiles the package and all tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo examples examples-integrations test test-integrations lint check \
	test-gpu test-newest gpu-report bench bench-full package docs long clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(DEV) ## train a small language model on two ranks and check it against one
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node 2 \
		examples/train_lm.py --check

test: $(DEV) ## run the everyday tests; ARGS=--full-matrix runs all
	$(PYTEST)

test-integrations: $(INTEGRATIONS)/.stamp ## run the tests that need lightning, accelerate, peft, torchao or an S3 server
	$(INTEGRATIONS)/bin/python -m pytest $(SHARED) tests/integrations_env

lint: $(DEV) ## lint, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict

check: lint ## lint, format, types and the fast tests
	$(PYTEST) -m "not slow"

# For a machine that brings its own CUDA build of torch and pytest: no .venv, nothing
# installed. Its libraries may warn of what they like.
test-gpu: ## run the CUDA tests with the system's python3
	$(PYTHON) -m pytest -m gpu -rs -W default

# A report and no gate: what fails there is what a new version of torch has changed.
test-newest: ## run the everyday tests on the newest torch of the package index
	@$(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/python -m pip install --quiet --upgrade torch -e '.[dev,cli]'
	-.venv-newest/bin/python -m pytest tests/test_torch_names.py
	-.venv-newest/bin/python -m pytest $(SHARED)

gpu-report: ## run the CUDA tests and benchmarks, and write benchmarks/reports/DATE-cuda.md
	$(PYTHON) -m benchmarks.cuda

examples: $(DEV) ## run every example on 2 ranks, and a short form on 1 and 3
	$(PY) examples/run_all.py

examples-integrations: $(INTEGRATIONS)/.stamp ## run the examples that need further packages
	$(INTEGRATIONS)/bin/python examples/run_all.py --needing-packages

bench: $(DEV) ## every benchmark beside the peers, one cell each, ten minutes
	$(PY) -m benchmarks

bench-full: $(DEV) ## every cell of every benchmark, an hour
	$(PY) -m benchmarks --full

package: $(DEV) ## build the wheel, install it into a new environment, run the quickstart
	$(PY) -m tests.package

docs: $(DOCS) ## run the scripts and notebooks of all pages, and build the pages; a warning is an error
	$(PY) -m pytest -n $(JOBS) --full-matrix tests/test_pages.py -k "by_its_command or notebook"
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

long: $(DEV) ## the property tests with the long random profile, and a soak
	PYTEST_TIMEOUT=36000 COMPOSABLE_FSDP_HYPOTHESIS=long COMPOSABLE_FSDP_SOAK=$(STEPS) \
		$(PY) -m pytest property_tests

clean: ## remove the environment, caches and built documentation
	rm -rf $(VENV) $(INTEGRATIONS) .venv-newest docs/_build .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis

$(PY) $(INTEGRATIONS)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "python3 3.10 or later is needed; or set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(@:/bin/python=)

$(DEV): pyproject.toml constraints.txt | $(PY)
	@echo "installing torch 2.13.0 and the development tools into $(VENV) (once, minutes)"
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[dev,cli]'
	@touch $@

$(INTEGRATIONS)/.stamp: pyproject.toml constraints.txt | $(INTEGRATIONS)/bin/python
	@echo "installing torch 2.13.0, lightning and accelerate into $(INTEGRATIONS) (once, minutes)"
	@$(INTEGRATIONS)/bin/python $(INSTALL) torch==2.13.0
	@$(INTEGRATIONS)/bin/python $(INSTALL) -e '.[dev,cli,lightning,hf,remote,replicas]' 'moto[server]>=5.1' 'torchao>=0.18' \
		diffusers torchtitan trl
	@# Without torchvision, whose wheels are for CUDA builds: transformers would import it.
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps timm
	@touch $@

$(DOCS): $(DEV)
	@echo "installing the documentation tools into $(VENV)"
	@$(PIP) -e '.[docs]'
	@touch $@
