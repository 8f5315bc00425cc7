# The front door. Every target installs what is missing (tools/packages.txt) and builds first; all of it lands in build/.
#
#   make run       train the example language model on real text, and draw its loss curve; ARCH=all: one architecture after
#                  the other and a table at the end (or ARCH=conv,hybrid; SEEDS=3)
#   make test      every test, in the normal build and again under AddressSanitizer and UndefinedBehaviorSanitizer
#   make bench     measure every op beside the machine's own ceilings
#   make gpu       [OP=op] [STAGE=check|sanitize|bench|demo|peers]: all that is to be done on a machine with a GPU (tools/gpu.sh)
#   make emulate   [OP=op] check the device kernels without a GPU, on the CPU (tests/emulator); some minutes
#   make format    lay out the C files by .clang-format
#   make lint      layout, direction of the includes, exported symbols, device code, binary interface
#   make fuzz      run each fuzzer for TIME=60 seconds
#   make faults    [NAME=text] plant faults in a copy of the tree, one at a time, and see that a test catches each
#                  (tests/faults); NAME: only those whose name contains text
#   make tables    write the benchmark pages (docs/benchmarks) and other tables from bench/results, and draw their pictures
#   make docs      the reference of the public headers in build/docs/html, the pages as HTML in build/docs/guide
#   make build     the library, the program, the examples, the tests
#   make install   PREFIX=/usr/local, DESTDIR=, GPUS="80;86;89" (machine code for more than Hopper; without, drivers make
#                  theirs at the first call) : libraries, headers, program, man pages, CMake and pkg-config files;
#                  installs no package and touches nothing outside PREFIX (`make setup` first on a fresh machine)
#   make uninstall what the last `make install` put there
#   make deb       Debian packages, in build/release/deb
#   make clean     remove build/

BUILD = build
.DEFAULT_GOAL = build
.NOTPARALLEL:
.PHONY: setup build asan run test bench gpu emulate format lint fuzz faults tables docs release install uninstall deb clean

setup:
	@tools/setup.sh

# ninja runs cmake again by itself when a CMakeLists.txt has changed.
build: setup
	@test -f $(BUILD)/build.ninja || cmake --log-level=NOTICE -G Ninja -S . -B $(BUILD)
	@cmake --build $(BUILD)

asan: setup
	@test -f $(BUILD)/asan/build.ninja || CC=clang CXX=clang++ cmake --log-level=NOTICE -G Ninja -S . -B $(BUILD)/asan -DCOT_SANITIZE=ON -DCOT_CUDA=OFF
	@cmake --build $(BUILD)/asan

# In a fresh clone the trainer's part alone, without device code: minutes of compiling less.
TRAINER = $(if $(wildcard $(BUILD)/build.ninja),$(BUILD),$(BUILD)/trainer)
run: setup
	@test -f $(TRAINER)/build.ninja || cmake --log-level=NOTICE -G Ninja -S . -B $(TRAINER) -DCMAKE_BUILD_TYPE=Release \
		-DCOT_CUDA=OFF -DCOT_PYTHON=OFF
	@cmake --build $(TRAINER) --target train_lm
	@$(TRAINER)/train_lm --out $(BUILD)/run $(if $(ARCH),--arch $(ARCH)) $(if $(SEEDS),--seeds $(SEEDS))

test: build asan
	@tools/run_tests.sh $(BUILD) $(BUILD)/asan

bench: build
	@$(BUILD)/cotangent bench

gpu: build
	@tools/gpu.sh --program $(BUILD)/cotangent $(if $(OP),--op $(OP)) $(if $(STAGE),--stage $(STAGE))

emulate: build
	@LD_LIBRARY_PATH=$(BUILD)/tests/emulator $(BUILD)/cotangent check $(OP) --backend cuda --quick

format: setup
	@tools/format.sh

lint: build
	@tools/format.sh --check
	@tools/check_includes.sh
	@tools/check_exports.sh $(BUILD)
	@tools/check_device_code.sh $(BUILD)
	@tools/check_abi.sh $(BUILD)

faults: setup
	@tools/plant_faults.sh --work $(BUILD)/faults --cuda $(BUILD) --python $(BUILD) $(if $(NAME),"$(NAME)")

tables: setup
	@tools/make_tables.py
	@tools/make_charts.py

TIME = 60
fuzz: asan
	@tools/fuzz.sh $(BUILD)/asan $(TIME)

docs: setup
	@tools/make_docs.sh $(BUILD)/docs
	@tools/make_guide.py $(BUILD)/docs/guide

# What is installed has no tests, and no debug information.
PREFIX = /usr/local
RELEASE = $(BUILD)/release
release:
	@cmake --log-level=NOTICE -G Ninja -S . -B $(RELEASE) -DCMAKE_BUILD_TYPE=Release -DCOT_TESTS=OFF -DCOT_PYTHON=OFF \
		-DCMAKE_INSTALL_PREFIX=$(PREFIX) "-DCOT_GPUS=$(GPUS)"
	@cmake --build $(RELEASE)

install: release
	@DESTDIR=$(DESTDIR) cmake --install $(RELEASE)

uninstall:
	@tools/uninstall.sh $(RELEASE)/install_manifest.txt $(DESTDIR)

deb: setup
	@$(MAKE) --no-print-directory release PREFIX=/usr
	@cd $(RELEASE) && cpack -G DEB

clean:
	rm -rf $(BUILD)
