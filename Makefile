# Every target works on a fresh clone: it needs Python (3.11 or newer) and make, and installs the rest into .venv once.

PYTHON ?= python3
BIN := .venv/bin
SITE := .venv/lib/python*/site-packages
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test check test-all bench hf-sweep format

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | column -t -s '|'

demo: $(READY) ## plan, emit and train a GPT on 4 processes, and compare with one process
	$(BIN)/python examples/gpt.py

test: $(READY) ## the tests
	$(PYTEST) -m "not slow"

check: $(READY) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-all: $(READY) ## the tests and the long walks
	$(PYTEST)

bench: $(READY) ## print the benchmarks and write them to tests/benchmarks/results
	$(BIN)/python -m tests.benchmarks.run

hf-sweep: $(READY) ## plan every Hugging Face class of a few kinds, small, and write tests/sweep/results.json
	$(BIN)/python -m tests.sweep

format: $(READY) ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt tests/timm_alone.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,dev]"
	$(BIN)/python -m pip install --quiet --no-deps timm==1.0.31 pillow==13.0.0  # its torchvision would bring CUDA's torch
	cp tests/timm_alone.py $$(echo $(SITE)) && echo import timm_alone > $$(echo $(SITE))/timm_alone.pth
	touch $(READY)
