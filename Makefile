# Every target works from nothing: `setup` makes .venv with pinned versions and runs again when they change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo-installed
# JAX, Flax, Keras and LiteRT, half a gigabyte that only their models need: packages of their own, laid over those of .venv.
FRAMEWORKS := .frameworks

# Tests start hundreds of processes, each of which would compile this project's sources anew if nobody kept the result.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-more test-extra test-install test-install-lowest fuzz chaos quiet-hour lint format bench prove-gpu clean

setup: $(STAMP)

# What the demonstration needs, in the lock's versions.
$(DEMO): pyproject.toml requirements.lock setup.py rpc_runtime/wire/worker.proto tvm_split/observing/xplane.proto
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else 'tvm-split needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12 …' % v)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint requirements.lock --editable '.[demo]'
	touch $@

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install --requirement requirements.lock
	touch $@

demo: $(DEMO)
	$(BIN)/tvm-split demo

# The folder or files whose tests are run.
TESTS ?= tests

# CPU=x86-64-v3 (AVX2) or x86-64-v2 (SSE4) hides the further instruction sets of this processor, in every target here.
HIDDEN_x86-64-v3 := avx512f avx512bw avx512cd avx512dq avx512vl avx_vnni avx_vnni_int8
HIDDEN_x86-64-v2 := $(HIDDEN_x86-64-v3) avx avx2 f16c fma bmi1 bmi2 abm movbe
ifdef CPU
export TVM_SPLIT_DISABLE_CPU_FEATURES := $(or $(HIDDEN_$(CPU)),$(error CPU=$(CPU): give x86-64-v3 or x86-64-v2))
endif

# Each file's tests stay together, in one of three processes, since tests also wait for processes, deadlines and the disk.
# Files begin in their own order, and not with those of most tests, or few long tests would be waited for in the end.
test: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not long" $(TESTS)

# What `make test` leaves out: "slow" takes seconds, "long" minutes, "hypothesis" are property tests with TIMES their
# examples, new ones in each run unless SEED is given. TESTS is a folder or files.
MARKS ?= slow and not long
TIMES ?= 20
PROPERTIES := $(if $(filter hypothesis,$(MARKS)),--examples-times $(TIMES) $(if $(SEED),--hypothesis-seed $(SEED)))
test-more: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "$(MARKS)" $(if $(findstring slow and not long,$(MARKS)),,--timeout 0) $(PROPERTIES) $(TESTS)

# What needs other packages or another machine: NAME is one of frameworks, tensorflow, aarch64, container, viewers.
test-extra:
	@case "$(NAME)" in frameworks|tensorflow|aarch64|container|viewers) ;; \
	*) echo "make test-extra NAME=frameworks|tensorflow|aarch64|container|viewers: \"$(NAME)\" is none of these"; exit 2;; esac
	$(MAKE) .extra-$(NAME)

# Models of JAX, Flax and Keras, and TFLite files, with the real packages; Keras computes with one other in a process, so it runs twice.
KERAS_TESTS := tests/frameworks/test_keras_models.py tests/frameworks/test_keras_layers.py
.PHONY: .extra-frameworks .extra-tensorflow .extra-aarch64 .extra-container .extra-viewers
.extra-frameworks: $(FRAMEWORKS)/.installed
	PYTHONPATH=$(CURDIR)/$(FRAMEWORKS) KERAS_BACKEND=jax $(BIN)/python -m pytest -n 2 --dist worksteal tests/frameworks
	PYTHONPATH=$(CURDIR)/$(FRAMEWORKS) KERAS_BACKEND=torch $(BIN)/python -m pytest -n 2 --dist worksteal $(KERAS_TESTS)

$(FRAMEWORKS)/.installed: requirements-frameworks.lock $(STAMP)
	rm -rf $(FRAMEWORKS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(FRAMEWORKS) --requirement requirements-frameworks.lock
	touch $@

# TensorFlow takes another 1.4 GB, so that its SavedModels are apart.
TENSORFLOW := .tensorflow
.extra-tensorflow: $(FRAMEWORKS)/.installed $(TENSORFLOW)/.installed
	PYTHONPATH=$(CURDIR)/$(TENSORFLOW):$(CURDIR)/$(FRAMEWORKS) KERAS_BACKEND=tensorflow \
		$(BIN)/python -m pytest -n 2 --dist worksteal tests/frameworks/tensorflow

$(TENSORFLOW)/.installed: requirements-tensorflow.lock $(STAMP)
	rm -rf $(TENSORFLOW)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TENSORFLOW) --requirement requirements-tensorflow.lock
	touch $@

