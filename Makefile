# deepseek-flash: `make help` lists the targets.
PYTHON       ?= python3
MODEL        ?= smollm2
HOST         ?= 127.0.0.1
HTTP_PORT    ?= 8000
GRPC_PORT    ?= 8001
METRICS_PORT ?= 8002
GATEWAY_PORT ?= 9000
# The OpenAI- and Anthropic-compatible front door; 0: without it.
GATEWAY      ?= 1
FLAGS        ?=

VENV := .venv/bin/python
PORTS := --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)
GRPC_URL := $(HOST):$(GRPC_PORT)
OPERATE := --host $(HOST) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT)

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve drain test unit integration promtool lint type health config \
        chat client env dflash-stats watch dflash-flush loadtest loadtest-curve loadtest-distributed \
        bench-overhead bench-gateway bench-parity bench-dflash bench-dspark clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'
	@echo "  Variables: MODEL=smollm2|tiny-deepseek|path|hub id  HOST HTTP_PORT GRPC_PORT METRICS_PORT GATEWAY_PORT"
	@echo "             FLAGS=\"--no-enable-dflash …\"  PROMPT=\"…\"  PYTHON=python3.11"

setup: ## install everything for MODEL into .venv and build/ (once; serve and test do it too)
	@$(PYTHON) scripts/setup.py --model "$(MODEL)"

setup-dev: ## the same for tests, with ruff, mypy and foreign clients
	@$(PYTHON) scripts/setup.py --model tiny-deepseek --dev

serve: setup ## serve MODEL in the foreground until Ctrl-C
	@exec $(VENV) -m deepseek_flash.serve $(if $(MODEL),--model $(MODEL)) --host $(HOST) $(PORTS) \
		$(if $(filter-out 0,$(GATEWAY)),--gateway-port $(GATEWAY_PORT)) $(FLAGS)

drain: ## let running requests finish, then stop the server on HTTP_PORT
	@$(VENV) -m deepseek_flash.serve --drain --http-port $(HTTP_PORT)

health: ## prove with one real token that the server on GRPC_PORT works
	@$(VENV) -m clients.cli --url $(GRPC_URL) health

config: ## the settings in force on the server, from its metrics
	@$(VENV) -m clients.settings --url http://$(HOST):$(METRICS_PORT)

dflash-stats: ## the live cache of the server on HTTP_PORT: entries, hits, bytes on the device
	@$(VENV) -m deepseek_flash.operate stats $(OPERATE)

watch: ## a live view of the server on METRICS_PORT until Ctrl-C; INTERVAL=1 in seconds
	@$(VENV) -m clients.watch --url http://$(HOST):$(METRICS_PORT) $(if $(INTERVAL),--interval $(INTERVAL))

dflash-flush: ## forget what the cache holds, or one tenant's with SALT="…"
	@$(VENV) -m deepseek_flash.operate flush $(OPERATE) $(if $(SALT),--cache-salt "$$SALT")
export SALT

chat: ## a chat in the terminal; Ctrl-C cancels the running answer on the server
	@$(VENV) -m clients.cli --url $(GRPC_URL) chat

client: ## one answer: make client PROMPT="…" SAMPLING='{"top_p": 0.9}'
	@$(VENV) -m clients.cli --url $(GRPC_URL) ask "$$PROMPT" $(if $(SAMPLING),--sampling "$$SAMPLING")
export PROMPT SAMPLING

env: ## shell lines that a bare tritonserver needs, to be evaluated
	@$(VENV) -m deepseek_flash.serve $(if $(MODEL),--model $(MODEL)) --print-env

test: unit integration ## everything: unit, then integration against a real tritonserver

unit: setup-dev ## tests without Triton and without an engine
	@$(VENV) -m pytest tests/unit -q

integration: setup-dev ## tests against a real tritonserver with tiny-deepseek
	@$(VENV) -m pytest tests/integration -q

