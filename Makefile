# One command each: `make demo`, `make test`. Everything is installed into .venv on first use.
#   make demo CUDA=12     force jax's CUDA 12 wheels (13 likewise; `CUDA=` for none)
#   make test ARGS="-k scheduler -x"
# uv is used for the installs where it is on PATH, pip otherwise.

SUPPORTED := 'import sys; sys.exit(sys.version_info < (3, 12))'
PYTHON ?= $(shell for p in python3.12 python3.13 python3; do \
	$$p -c $(SUPPORTED) 2>/dev/null && { echo $$p; break; }; done)
# The newest CUDA that the driver supports, as nvidia-smi reports it; empty without an NVIDIA GPU.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\(1[23]\).*/\1/p')
UV := $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),uv pip install --quiet --python .venv/bin/python,.venv/bin/pip install --quiet --no-compile)
INSTALLED := .venv/.installed-$(if $(CUDA),cuda$(CUDA),cpu)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all gpu-test check lock clean .venv

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(INSTALLED)  ## generate text with a small model and print how fast it went
	.venv/bin/python scripts/demo.py $(ARGS)

test: $(INSTALLED)  ## the tests that need no GPU and little time
	.venv/bin/pytest -m "not slow and not gpu" $(ARGS)

test-all: $(INSTALLED)  ## test, and the slow ones
	.venv/bin/pytest -m "not gpu" $(ARGS)

gpu-test: $(INSTALLED)  ## the tests that need an NVIDIA GPU
	.venv/bin/pytest -m gpu $(ARGS)

check: $(INSTALLED)  ## formatting, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright

.venv: $(INSTALLED)  ## install everything into .venv

$(INSTALLED): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo >&2 "tinyvllm-jax needs Python 3.12 or newer, and python3 here is" \
	  "$$(python3 --version 2>&1 || true). Install python3.12 (apt, brew, pyenv or 'uv python install 3.12')," \
	  "or name one: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "installing into .venv with $(PYTHON)$(if $(CUDA), for CUDA $(CUDA)) (some minutes the first time)"
	$(PYTHON) -m venv .venv
	$(INSTALL) -r requirements.lock
	$(INSTALL) --no-deps -e .
	$(if $(CUDA),$(INSTALL) -c requirements.lock "jax[cuda$(CUDA)]")
	@touch $@

lock:  ## pin the newest versions that pyproject.toml allows (needs uv)
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.12 --upgrade --quiet \
	  --no-header --no-annotate --no-emit-index-url --no-emit-find-links -o requirements.lock

clean:  ## remove .venv, caches and build output
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
