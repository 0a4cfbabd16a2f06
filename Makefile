# Every task of the project. `make help` lists them; CONTRIBUTING.md explains them.
#
# make itself ends with 2 whatever a command's exit code was, and prints the code: "make: *** [nightly] Error 1".
# Where the code matters (CI, scripts), ask again: `.venv/bin/harness gate` judges the stored run in a second.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Which interpreter makes .venv, where runs are stored, where the site is built, which profile `nightly` measures.
PYTHON ?= python3
RESULTS ?= results
SITE ?= site
PROFILE ?= quick
# SHARD=1/2 measures that part of the matrix in `nightly`. NAME is what `verdict` and `compare` call their files by;
# BASE and HEAD are the revisions that `compare` compares.
NAME ?= here
BASE ?= HEAD~1
HEAD ?= HEAD

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The stamp's name is the content that it stands for, so a checkout that only touches times reinstalls nothing. The
# folder's own path is part of it: scripts of an environment do not survive a move.
KEY := $(shell (cat requirements.lock pyproject.toml; pwd) | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(KEY)
PEERS_KEY := $(shell (cat requirements-peers.lock 2>/dev/null; echo $(KEY)) | sha256sum | cut -c1-16)
PEERS_STAMP := $(VENV)/.peers-$(PEERS_KEY)

.PHONY: help env kernels fetch nightly peers smoke site docs tutorial test test-all lint format lock asv asv-check history-pull history-push clean

help: ## list the tasks
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 21

env: $(STAMP) ## make .venv from the lock file, unless it is there

# The first installation leaves pip's own version alone: every pip that Python 3.11 ships reads the lock file. The
# project is installed last, in place, with the environment's own setuptools, so this step needs no index.
$(STAMP):
	@.ci/check-host $(PYTHON)
	echo "installing the environment into $(VENV); this takes some minutes" >&2
	if ! $(BIN)/python -m pip --version 2>/dev/null | grep -qF "$$PWD/"; then $(PYTHON) -m venv --clear $(VENV); fi
	rm -f $(VENV)/.installed-*
	$(PIP) install -qq -r requirements.lock
	$(PIP) install -qq --no-deps --no-build-isolation --editable .
	touch $@

# Other runtimes, into the same environment: their pins were resolved against requirements.lock, which bounds them here.
$(PEERS_STAMP): $(STAMP)
	@echo "installing OpenVINO, ONNX Runtime and CTranslate2 into $(VENV)" >&2
	rm -f $(VENV)/.peers-*
	$(PIP) install -qq -c requirements.lock -r requirements-peers.lock
	touch $@

# Before anything is timed: else the first model to be compiled would wait for them.
kernels: $(STAMP) ## compile the C++ kernels, unless this version of them is in the cache
	@$(BIN)/python -m int8 build > /dev/null

fetch: kernels ## get and check the catalog's models and data
	@$(BIN)/harness fetch

# 0: all measured, 2: a cell failed, 3: the host was disturbed, which the gate reports. With anything else there is no
# new run to judge. The site is built whatever the gate says; then the gate's exit code is this command's.
nightly: fetch ## measure, judge, and build the site
	@status=0; run=$$($(BIN)/harness run --profile $(PROFILE) $(if $(SHARD),--shard $(SHARD)) --results $(RESULTS)) || status=$$?
	if [ $$status != 0 ] && [ $$status != 2 ] && [ $$status != 3 ]; then exit $$status; fi
	verdict=0; $(BIN)/harness gate --run "$$run" --results $(RESULTS) || verdict=$$?
	$(BIN)/harness report --results $(RESULTS) --site $(abspath $(SITE))
	exit $$verdict

# The roofline adds the share of the peak that one product reaches. A goal that is missed is said, not a failure.
peers: $(PEERS_STAMP) fetch ## measure other runtimes beside ours and say which goals are met (an hour or two)
	@status=0; run=$$($(BIN)/harness run --profile peers --results $(RESULTS)) || status=$$?
	if [ $$status != 0 ] && [ $$status != 2 ] && [ $$status != 3 ]; then exit $$status; fi
	isas=$$($(BIN)/python -c 'from int8 import isa; print(*({"amx", "vnni"} & {*isa.supported()}) or ["native"], sep=",")')
	$(BIN)/harness roofline --model bert-large-4l --isa "$$isas" --recipes fp32,sq-static --results $(RESULTS) > /dev/null
	$(BIN)/harness show --format peers --run "$$run" --results $(RESULTS)
	exit $$status

test: fetch ## run the tests that take less than a minute each
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST)

test-all: fetch ## run every test, then nightly
	@$(BIN)/python -m pytest $(PYTEST)
	$(MAKE) nightly

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff fix what it can
	@$(BIN)/ruff check --fix .

# Resolve pyproject.toml anew in a throwaway environment and write down what came. One upgrade is one commit: asv keys its
# results by commit, so only then a change of speed can be told from a change of torch.
lock: ## resolve pyproject.toml anew into the lock files
	@.ci/check-host $(PYTHON)
	scratch=$$(mktemp -d)
	trap 'rm -rf "$$scratch"' EXIT
	$(PYTHON) -m venv "$$scratch"
	"$$scratch/bin/python" .ci/list-wanted > "$$scratch/wanted"
	"$$scratch/bin/python" -m pip --disable-pip-version-check install -qq -r "$$scratch/wanted"
	"$$scratch/bin/python" -m pip freeze --all > "$$scratch/frozen"
	.ci/write-lock < "$$scratch/frozen" > "$$scratch/lock"
	cp "$$scratch/lock" requirements.lock
	"$$scratch/bin/python" .ci/list-wanted peers > "$$scratch/wanted"
	"$$scratch/bin/python" -m pip --disable-pip-version-check install -qq -c requirements.lock -r "$$scratch/wanted"
	"$$scratch/bin/python" -m pip freeze --all > "$$scratch/frozen"
	grep '^#' requirements-peers.lock > "$$scratch/peers"
	.ci/write-lock < "$$scratch/frozen" | grep -vxF -f requirements.lock >> "$$scratch/peers"
	cp "$$scratch/peers" requirements-peers.lock

# Where asv measures, and for which commits. `make asv ASV_RUN='HEAD^!'` builds an environment of asv's own for HEAD.
ASV_RUN ?= --environment existing --set-commit-hash HEAD

asv: fetch ## measure HEAD with asv, check that numbers were saved, publish them into the site
	@$(BIN)/asv machine --yes > /dev/null
	status=0; $(BIN)/asv run --show-stderr $(ASV_RUN) || status=$$?
	$(BIN)/asv publish --html-dir $(SITE)/asv
	$(BIN)/python -m benchmarks.check
	exit $$status

asv-check: $(STAMP) ## fail unless asv saved numbers for HEAD
	@$(BIN)/python -m benchmarks.check

smoke: fetch ## measure and judge the smallest profile in a store of its own: does the whole chain work?
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT
	status=0; $(BIN)/harness run --profile smoke --results "$$scratch" || status=$$?
	if [ $$status != 0 ] && [ $$status != 2 ] && [ $$status != 3 ]; then exit $$status; fi
	$(BIN)/harness gate --results "$$scratch"

# asv's pages and the handbook come first: the site links them where they are.
site: $(STAMP) ## build the site from the stored results
	@if compgen -G "$(RESULTS)/asv/*/machine.json" > /dev/null; then $(BIN)/asv publish --html-dir $(SITE)/asv; fi
	$(MAKE) docs DOCS=$(SITE)/docs
	$(BIN)/harness report --results $(RESULTS) --site $(abspath $(SITE))

# A warning is an error. `make docs DOCS=site/docs` puts the handbook where the site links it.
DOCS ?= build/docs

docs: $(STAMP) ## build the handbook into build/docs and check its links
	@$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees -b html docs $(DOCS)
	$(BIN)/python -m dashboards.links --site $(DOCS)

tutorial: fetch ## run every command of docs/tutorial.md as it stands there
	@$(BIN)/python docs/run_tutorial.py

verdict: $(STAMP) ## write alarms/NAME.md if the newest run fails the gate
	@mkdir -p alarms
	code=0; $(BIN)/harness gate --results $(RESULTS) --markdown "alarms/$(NAME).md" > /dev/null || code=$$?
	if [ $$code != 1 ] && [ $$code != 2 ]; then rm -f "alarms/$(NAME).md"; fi

# gh, Python without any package: a hosted runner needs nothing else.
tell: ## open, change or (RESOLVED=--resolved) close the issue about what is in alarms/
	@$(PYTHON) -m harness.posting night alarms $(RESOLVED)

compare: fetch ## compare the revisions BASE and HEAD on this host, and write build/compare/NAME.md
	@mkdir -p build/compare
	code=0; $(BIN)/harness compare "$(BASE)" "$(HEAD)" --results $(RESULTS) --markdown "build/compare/$(NAME).md" || code=$$?
	if [ -n "$${GITHUB_STEP_SUMMARY:-}" ]; then cat build/compare/*.md >> "$$GITHUB_STEP_SUMMARY"; fi
	exit $$code

comment: ## write what is in build/compare/ as the comment on pull request PULL
	@$(PYTHON) -m harness.posting comment "$(PULL)" build/compare

upgrade: fetch ## resolve newer versions, compare with them, and narrow down what fails: build/upgrade/
	@$(BIN)/python -m harness.upgrade build/upgrade

upgrade-tell: ## push an upgrade that PASSED=true as the branch upgrade, or open the issue about it
	@if [ "$(PASSED)" = true ]; then .ci/push-upgrade; else $(PYTHON) -m harness.posting upgrade build/upgrade; fi

history-pull: ## add the results kept on the branch `results` to the stored ones
	@.ci/history pull $(RESULTS)

history-push: ## add the stored results to the branch `results`
	@.ci/history push $(RESULTS)

clean: ## remove the environment and caches, never results or assets
	rm -rf $(VENV) .venv-* build site .asv/env .cache .mypy_cache .ruff_cache .pytest_cache *.egg-info