# As `apt-get install prometheus`, without root: the unit tests look in PATH and in build/tools.
promtool: ## promtool of Debian's package prometheus into build/tools; unit tests then check monitoring/
	@mkdir -p build/tools/debian && cd build/tools/debian && apt-get download prometheus
	@cd build/tools && dpkg -x debian/prometheus_*.deb debian && cp debian/usr/bin/promtool . && \
	rm -r debian && ./promtool --version

lint: setup-dev ## ruff
	@$(VENV) -m ruff check . && $(VENV) -m ruff format --check .

type: setup-dev ## mypy, strict
	@$(VENV) -m mypy

SCALE ?= auto
SEED ?= 0
REPEAT_SHARE ?= 0.6
WORKERS ?= 2
LOADTEST = --model $(MODEL) --scale $(SCALE) --seed $(SEED) --repeat-share $(REPEAT_SHARE) \
	$(if $(DOORS),--doors $(DOORS)) $(if $(LIMITS),--limits "$(LIMITS)") \
	$(if $(PROMPTS),--prompts "$(PROMPTS)") $(if $(CAPACITY),--capacity $(CAPACITY))
loadtest: setup ## DFlash and DSpark on against off, on one table; SCALE=cpu|full PROMPTS=log.jsonl
	@$(VENV) -m loadtest.run $(LOADTEST) -- $(FLAGS)

loadtest-distributed: setup ## the same with a Locust master and WORKERS=2 workers
	@$(VENV) -m loadtest.run $(LOADTEST) --workers $(WORKERS) -- $(FLAGS)

loadtest-curve: setup ## what is gained by how much the traffic repeats, with a plot
	@$(VENV) -m loadtest.curve $(LOADTEST) -- $(FLAGS)

bench-overhead: setup ## what the ensemble costs against vLLM called directly
	@$(VENV) -m loadtest.bench.overhead --model $(MODEL)

bench-parity: setup ## greedy text through the ensemble against vLLM called directly, token by token
	@$(VENV) -m loadtest.bench.parity --model $(MODEL)

# A part that misses its aim does not keep the others from running; Ctrl-C does.
run_parts = trap : INT; failed=0; $(foreach part,$(PART),$(VENV) -m \
	loadtest.bench.$(or $($(1)_$(part)),$(error PART: there is no part "$(part)")) \
	|| { failed=$$?; [ $$failed -ne 130 ] || exit 130; };) exit $$failed

GATEWAY_overhead := gateway_overhead --model $(MODEL)
GATEWAY_leave := gateway_leave --model $(MODEL)
GATEWAY_tenants := gateway_tenants --model $(MODEL)
bench-gateway: PART ?= overhead leave tenants
bench-gateway: setup ## what the gateway costs, how soon it cancels, what it tells; PART=overhead|leave|tenants
	@$(call run_parts,GATEWAY)

DFLASH_table := dflash_table
DFLASH_windows := trace_windows --model $(MODEL)
DFLASH_traffic := dflash_served --model $(MODEL)
DFLASH_parity := dflash_parity --model $(MODEL)
bench-dflash: PART ?= table windows traffic parity
bench-dflash: setup ## what the DFlash cache gives and costs; PART=table|windows|traffic|parity for one
	@$(call run_parts,DFLASH)

DSPARK_trace := dspark_trace
DSPARK_train := dspark_train
DSPARK_replay := dspark_replay
DSPARK_mixed := dspark_served --model $(MODEL) --part mixed
DSPARK_novel := dspark_served --model $(MODEL) --part novel
DSPARK_hostile := dspark_hostile --model $(MODEL)
DSPARK_repeats := dspark_served --model $(MODEL) --part repeats
bench-dspark: PART ?= mixed novel repeats
bench-dspark: setup ## what DSpark gives and costs, served; PART=trace|train|replay|mixed|novel|hostile|repeats
	@$(call run_parts,DSPARK)

clean: ## remove what set-up made
	rm -rf .venv build loadtest/out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
