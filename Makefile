# make help lists the targets: the text after ## in the line of each.
# ARGS="..." is passed on to pytest or to the benchmarks.

# The first Python >= 3.11 that runs: a name on PATH may be the shim of a version that is not
# installed, and a Python without ensurepip cannot make a virtual environment. Set PYTHON=... to
# choose.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3 python; do \
	if $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then echo $$p; break; fi; done)

BIN := .venv/bin
# Python compiles a module at its first import: to compile all modules of all packages takes longer.
INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile
# Tests on Spark share one session: they run in one process, after the others.
# (xdist's groups would do it in one call, but with pytest 9.2 xdist 3.8 ignores them.)
PYTEST := $(BIN)/python -m pytest
# Let Python write compiled tests to disk; otherwise each process would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# worksteal: a worker without tests takes some tests of a busy worker.
PARALLEL := $(PYTEST) -n 3 --dist worksteal
QUICK := not slow and not java and not root and not cluster
# The files that have tests with a marker: to collect all others too takes eight seconds of processor
# time in each process. ARGS may name other files.
FILES = $(if $(ARGS),,$(shell grep -rlE --include='test_*.py' '$(1)' tests))
SPARK_FILES = $(call FILES,mark\.spark|\bspark: )
# If no test is selected, that is an error, unless ARGS narrowed the selection.
OR_NONE := $(if $(ARGS),|| [ $$? -eq 5 ])

.PHONY: help demo test plain-beside spark-beside test-plain test-spark test-slow test-root test-java test-cluster test-matrix crash check docs bench dist clean
.DELETE_ON_ERROR:

demo: .venv/.installed ## installs what is missing (needs Python 3.11+) and runs the main job
	@$(BIN)/logquarry demo

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'ARGS="..." is passed on to pytest or to the benchmarks.'

check: .venv/.installed-dev ## lint, format and types: exactly what CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

# The tests with Spark use one process and leave a core partly idle, so the others run beside them.
# Spark gives a Python process ten seconds to start: the others run with a lower priority.
test: .venv/.compiled ## every quick test
	@$(MAKE) --no-print-directory -j2 spark-beside plain-beside

plain-beside:
	@nice -n 5 $(MAKE) --no-print-directory test-plain

# Prints the output at the end, so that the outputs of both do not mix. Then it runs the command AFTER_SPARK.
AFTER_SPARK ?= true
spark-beside:
	@output=$$(mktemp); $(MAKE) --no-print-directory test-spark >$$output 2>&1; result=$$?; \
	cat $$output; rm $$output; $(AFTER_SPARK); exit $$result

test-plain: .venv/.compiled ## the quick tests without Spark
	$(PARALLEL) -m "$(QUICK) and not spark" $(ARGS) $(OR_NONE)

test-spark: .venv/.compiled ## the quick tests with Spark
	$(PYTEST) -m "$(QUICK) and spark" $(SPARK_FILES) $(ARGS) $(OR_NONE)

test-slow: .venv/.compiled ## the slow tests, and those that need RocketMQ's own code or root (else skipped)
	$(PARALLEL) -m "(slow or java or root) and not cluster and not spark" $(ARGS) $(OR_NONE)
	$(PYTEST) -m "spark and slow" $(SPARK_FILES) $(ARGS) $(OR_NONE)

test-java: .venv/.compiled ## the quick tests beside RocketMQ's own code (skipped without a JDK and Maven)
	$(PARALLEL) -m "java and not spark and not slow" $(call FILES,mark\.java) $(ARGS) $(OR_NONE)

test-root: .venv/.compiled ## the quick tests that need root, for mounts (else skipped)
	$(PYTEST) -m "root and not slow" $(call FILES,mark\.root) $(ARGS) $(OR_NONE)

test-cluster: .venv/.compiled ## the tests that start a Spark cluster here, or Spark beside RocketMQ
	$(PYTEST) -m "cluster or (spark and (java or root) and not slow)" \
		$(call FILES,mark\.cluster) $(SPARK_FILES) $(ARGS) $(OR_NONE)

CELLS ?=
test-matrix: .venv/.installed-dev ## each version of Spark in an environment below .matrix: CELLS="3.5 4.3"
	$(BIN)/python -m tools.spark_matrix $(CELLS)

RUNG ?= power_cut
N ?=
SEED ?= 1
crash: .venv/.compiled ## one crash test: RUNG=power_cut N=300000 SEED=7 (docs/testing.md)
	CRASH_N=$(N) CRASH_SEED=$(SEED) $(PARALLEL) tests/crash/test_$(RUNG).py $(ARGS)

docs: .venv/.installed-dev ## the site of the docs, in site/ (needs npm); a dead link is an error
	$(BIN)/python -m mkdocs build --strict --quiet

bench: .venv/.compiled ## the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

dist: .venv/bin/python ## wheel and source archive, built twice and tried out, with SBOM and licence lists
	$(BIN)/python -m tools.dist $(ARGS)

clean: ## removes what all of these made
	rm -rf .venv .matrix .mutation demo-output dist build site .hypothesis .mypy_cache .ruff_cache .pytest_cache
	rm -rf spark-warehouse metastore_db derby.log artifacts
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later (with venv and ensurepip) was found: install one, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "Installing logquarry and its dependencies (the first time this downloads PySpark: some minutes)"
	@$(INSTALL) -e '.[all]'
	@touch $@

# Modules that are compiled if there is a C compiler.
TYPED := $(shell find src -name '*.pxd')
.venv/.compiled: hatch_build.py src/logquarry/compiled.py $(TYPED) $(TYPED:.pxd=.py) .venv/.installed-dev
	@$(BIN)/python hatch_build.py
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	@echo "Installing logquarry with its development tools"
	@$(INSTALL) -e '.[all,dev]'
	@touch $@ .venv/.installed
