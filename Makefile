# Every command of this project. `make` lists them.
#
# .venv holds the product and all its extras, .venv-sglang the engine (its pins clash with everything), .venv-proto
# the generator of the wire contract. Each has a stamp, so that a step is instant when nothing changed. An environment
# with an editable install belongs to one checkout, whose path its stamp holds: it is never installed into from another.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
PIP := -m pip --disable-pip-version-check install -qq
BIN := .venv/bin
export PYTHONUNBUFFERED := 1
# Where the environment forbids bytecode, every process would compile the checkout's modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Options for the programs behind the targets, for example: make bench BENCH_ARGS=--quick
RUN_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
SOAK_ARGS ?=
PYTEST_ARGS ?=
SEEDS ?= 1 2 3

# Checkouts of the projects that adapters are for. Only test-upstreams has what they import, so only it is told of them.
UPSTREAMS := $(shell sed -n 's/.*variable="\([A-Z_]*\)".*/\1/p' tests/support/upstreams.py 2>/dev/null)
unexport $(UPSTREAMS)

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environments -------------------------------------------------------------------------------------------

.PHONY: install install-sglang
install: .venv/.installed ## the product with all extras into .venv (about 1 minute)
	@$(call need_own,.venv)

# The script keeps a stamp of its own.
install-sglang: ## SGLang on CPU into .venv-sglang (2.3 GB, about 2 minutes)
	@PYTHON=$(PYTHON) deploy/sglang-cpu/install.sh .venv-sglang

define need_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Python 3.11 or newer is needed, $$($(PYTHON) --version) found: make PYTHON=/path/to/python3.11 ..." >&2; \
	exit 1; }
endef

# Prints the checkout that an environment belongs to, where that is not this one. A stamp from before stamps held paths
# is empty: then it is the checkout where the environment really lies.
define other_owner
here=$$(pwd -P); owner=$$here; \
if [ -e $(1)/.installed ]; then read -r owner < $(1)/.installed || owner=$$(cd -P $(1)/.. && pwd); fi; \
[ "$$owner" = "$$here" ] || echo "$$owner"
endef

define need_own
other=$$($(call other_owner,$(1))); [ -z "$$other" ] || { \
	echo "install: $(1) belongs to the checkout $$other, which keeps it; rm -r $(1) here, and make installs one of" \
		"this checkout" >&2; \
	exit 1; }
endef

# Of targets that run a program of .venv and nothing of the product: another checkout's environment will do.
TOOLS := $(if $(shell $(call other_owner,.venv)),,.venv/.installed)

.venv/.installed: pyproject.toml constraints.txt
	@$(call need_own,.venv)
	@$(need_python)
	@echo "install: the product and its extras into .venv (about 1 minute)"; \
	test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev]'; \
	pwd -P > $@; \
	echo "install: done after $$SECONDS s"

.venv-proto/.installed: constraints/proto.txt
	@$(need_python)
	@echo "proto: the generator into .venv-proto (about 10 s)"; \
	test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto; \
	.venv-proto/bin/python $(PIP) -r constraints/proto.txt; \
	touch $@