# An aarch64 machine that is emulated, of Debian's packages and a worker's wheels: on Debian, without root.
AARCH64 := .aarch64
.extra-aarch64: $(AARCH64)/.installed
	AARCH64_PYTHON=$(CURDIR)/$(AARCH64)/python $(BIN)/python -m pytest tests/aarch64

$(AARCH64)/.installed: tests/aarch64/machine.py requirements.lock $(STAMP)
	rm -rf $(AARCH64)
	$(BIN)/python -m tests.aarch64.machine $(AARCH64)
	touch $@

# The worker's image and containers of it: as root on Debian, with podman, crun and debootstrap installed.
CONTAINER := .container
.extra-container: $(CONTAINER)/.installed
	CONTAINER_FOLDER=$(CURDIR)/$(CONTAINER) $(BIN)/python -m pytest tests/container

$(CONTAINER)/.installed: tests/container/image.py deploy/Containerfile requirements.lock $(STAMP)
	rm -rf $(CONTAINER)
	$(BIN)/python -m tests.container.image $(CONTAINER)
	touch $@

# What opens traces, metrics and the page: Perfetto's trace processor in node, TensorBoard's profile plugin, Debian's Prometheus,
# and Debian's Chromium, which is installed.
VIEWERS := .viewers
.extra-viewers: $(VIEWERS)/.installed
	PYTHONPATH=$(CURDIR)/$(VIEWERS) VIEWERS=$(CURDIR)/$(VIEWERS) $(BIN)/python -m pytest tests/viewers

$(VIEWERS)/.installed: requirements-viewers.lock $(STAMP)
	rm -rf $(VIEWERS)
	mkdir $(VIEWERS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(VIEWERS) $$(grep -Ev '^(#|xprof)' requirements-viewers.lock)
	$(PYTHON) -m venv $(VIEWERS)/tensorboard
	$(VIEWERS)/tensorboard/bin/python -m pip install --quiet "$$(grep ^xprof requirements-viewers.lock)"
	cd $(VIEWERS) && apt-get download --quiet prometheus && dpkg -x prometheus_*.deb .
	touch $@

# As a user installs: a wheel, without the lock, into a new environment outside of this checkout. Of torch alone it is the lock's
# version, which pip has already: the newest may be a build for GPUs of several gigabytes.
test-install: setup
	$(BIN)/python -m scripts.check_install

# The lower bounds of pyproject.toml, with each Python that there is: torch for GPUs on most of them, 5 GB one after the other.
PYTHONS ?= $(foreach version,3.11 3.12 3.13,$(shell python$(version) -c 'import sys; print(sys.executable)' 2>/dev/null))
test-install-lowest: setup
	$(BIN)/python -m scripts.check_install --lowest $(PYTHONS)

# SECONDS for each of the fuzzers, which `make test` runs for a moment each.
fuzz: setup
	FUZZ_SECONDS=$(or $(SECONDS),60) FUZZ_SEED=$(or $(SEED),0) $(BIN)/python -m pytest tests/fuzz -p no:xdist -o timeout=0

# Faults hit real workers at random moments, for SECONDS; by hand STREAMS=500 SEED=7, or SEED=7 ONLY=131 with all logs.
chaos: setup
	$(BIN)/python -m tests.chaos $(if $(SECONDS),--seconds $(SECONDS)) $(if $(STREAMS),--streams $(STREAMS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json $(JSON))

# Nothing fails, beside 20 busy processes, slow links and long calls in C: fails if a failure is noticed all the same.
quiet-hour: setup
	$(BIN)/python -m tests.chaos.quiet_hour --seconds $(or $(SECONDS),3600)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_import_rules.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without NAME, the list of cases. ROUNDS of each measurement, ALSO="PYTHON …" for the interpreters of other checkouts,
# JSON=FILE for the results; OPTIONS are those of `python -m scripts.bench --help`, such as --check and --set.
BENCH = $(BIN)/python -m scripts.bench $(NAME) $(ONLY) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ALSO),--also $(ALSO)) \
	$(if $(JSON),--json $(JSON)) $(OPTIONS)
bench: setup $(if $(filter sources,$(NAME)),$(FRAMEWORKS)/.installed)
	$(if $(filter sources,$(NAME)),PYTHONPATH=$(CURDIR)/$(FRAMEWORKS)) $(BENCH)

# On a machine with a GPU, in eight minutes and without a network; OPTIONS="--set target=llvm" rehearses it on the CPU.
prove-gpu: setup
	$(BIN)/python -m scripts.bench gpu --check --time-limit 450 --json prove-gpu.json $(OPTIONS)

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(TENSORFLOW) $(AARCH64) $(CONTAINER) $(VIEWERS) build dist *.egg-info rpc_runtime/wire/worker_pb2* tvm_split/observing/xplane_pb2* .pytest_cache .mypy_cache .ruff_cache .hypothesis
