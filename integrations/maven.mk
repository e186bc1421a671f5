# The common part of the integrations' Makefiles: `make` makes $(JAR), `make test` runs the lints and the unit tests.

SHELL := /bin/sh
.DEFAULT_GOAL := $(JAR)
SOURCES := pom.xml .mvn/jvm.config $(shell find src -type f)

# Offline first, so that packages are fetched only once.
$(JAR): $(SOURCES)
	@../mvn.sh -q -B -o -DskipTests package >/dev/null 2>&1 || ../mvn.sh -q -B -DskipTests package
	@touch $@

.PHONY: test
test: ## formatting, the compiler's and Error Prone's warnings, unit tests
	@../mvn.sh -q -B spotless:check package

.PHONY: format
format:
	@../mvn.sh -q -B spotless:apply

.PHONY: clean
clean:
	rm -rf target
