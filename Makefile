# The commands of this project. `make demo` and `make test` set up what they need in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint docs test-engines clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/agentrl demo

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests

test-engines: setup
	@echo "real servers come with the vllm and sglang engines"

# mypy sees the package as it is installed: the catalogue folders are mapped into it.
TYPING ?= .cache/typing
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPING)/agentrl && mkdir -p $(TYPING)/agentrl
	ln -s $(CURDIR)/agentrl/* $(CURDIR)/envs $(CURDIR)/tools $(CURDIR)/agent_loops $(TYPING)/agentrl/
	cd $(TYPING) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p agentrl

docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache
