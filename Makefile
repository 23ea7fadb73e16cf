# make grid: set everything up and run the default 12-cell grid.  make test: set up and pass the tests.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -m

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

setup: $(VENV)/ready

grid: setup
	$(RUN) opt_deus.run -m align=ot,avg zero_init=true,false seed=0,1,2 $(ARGS)

test: setup
	$(RUN) ruff check opt_deus tests benchmarks examples
	$(VENV)/bin/lint-imports
	$(RUN) pytest -m "not slow" $(ARGS)

test-all: setup
	$(RUN) pytest $(ARGS)

.PHONY: setup grid test test-all
