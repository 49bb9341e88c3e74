# Recipes.  Each works as the first command on a machine with Python 3.11 and pip.
#   make demo     prefill and decode on this machine, checked against one engine alone
#                 (its first run says what it downloads, and how large that is)
#   make test     every law, with real vLLM too (about 13 minutes on two cores)
#   make test-matrix   the rest: further layouts, topologies and faults, with real vLLM
#   make fresh    the demo, and a minute of engine tests, in a new clone with nothing of this machine
#   make check    format, lint, types, direction of imports
#   make check-next   pdconn on the next vLLM, whose Python files are downloaded (336 MB, once; about 4 minutes)
#   make property, chaos, fuzz, soak      the long runs: topologies, virtual time, hostile input, faults
#   make bench    measure all that docs/benchmarks.md shows and write its tables (an hour; ARGS="--run NAME" for one)
#   make compose  docker/compose.yaml in real containers: both images built, engines and the router killed,
#                 paused, cut off and restarted (as root on Debian; installs Docker if there is none)
#   make multinode    2 prefill and 2 decode engines, each in a network namespace (as root)
#   make gpu      memory of a GPU: two processes on one card (host memory only, where there is none),
#                 and what vLLM makes of layouts, sleep and buffers on this machine
#   make gpu-kit  what to take to a machine with a GPU and no network, and the commands to run there
#   make format, clean
#   make docs     build docs/ into .work/site, part of check; ARGS=--write makes its generated parts anew
#   make docs-version VERSION=0.1   add the site of this release to the branch gh-pages, as "latest" too
.DEFAULT_GOAL := help
PYTHON ?= python3
TORCH ?= torch==2.13.0
# The index of torch alone; empty is pip's own.  With torch's CPU builds less is downloaded:
# TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

# Files compiled once are not compiled by each of hundreds of processes, whatever a machine sets.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo fresh test test-fast test-vllm test-matrix check check-types check-rest check-next format property chaos fuzz soak bench multinode gpu gpu-kit clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

$(STAMP): requirements.txt pyproject.toml $(wildcard pdconn/router/prefix/compiled/*.?pp)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"pdconn needs Python 3.11 or newer, found {v[0]}.{v[1]}; set PYTHON=")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PYTHON) .ci/install.py $(VENV) --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)"
	@touch $(STAMP)

demo: venv
	@$(BIN)/pdconn demo $(ARGS)

test: test-fast test-vllm

# Most of these wait for peers that are late on purpose, so four fit on two cores.  The tests
# of UCX without NIXL have processes of their own: NIXL brings another UCX along.  Each test is
# selected by one of these recipes: tests/project/structure/test_selection.py.
test-fast: venv
	$(BIN)/python -m pytest -m "not (compose or engine or matrix or multinode or ucx)" -n 4 --dist worksteal $(ARGS)
	$(BIN)/python -m pytest -m "ucx and not (compose or multinode)" -n 2 --dist worksteal $(ARGS)

test-vllm: venv
	$(BIN)/python -m pytest -m "engine and not (compose or matrix or multinode or ucx)" $(ARGS)

# Engines fill two cores; of the others a file stays together, whose tests share what took long.
test-matrix: venv
	$(BIN)/python -m pytest -m "matrix and not (compose or engine or multinode or ucx)" -n 2 --dist loadfile $(ARGS)
	$(BIN)/python -m pytest -m "matrix and engine and not (compose or multinode or ucx)" $(ARGS)

# Types take as long as all the rest, on one core, so they are checked beside it.
check: venv
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-types check-rest

check-types:
	$(BIN)/mypy

check-rest:
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .  # text is UTF-8, whatever the locale
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.project.docs.generate --check
	$(BIN)/mkdocs build --strict

fresh:
	@$(PYTHON) -m tests.project.fresh $(ARGS)

check-next: venv
	$(BIN)/python -m tests.project.next $(ARGS)

.PHONY: docs
docs: venv
	$(BIN)/python -m tests.project.docs.generate $(or $(ARGS),--check)
	$(BIN)/mkdocs build --strict

# Commits to a branch of this clone and pushes nothing.  mike calls mkdocs by PATH; it copies, because
# not every host of pages serves links.
.PHONY: docs-version
docs-version: venv
	@test -n "$(VERSION)" || { echo "make docs-version: expected VERSION=0.1 or the like, got none" >&2; exit 2; }
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike deploy --branch gh-pages --alias-type copy --update-aliases "$(VERSION)" latest
	$(BIN)/mike set-default --branch gh-pages latest

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

property: venv
	PDCONN_EXAMPLES=10000 $(BIN)/python -m pytest tests/property tests/planning/test_gaps.py -n 2 --timeout 0 $(ARGS)
	PDCONN_EXAMPLES=1000 $(BIN)/python -m pytest -m hypothesis --ignore tests/property -n 2 --timeout 0 $(ARGS)

chaos: venv
	PDCONN_CHAOS=10000 $(BIN)/python -m pytest tests/simulation -n 2 --timeout 0 $(ARGS)

fuzz: venv
	PDCONN_FUZZ=200000 $(BIN)/python -m pytest tests/faults/test_fuzz.py tests/faults/test_liars.py --timeout 0 -s $(ARGS)

soak: venv
	PDCONN_SOAK=10000 $(BIN)/python -m pytest tests/faults/test_soak.py --timeout 0 -s $(ARGS)

bench: venv
	$(BIN)/python -m tests.throughput.measured $(or $(ARGS),--run)

.PHONY: compose
compose: venv
	$(BIN)/python -m pytest -m "compose and not multinode" -s tests/project/docker/fleet $(ARGS)

multinode: venv
	$(BIN)/python -m pytest -m multinode tests/multinode $(ARGS)
	$(BIN)/python -m tests.multinode.demo

gpu: venv
	$(BIN)/python -m pytest tests/gpu -s $(ARGS)
	$(BIN)/python -m pytest tests/vllm/memory tests/vllm/test_supported.py tests/vllm/blocks/test_arrangement.py \
		-m "not engine" $(ARGS)

gpu-kit: venv
	@$(BIN)/python -m tests.gpu.kit.build

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
