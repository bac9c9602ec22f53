# Every target sets up what it needs by itself (scripts/setup.sh: nothing to do the second time).
# More arguments: make test ARGS="-k ledger -x"

export OMP_NUM_THREADS ?= 1
export MUJOCO_GL ?= egl
export WANDB_MODE ?= offline

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow bench lint

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup:  ## Make .venv with everything in it, and install system libraries for rendering (as root)
	@sh scripts/setup.sh

demo: setup  ## Post-train a small VLA on a learned world model; writes outputs/demo
	.venv/bin/python -m wmrl_embodied.cli.demo $(ARGS)

test test-slow: export HF_HUB_OFFLINE = 1

test: setup  ## The tests that take under 20 seconds each
	.venv/bin/pytest $(ARGS)

test-slow: setup  ## The others
	.venv/bin/pytest -m slow $(ARGS)

bench: setup  ## Measure; writes benchmarks/results
	.venv/bin/python benchmarks/run.py $(ARGS)

lint: setup  ## Style, and the floors that imports keep to
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pytest -q tests/test_layers.py