# Environments beside .venv, each with the product and what only its tests need: packages_NAME, and then_NAME without
# resolving. Of constraints/NAME.txt come their versions.
site_of = $$(.venv-$(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# 50 packages that nobody else needs.
packages_verifiers := -c constraints/verifiers.txt -e '.[verifiers]' 'verifiers[ta]'

packages_agents := -c constraints/agents.txt -e '.[agents,embedded,service]' anthropic mini-swe-agent openai openai-agents

# The last release that has the generator class; it and the one of the worker exclude each other.
packages_verifiers-generator := -c constraints/verifiers-generator.txt -e '.[service,embedded]' verifiers==0.1.6

packages_trl := -c constraints/trl.txt -e '.[trl,service,embedded,worker]'

# What AReaL, SkyRL and verl ask for has CUDA and agents in it, so nothing is resolved for them.
of_trainers := -e '.[torch,service,embedded,worker]' transformers httpx pillow pyarrow python-dateutil pytz requests
packages_areal := $(of_trainers) tabulate wandb
then_areal := -r constraints/areal.txt

# On Python 3.11 pydantic refuses the TypedDict that SkyRL 0.3.0 imports.
packages_skyrl := $(of_trainers) wandb
then_skyrl := -r constraints/skyrl.txt
end_skyrl = echo 'import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict' \
	> $(call site_of,skyrl)/typed_dict.pth;

packages_verl := $(of_trainers) opentelemetry-sdk
then_verl := -r constraints/verl.txt

# The engine's declared dependencies would bring CUDA; Miles and slime import a part that needs none of them. The newest
# SGLang in which Miles finds every module that it imports. Torchvision's own library does not load beside a CPU torch.
packages_upstreams := -r constraints/upstreams.txt -e '.[torch,service,embedded,worker]' transformers pillow
then_upstreams := sglang==0.5.22 sglang-router==0.3.2 torchvision==0.28.0
end_upstreams = cp deploy/sglang-cpu/shims/torchvision_schemas.* "$(call site_of,upstreams)";

BESIDE := verifiers agents verifiers-generator trl areal skyrl verl upstreams
$(BESIDE:%=.venv-%/.installed): .venv-%/.installed: pyproject.toml constraints.txt constraints/%.txt
	@$(call need_own,.venv-$*)
	@$(need_python)
	@echo "test-$*: its packages into .venv-$* (up to 2.8 GB, 1 to 3 minutes)"; \
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*; \
	.venv-$*/bin/python $(PIP) -c constraints.txt $(packages_$*) pytest pytest-asyncio pytest-timeout; \
	$(if $(then_$*),.venv-$*/bin/python $(PIP) --no-deps $(then_$*);) \
	$(end_$*) \
	pwd -P > $@

# A program alone; what it is handed comes from .venv.
.venv-otel/.installed: constraints/collector.txt
	@$(need_python)
	@echo "demo-trace: the collector rotel into .venv-otel (about 5 s)"; \
	test -x .venv-otel/bin/python || $(PYTHON) -m venv .venv-otel; \
	.venv-otel/bin/python $(PIP) -r constraints/collector.txt; \
	touch $@

# Its own versions of numpy and protobuf, and no package of ours.
.venv-reverb/.installed: constraints/reverb.txt
	@$(need_python)
	@echo "bench-peers: Reverb and TensorFlow into .venv-reverb (1.4 GB, about 2 minutes)"; \
	test -x .venv-reverb/bin/python || $(PYTHON) -m venv .venv-reverb; \
	.venv-reverb/bin/python $(PIP) -r constraints/reverb.txt; \
	touch $@

# --- run ----------------------------------------------------------------------------------------------------

.PHONY: run demo demo-seeds demo-trace
run: install ## start the service alone, with its embedded store
	@$(BIN)/rollout-buffer serve $(RUN_ARGS)

demo: ## train a small model through the whole loop, on real SGLang
	@$(MAKE) -j2 install install-sglang
	@$(BIN)/python -m examples.demo $(DEMO_ARGS)

demo-trace: ## eight steps of the demo, traced to a real collector: the trace of a group, with every hop (about 2 minutes)
	@$(MAKE) -j3 install install-sglang .venv-otel/.installed
	@$(BIN)/python -m bench.traces.demo $(DEMO_ARGS)

demo-seeds: ## the demo with three seeds
	@$(MAKE) -j2 install install-sglang
	@for seed in $(SEEDS); do \
		echo "demo-seeds: seed $$seed"; \
		$(BIN)/python -m examples.demo --seed $$seed --out demo_out/seed-$$seed $(DEMO_ARGS); \
	done
	@$(BIN)/python -m examples.demo.seeds demo_out

# --- tests --------------------------------------------------------------------------------------------------

# Factor on the operations of the model-based tests: 1 is 20,000 on Valkey and 5,000 on Redis 7.
MODEL_TIMES ?= 10

# What takes minutes by itself has a command of its own.
APART := --ignore=tests/faults --ignore=tests/engine_matrix --ignore=tests/engine_faults --ignore=tests/lab_live \
	--ignore=tests/chart --ignore=tests/dashboards --ignore=tests/cluster --ignore=tests/large --ignore=tests/images
# Files of tests side by side; a test that fails can be run alone with PYTEST_SPREAD= PYTEST_ARGS=path/to/test.py.
PYTEST_SPREAD ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Weight updates of each pause mode with each manifest kind: with 8 there are about 100 in all.
ENGINE_UPDATES ?= 8
MATRIX := bench/results/engine_matrix.json
RECOVERY := bench/results/engine_recovery.json

.PHONY: fuzz soak test test-fast test-chaos test-engine test-engine-full test-faults test-cluster test-large test-live test-model test-redis \
	compatibility test-agents test-areal test-skyrl test-trl test-upstreams test-verifiers test-verifiers-generator test-verl \
	test-protobuf-matrix
test: ## all tests but test-engine, test-faults, test-cluster, test-large, test-live, chart and dashboards, with real SGLang end to end
	@$(MAKE) -j2 install install-sglang
	@$(BIN)/python -m pytest $(APART) $(PYTEST_SPREAD) $(PYTEST_ARGS)

test-fast: install ## the tests that need no SGLang
	@$(BIN)/python -m pytest -m "not engine" $(APART) $(PYTEST_SPREAD) $(PYTEST_ARGS)

test-engine: ## two SGLang servers: every pause mode and manifest kind, kills and refusals in the middle of updates
	@$(MAKE) -j2 install install-sglang
	@RB_ENGINE_UPDATES=$(ENGINE_UPDATES) $(BIN)/python -m pytest tests/engine_matrix tests/engine_faults $(PYTEST_ARGS)

test-engine-full: ## the same with 100 updates of each mode and kind; writes the tables in docs (about an hour)
	@$(MAKE) -j2 install install-sglang
	@rm -f $(MATRIX) $(RECOVERY)
	@RB_ENGINE_UPDATES=100 RB_ENGINE_RESULTS=$(MATRIX) RB_RECOVERY_RESULTS=$(RECOVERY) \
		$(BIN)/python -m pytest -s tests/engine_matrix tests/engine_faults $(PYTEST_ARGS)
	@$(BIN)/python -m tests.engine_matrix.tables $(MATRIX) $(RECOVERY)

test-faults: install ## histories of whole systems under random kills and failovers of the store
	@$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

# A seed repeats each bout's scenario and its schedule of faults; without one, each run draws its own.
CHAOS_MINUTES ?= 60
CHAOS_ARGS ?=
test-chaos: ## fleets of real processes under hundreds of kills and other faults, an hour; CHAOS_MINUTES=5 is the short form
	@$(MAKE) -j2 install install-sglang
	@scripts/released.sh $(PYTHON)
	@$(BIN)/python -m tests.chaos --minutes $(CHAOS_MINUTES) $(CHAOS_ARGS)

test-cluster: install ## payloads, and runs, on a cluster of real servers: failovers, slots that move, rights, histories
	@$(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)
	@RB_TEST_STORE=cluster $(BIN)/python -m pytest tests/store tests/model/test_model_against_store.py -k 'not test_model or over_a_cluster' $(PYTEST_ARGS)
	@RB_TEST_PAYLOADS=cluster $(BIN)/python -m pytest tests/store tests/model/test_model_against_store.py -k 'not test_model or cluster' $(PYTEST_ARGS)

soak: install ## one service under groups, runs and workers that come and go: nothing grows, nothing is left (short: 3 minutes; SOAK_ARGS='--share 1': hours, goes on where it was)
	@$(BIN)/python -m tests.soak $(SOAK_ARGS)

fuzz: install ## every boundary under random, damaged and hostile input (about 1 minute); FUZZ_ARGS='--messages 1000000'
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

test-live: install ## a live loop with simulated engines beside the simulator: staleness within 0.2 versions (about 4 minutes)
	@$(BIN)/python -m pytest -s tests/lab_live $(PYTEST_ARGS)

test-large: install ## groups of 240 MB through a real service: byte for byte, holds of the store, memory (a minute or two)
	@$(BIN)/python -m pytest -s tests/large $(PYTEST_ARGS)

test-model: install ## the store beside the reference model, over ten times as many random operations
	@RB_MODEL_TIMES=$(MODEL_TIMES) $(BIN)/python -m pytest -s tests/model/test_model_against_store.py $(PYTEST_ARGS)

# The model-based tests start the redis-server on PATH themselves, in every run of the tests.
test-redis: install ## the store's other tests on the redis-server that is on PATH
	@command -v redis-server >/dev/null || { echo "test-redis: there is no redis-server on PATH" >&2; exit 1; }
	@RB_TEST_STORE_BINARY=$$(command -v redis-server) $(BIN)/python -m pytest tests/store \
		tests/model/test_large_operations.py $(PYTEST_SPREAD) $(PYTEST_ARGS)

test-agents: .venv-agents/.installed install-sglang ## agents written for the clients of OpenAI and Anthropic, in an environment of their own
	@.venv-agents/bin/python -m pytest tests/agents/test_clients.py tests/agents/test_processes.py $(PYTEST_ARGS)

test-verifiers: .venv-verifiers/.installed install-sglang ## real verifiers environments through the worker, in an environment of their own
	@.venv-verifiers/bin/python -m pytest tests/workers/test_verifiers.py $(PYTEST_ARGS)

test-verifiers-generator: .venv-verifiers-generator/.installed ## our batch generator and verifiers' own, through the same tests
	@.venv-verifiers-generator/bin/python -m pytest $(wildcard tests/integrations/test_verifiers_*.py) $(PYTEST_ARGS)

test-trl: .venv-trl/.installed ## TRL's GRPOTrainer and AsyncGRPOTrainer on the buffer, in an environment of its own
	@.venv-trl/bin/python -m pytest $(addprefix tests/integrations/,test_trl.py test_trl_async.py test_trl_refusals.py) $(PYTEST_ARGS)

test-areal: .venv-areal/.installed ## AReaL's PPOTrainer on the buffer, on the CPU, in an environment of its own
	@.venv-areal/bin/python -m pytest -W ignore tests/integrations/test_areal.py $(PYTEST_ARGS)

test-skyrl: .venv-skyrl/.installed ## SkyRL's FullyAsyncRayPPOTrainer on the buffer, on the CPU, in an environment of its own
	@.venv-skyrl/bin/python -m pytest -W ignore tests/integrations/test_skyrl.py $(PYTEST_ARGS)

test-verl: .venv-verl/.installed ## verl's FullyAsyncTrainer on the buffer, on Ray and the CPU, in an environment of its own
	@.venv-verl/bin/python -m pytest -W ignore tests/integrations/test_verl.py $(PYTEST_ARGS)

# Tests that other people's code takes part in; it may warn.
UPSTREAM_TESTS := tests/upstreams $(wildcard tests/integrations/test_miles_*.py) tests/domain/test_preset_areal.py
named_upstreams := $(foreach name,$(UPSTREAMS),$(if $($(name)),$(name)='$($(name))'))
test-upstreams: ## adapters beside their upstreams' own code: MILES_SRC=… SLIME_SRC=… PRIME_RL_SRC=… AREAL_SRC=… (checkouts)
ifeq ($(strip $(named_upstreams)),)
	@echo "test-upstreams: left out, no checkout is named: set one or more of $(UPSTREAMS)"
else
	@$(MAKE) .venv-upstreams/.installed
	@$(named_upstreams) .venv-upstreams/bin/python -m pytest -W ignore $(UPSTREAM_TESTS) $(PYTEST_ARGS)
endif

compatibility: install ## tests of every adapter, and the table of upstreams in docs/compatibility.md: MILES_SRC=… ROWS='trl miles'
	@$(named_upstreams) $(BIN)/python -m tests.upstreams.matrix $(ROWS)

test-protobuf-matrix: ## the wheel with its core dependencies alone, under every supported protobuf and the oldest grpcio
	@scripts/test_protobuf_matrix.sh $(PYTHON)

# --- chart --------------------------------------------------------------------------------------------------

.PHONY: chart chart-schema
chart: install ## the Helm chart: lint, render with Helm 3 and 4, validate, cross-references (about 2 minutes)
	@scripts/chart_tools.sh $(PYTHON)
	@scripts/released.sh $(PYTHON)
	@RB_CHART_TOOLS=1 $(BIN)/python -m pytest tests/chart $(PYTEST_SPREAD) $(PYTEST_ARGS)

chart-schema: install ## rewrite the chart's values.schema.json from the settings and options
	@$(BIN)/python -m scripts.chart_schema

# --- images -------------------------------------------------------------------------------------------------

# A base image of a registry's; without one, it is assembled of Debian's packages.
BASE ?=
IMAGES := .cache/images

.PHONY: images test-images
images: ## the images of the commit that is checked out, as an OCI layout in .cache/images, without a daemon (about 2 minutes)
	@BASE=$(BASE) deploy/containers/build.sh $(PYTHON) $(IMAGES) service worker

test-images: images ## what was built: the layout, its bills of materials, and the end-to-end tests on the service's image; root (about 10 minutes)
	@$(MAKE) -j2 install install-sglang
	@scripts/chart_tools.sh $(PYTHON)
	@BASE=$(BASE) RB_TEST_IMAGES=$(IMAGES) $(BIN)/python -m pytest tests/images tests/e2e $(PYTEST_ARGS)

# --- monitoring ---------------------------------------------------------------------------------------------

.PHONY: dashboards dashboards-json metrics-reference
dashboards: install ## Grafana dashboards and alerts on a real Prometheus beside a loaded service (about 2 minutes)
	@command -v prometheus >/dev/null || { \
		echo "dashboards: prometheus is missing; Debian and Ubuntu: apt-get install prometheus" >&2; \
		exit 1; }
	@$(BIN)/python -m pytest tests/dashboards $(PYTEST_ARGS)

dashboards-json: install ## rewrite the dashboards in the chart from deploy/dashboards
	@$(BIN)/python -m deploy.dashboards

metrics-reference: install ## rewrite docs/metrics.md and the docs' tables of the rules from the code
	@$(BIN)/python -m scripts.metrics_reference
	@$(BIN)/python -m scripts.rules_tables

# --- code ---------------------------------------------------------------------------------------------------

.PHONY: lint ruff type imports rooms lua-lint proto-lint prose words format planted-changes
lint: ruff type imports rooms lua-lint proto-lint prose words ## every static check

planted-changes: install .venv-proto/.installed ## five usual changes in a copy of the tree: files they touch, whether they work (about 3 minutes)
	@$(BIN)/python -m scripts.planted_changes

.PHONY: lines
lines: ## lines of the product by area, for docs/architecture.md
	@python3 scripts/lines.py

ruff: $(TOOLS)
	@echo "lint: ruff, rules"
	@$(BIN)/ruff check
	@echo "lint: ruff, format"
	@$(BIN)/ruff format --check

type: install ## mypy --strict
	@echo "lint: mypy --strict"
	@$(BIN)/mypy --strict

imports: install
	@echo "lint: import contracts"
	@$(BIN)/lint-imports --no-logo

rooms: install
	@echo "lint: modules of folders, imports inside functions"
	@$(BIN)/python scripts/lint_rooms.py

lua-lint: install ## luacheck on the store's scripts, includes expanded
	@echo "lint: luacheck on the expanded Lua scripts"
	@command -v luacheck >/dev/null || { \
		echo "lua-lint: luacheck is missing; Debian and Ubuntu: apt-get install lua-check," \
			"macOS: brew install luacheck, elsewhere: luarocks install luacheck" >&2; \
		exit 1; }
	@rm -rf .cache/lua
	@$(BIN)/python -m buffer_service.store.scripts --expand .cache/lua
	@$(BIN)/python scripts/lint_lua.py .cache/lua buffer_service/store/lua/lib

proto-lint: $(TOOLS)
	@echo "lint: buf, rules and format of the proto files"
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code

prose: $(TOOLS) ## sentences of pages and docstrings have at most 25 words, docstrings begin with a noun or a verb
	@echo "lint: sentences of the documentation"
	@(find README.md CHANGELOG.md docs examples deploy -name '*.md' -not -path '*/.*' && \
		find bench buffer_* deploy examples rollout_* scripts tests trainer_client -name '*.py' -not -path '*/.*') | sort | xargs $(BIN)/python scripts/lint_prose.py

words: $(TOOLS) ## retired words are found neither in code, nor in the contract, nor in pages
	@echo "lint: retired words"
	@$(BIN)/python scripts/lint_words.py

format: $(TOOLS) ## rewrite Python and proto files in the house format
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format
	@$(BIN)/buf format --write

# --- wire contract ------------------------------------------------------------------------------------------

.PHONY: proto proto-check proto-breaking proto-release
proto: .venv-proto/.installed ## regenerate the Python code of proto/ and its reference in docs
	@scripts/generate_proto.sh .venv-proto/bin/python proto
	@.venv-proto/bin/python -m scripts.protocol_reference
	@echo "proto: generated"

proto-check: .venv-proto/.installed ## fail if the committed generated code is out of date
	@scripts/check_proto.sh .venv-proto/bin/python

proto-breaking: $(TOOLS) ## fail on changes that break clients of the last release
	@scripts/check_proto_breaking.sh $(BIN)/buf

proto-release: proto-breaking ## keep the contract as it is now as that of a release; proto-breaking compares with it
	@$(BIN)/buf build proto --exclude-source-info -o proto/released.binpb

# --- measurements -------------------------------------------------------------------------------------------

.PHONY: bench bench-calls bench-cluster bench-columns bench-controller bench-depth bench-fleet bench-fresh bench-import bench-lab bench-live bench-memory bench-order bench-patches bench-peers bench-predict bench-pull bench-reload bench-reward bench-sites bench-stages bench-streaming bench-spread bench-staleness bench-surplus bench-tracing bench-wait
bench: install ## service and store against their floors and against Redis Streams
	@$(BIN)/python -m bench $(BENCH_ARGS)

bench-calls: install ## CPU of every call of a run, in the rpc process and in the store (about 2 minutes)
	@$(BIN)/python -m bench.calls $(BENCH_ARGS)

bench-cluster: install ## CPU of service and stores with payloads beside the index and on a cluster (about 2 minutes)
	@$(BIN)/python -m bench.cluster $(BENCH_ARGS)

bench-depth: install ## push and pull with a thousand and with a million groups queued, in every order
	@$(BIN)/python -m bench.depth $(BENCH_ARGS)

bench-fleet: install ## thousands of workers at one rpc process, and 200 whose connections spread when a second replica comes (about 5 minutes)
	@$(BIN)/python -m bench.fleet $(BENCH_ARGS)
	@$(BIN)/python -m bench.rebalance

bench-live: install ## staleness, period and idle shares of live loops beside the simulator (15 minutes, quiet machine)
	@$(BIN)/python -m bench.lab.live $(BENCH_ARGS)

bench-columns: install ## routed experts of up to 30 MB a sample from SGLang's wire to the trainer's tensors (about 5 minutes)
	@$(BIN)/python -m bench.columns $(BENCH_ARGS)

bench-predict: install ## what the status of 40 random live settings predicts beside what it measures (40 minutes, quiet machine; goes on where it was)
	@$(BIN)/python -m bench.lab.predict $(BENCH_ARGS)

bench-memory: install ## what an rpc process holds for blocked pushes and slow readers, over its budget (about 2 minutes)
	@$(BIN)/python -m bench.memory $(BENCH_ARGS)

bench-peers: install ## the buffer both ways beside Redis Streams by hand and Reverb (about 9 minutes, quiet machine)
	@$(MAKE) .venv-reverb/.installed || echo "bench-peers: Reverb cannot be installed here" >&2
	@$(BIN)/python -m bench.peers $$(test ! -e .venv-reverb/.installed || echo --reverb .venv-reverb/bin/python) $(BENCH_ARGS)

bench-patches: install ## weights as patches beside whole files: bytes and seconds, a model of 0.5 billion weights (about 5 minutes)
	@$(BIN)/python -m bench.patches $(BENCH_ARGS)

bench-pull: install ## pull of a ready batch beside a raw gRPC transfer of the same bytes (about 1 minute)
	@$(BIN)/python -m bench.pull $(BENCH_ARGS)

bench-fresh: install ## what fresh starts do to staleness, waste and period, simulated; BENCH_ARGS=--live: live (half an hour); BENCH_ARGS='--sglang .venv-sglang/bin/python': on two real engines
	@$(BIN)/python -m bench.lab.fresh $(BENCH_ARGS)

bench-controller: install ## a target of staleness held through jumps, beside a search over fixed settings (simulated; BENCH_ARGS=--live adds live loops)
	@$(BIN)/python -m bench.lab.controller $(BENCH_ARGS)

bench-order: install ## windows of the order of submission, and the longest first: length bias, waste, staleness, period (simulated)
	@$(BIN)/python -m bench.lab.order $(BENCH_ARGS)

bench-wait: install ## drop, recycle and wait under the same gate: length bias, waste, staleness, period (simulated)
	@$(BIN)/python -m bench.lab.wait $(BENCH_ARGS)

bench-spread: install ## groups spread over a worker's engines: time of a batch with and without (simulated, 2 minutes)
	@$(BIN)/python -m bench.lab.spread $(BENCH_ARGS)

bench-surplus: install ## groups that begin more samples than they have: length bias, waste, staleness, period (simulated)
	@$(BIN)/python -m bench.lab.surplus $(BENCH_ARGS)

bench-import: install ## how long the import of the client takes, beside its dependencies
	@$(BIN)/python -m bench.imports $(BENCH_ARGS)

bench-reload: ## tokens per second of a real engine with a weight update every 2 s against none (about 12 minutes)
	@$(MAKE) -j2 install install-sglang
	@$(BIN)/python -m bench.reload $(BENCH_ARGS)

bench-reward: ## what staleness costs in reward on the demo's task, by policy and loss, three seeds (about 1 hour; goes on where it was ended)
	@$(MAKE) -j2 install install-sglang
	@$(BIN)/python -m bench.reward $(BENCH_ARGS)

bench-sites: install ## groups and weights between sites 100 ms apart with losses, beside none (root; about 13 minutes)
	@$(BIN)/python -m bench.sites $(BENCH_ARGS)

bench-stages: install ## CPU of a small group in each stage of its way, and the store's commands that it takes
	@$(BIN)/python -m bench.stages $(BENCH_ARGS)

bench-streaming: install ## staleness of whole and of streamed batches on a live service
	@$(BIN)/python -m bench.streaming $(BENCH_ARGS)

bench-staleness: install ## simulator against closed forms and published figures; its speed (about 5 minutes)
	@$(BIN)/python -m bench.lab.grid
	@$(BIN)/python -m bench.lab.published
	@$(BIN)/python -m bench.lab.speed

bench-tracing: install ## what traces cost, CPU of a group untraced, with one group in a hundred and with all traced (about 10 minutes)
	@$(BIN)/python -m bench.traces $(BENCH_ARGS)

bench-lab: install ## every policy at equal throughput and on the same engines, with the frontier; what asynchrony buys (about half an hour)
	@$(BIN)/python -m bench.lab.policies $(BENCH_ARGS)
	@$(BIN)/python -m bench.lab.sync

.PHONY: clean distclean
clean: ## remove caches and what runs left behind
	@rm -rf build dist .cache .stamps demo_out bench/out .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
		.ruff_cache *.egg-info
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## also remove the environments
	@rm -rf .venv .venv-sglang .venv-sglang.lock .venv-otel .venv-proto .venv-matrix .venv-reverb .venv-trl .venv-upstreams .venv-areal .venv-skyrl \
		.venv-agents .venv-verifiers .venv-verifiers-generator .venv-verl
