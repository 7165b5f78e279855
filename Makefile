# Each target does all of its own set-up. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/

# A run starts Python hundreds of times: what it compiles is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# Tests wait more than they compute, so four side by side suit two cores. Alone, to debug one:
# .venv/bin/pytest tests/…
JOBS ?= 4
PYTEST := pytest -n $(JOBS) --dist loadgroup

.PHONY: demo test test-fast test-protobuf7 test-ucx test-trl test-verl test-gateway test-sglang test-view environments lint protos clean

demo: $(VENV)/installed ## two servers, a trainer, a policy that learns
	$(RUN)rollwire demo

test: $(VENV)/installed lint ## everything that runs without a GPU
	$(RUN)$(PYTEST) -m "not gpu"
	$(RUN)$(PYTEST) -m "not gpu" tests/contract --engine synthetic

test-fast: $(VENV)/installed ## what is not marked slow: about two and a half minutes
	$(RUN)$(PYTEST) -m "not gpu and not slow"

# The folder's name is fixed: dill pickles what does not lie in site-packages by its content, and fails.
OVERLAYS := protobuf7 ucx trl gateway verl browser
over = PYTHONPATH=$(CURDIR)/.overlays/$(1)/site-packages

# The committed API code loads on two generations of protobuf; this is the newer one.
test-protobuf7: .overlays/protobuf7/installed
	$(call over,protobuf7) $(RUN)$(PYTEST) -m "not gpu and not slow" tests/protos tests/client tests/contract

# Weights over UCX, on TCP without a GPU; 70 MB more.
test-ucx: .overlays/ucx/installed
	$(call over,ucx) $(RUN)$(PYTEST) -m "not gpu" tests/transport/test_ucx.py tests/transport/test_links.py tests/system/weights/test_faults_relays.py tests/server/test_transport_listen.py

# TRL's own trainers on real servers; 305 MB more.
test-trl: .overlays/trl/installed
	$(call over,trl) $(RUN)$(PYTEST) -m "not gpu" tests/integrations

# The HTTP gateway, by real clients of its API; 45 MB more.
test-gateway: .overlays/gateway/installed
	$(call over,gateway) $(RUN)$(PYTEST) -m "not gpu" tests/gateway

# verl's own managers on real servers, then the tests that verl has of these for a CPU; 700 MB more. Ray's
# processes take this interpreter and this path.
VERL := .overlays/verl/site-packages
test-verl: .overlays/verl/installed
	$(call over,verl) $(RUN)pytest -n 2 --dist loadscope tests/integrations/test_verl.py
	$(call over,verl) $(RUN)pytest -c /dev/null --import-mode importlib -p no:cacheprovider \
		$(VERL)/tests/checkpoint_engine/test_global_steps_on_cpu.py \
		$(VERL)/tests/experimental/agent_loop/*_on_cpu.py

# The contract on SGLang, on a CPU; Python 3.11 and 3 GB for an environment of its own. An engine
# takes 3 GB of memory and a core, so two side by side.
SGLANG := sglang==0.5.23 torchvision==0.28.0
ON_CPU := PYTHONPATH=$(CURDIR)/tests/sglang_on_cpu OMP_NUM_THREADS=1
test-sglang: .sglang/installed
	$(ON_CPU) .sglang/bin/$(PYTEST) -n 2 --timeout 600 tests/contract --engine sglang
	$(ON_CPU) .sglang/bin/$(PYTEST) -n 2 --timeout 600 tests/server/engines/test_sglang*.py

# The page of `rollwire view` in Chromium, which is the system's: apt-get install chromium.
test-view: .overlays/browser/installed
	@command -v chromium || command -v google-chrome || { echo "test-view needs Chromium: apt-get install chromium"; exit 1; }
	$(call over,browser) $(RUN)$(PYTEST) -m "not gpu" tests/browser

environments: $(OVERLAYS:%=.overlays/%/installed) .sglang/installed ## what the seven above run in

lint: $(VENV)/installed
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)python scripts/check_structure.py
	cd protos && ../$(RUN)buf lint

protos: $(VENV)/installed ## makes the API's code again after a change of its .proto files
	PATH=$(VENV)/bin:$$PATH $(RUN)python scripts/generate_protos.py

$(VENV)/installed: requirements/dev.txt requirements/deploy.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollwire needs Python 3.11 or newer")'
	@echo "Installing into $(VENV): a minute or more of silence, 1.5 GB"
	$(PYTHON) -m venv $(VENV)
	$(RUN)pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps -r requirements/deploy.txt
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# What a test needs beside .venv, laid over it.
.overlays/%/installed: $(VENV)/installed requirements/%.txt
	rm -rf $(@D)
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --target $(@D)/site-packages -r requirements/$*.txt
	touch $@

.sglang/installed: requirements/sglang.txt pyproject.toml
	$(PYTHON) -m venv .sglang
	.sglang/bin/pip install --quiet --disable-pip-version-check -r requirements/sglang.txt
	.sglang/bin/pip install --quiet --disable-pip-version-check --no-deps $(SGLANG)
	.sglang/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) .overlays .sglang demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
