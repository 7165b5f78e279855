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

test-fast: $(VENV)/installed ## what is not marked slow: somewhat over two minutes
	$(RUN)$(PYTEST) -m "not gpu and not slow"

# The committed API code loads on two generations of protobuf; this is the newer one.
test-protobuf7: .overlay/installed
	PYTHONPATH=$(CURDIR)/.overlay $(RUN)$(PYTEST) -m "not gpu and not slow" tests/protos tests/client tests/contract

# Weights over UCX, on TCP without a GPU; 70 MB more.
test-ucx: .ucx/installed
	PYTHONPATH=$(CURDIR)/.ucx $(RUN)$(PYTEST) -m "not gpu" tests/transport/test_ucx.py tests/transport/test_links.py tests/system/weights/test_faults_relays.py tests/server/test_transport_listen.py

# TRL's own trainers on real servers; 305 MB more. dill pickles what does not lie in site-packages by
# its content, and fails at that.
TRL := .trl/site-packages
test-trl: .trl/installed
	PYTHONPATH=$(CURDIR)/$(TRL) $(RUN)$(PYTEST) -m "not gpu" tests/integrations

# The HTTP gateway, by real clients of its API; 45 MB more.
test-gateway: .gateway/installed
	PYTHONPATH=$(CURDIR)/.gateway $(RUN)$(PYTEST) -m "not gpu" tests/gateway

# verl's own managers on real servers, then the tests that verl has of these for a CPU; 700 MB more. Ray's
# processes take this interpreter and this path.
VERL := .verl/site-packages
test-verl: .verl/installed
	PYTHONPATH=$(CURDIR)/$(VERL) $(RUN)pytest -n 2 --dist loadscope tests/integrations/test_verl.py
	PYTHONPATH=$(CURDIR)/$(VERL) $(RUN)pytest -c /dev/null --import-mode importlib -p no:cacheprovider \
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
test-view: .browser/installed
	@command -v chromium || command -v google-chrome || { echo "test-view needs Chromium: apt-get install chromium"; exit 1; }
	PYTHONPATH=$(CURDIR)/.browser $(RUN)$(PYTEST) -m "not gpu" tests/browser

environments: .overlay/installed .ucx/installed .trl/installed .verl/installed .gateway/installed .sglang/installed .browser/installed ## what the seven above run in

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

.overlay/installed: $(VENV)/installed requirements/protobuf7.txt
	rm -rf .overlay
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --target .overlay -r requirements/protobuf7.txt
	touch $@

.ucx/installed: $(VENV)/installed requirements/ucx.txt
	rm -rf .ucx
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --target .ucx -r requirements/ucx.txt
	touch $@

.verl/installed: $(VENV)/installed requirements/verl.txt
	rm -rf .verl
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --target $(VERL) -r requirements/verl.txt
	touch $@

.trl/installed: $(VENV)/installed requirements/trl.txt
	rm -rf .trl
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --target $(TRL) -r requirements/trl.txt
	touch $@

.browser/installed: $(VENV)/installed requirements/browser.txt
	rm -rf .browser
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --target .browser -r requirements/browser.txt
	touch $@

.gateway/installed: $(VENV)/installed requirements/gateway.txt
	rm -rf .gateway
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --target .gateway -r requirements/gateway.txt
	touch $@

.sglang/installed: requirements/sglang.txt pyproject.toml
	$(PYTHON) -m venv .sglang
	.sglang/bin/pip install --quiet --disable-pip-version-check -r requirements/sglang.txt
	.sglang/bin/pip install --quiet --disable-pip-version-check --no-deps $(SGLANG)
	.sglang/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) .overlay .ucx .trl .verl .gateway .sglang .browser demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
