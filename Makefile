# `make decode` and `make test` set everything up by themselves. See `make help`.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Test processes. Compiling, most of the work, is done on one core each; whole files go to a process,
# which share what their fixtures compiled.
WORKERS ?= 2
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help decode decode-diffusion test lint setup clean

help:
	@echo "make decode   answer a question about a long text with the default model"
	@echo "              (options of scripts/decode.py: make decode ARGS='--mode dense')"
	@echo "make decode-diffusion"
	@echo "              continue a text a block of tokens at a time, with the adapter that ships"
	@echo "make test     linter, type checker and all tests (options of pytest: ARGS='-k rope')"
	@echo "make lint     linter and type checker only"
	@echo "make setup    only the virtual environment, with the test tools"
	@echo "make clean    remove the virtual environment and tool caches"
	@echo "Each sets up $(VENV) first, with the newest suitable Python, where that is needed."

decode:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --extras gguf
	@$(BIN)/python scripts/decode.py $(ARGS)

decode-diffusion:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --extras gguf
	@$(BIN)/python scripts/decode.py --diffusion $(ARGS)

test: setup
	@$(MAKE) --no-print-directory lint; lint=$$?; $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS) && exit $$lint

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --extras gguf,test,eval

clean:
	rm -rf $(VENV) $(VENV).lock .venv-smoke .venv-smoke.lock .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
