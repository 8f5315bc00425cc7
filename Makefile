# The main commands. Most targets first install missing packages (tools/packages.txt) and build; `make install` installs none.
# Output is in build/.
#
#   make run       train the example language model, on the GPU if there is one, and draw its loss curve; ARCH=all (or ARCH=conv,hybrid; SEEDS=3):
#                  train several architectures, and print a table at the end
#   make test      run all tests, in the normal build and with AddressSanitizer and UndefinedBehaviorSanitizer
#   make bench     measure every op, and the machine's limits
#   make gpu       [OP=op] [STAGE=check|sanitize|bench|demo|peers] run all checks and benchmarks for a GPU
#   make emulate   [OP=op] check the device kernels on the CPU, without a GPU (tests/emulator); takes some minutes
#   make format    format the C files with .clang-format
#   make lint      check format, direction of includes, exported symbols, device code, binary interface
#   make fuzz      run each fuzzer for TIME=60 seconds
#   make faults    [NAME=text] plant faults in a copy of the tree, one at a time, and check that a test finds each
#                  (tests/faults); NAME: only faults whose name contains text
#   make tables    write the benchmark pages (docs/benchmarks), other tables and the charts from bench/results, and the
#                  reference of the Python package (docs/guide/python_reference*.md) from its docstrings
#   make docs      write the reference of the public headers to build/docs/html, and the pages to build/docs/guide
#   make build     build the library, the program, the examples and the tests
#   make hf_kernels  write the folder that the loader of Hugging Face kernels expects to build/kernels_layout
#   make install   [PREFIX=/usr/local] [DESTDIR=] [GPUS="80;86;89"] install libraries, headers, program, man pages,
#                  CMake and pkg-config files. GPUS: machine code for GPUs other than Hopper; without it the driver
#                  compiles at the first call. FATBINS=build/cuda: take the device code of a build. Installs no package
#                  and changes nothing outside PREFIX (on a new machine run `make setup` first)
#   make uninstall remove the files of the last `make install`
#   make deb       build Debian packages, in build/release/deb
#   make wheel     [DIST=dist] build the wheels for Linux with glibc 2.28 or newer, with GPU code and for the CPU alone, and the
#                  source distribution
#   make release   TAG=vVERSION [DIST=dist] build wheels, source archives, Debian packages, bill of materials, changes and
#                  checksums from a tag, in DIST/TAG
#   make clean     remove build/

BUILD = build
.DEFAULT_GOAL = build
.NOTPARALLEL:
.PHONY: setup build asan run test bench gpu emulate format lint fuzz faults tables docs hf_kernels wheel release release_build install uninstall deb clean

setup:
	@tools/setup.sh

# ninja runs cmake again if a CMakeLists.txt has changed.
build: setup
	@test -f $(BUILD)/build.ninja || cmake --log-level=NOTICE -G Ninja -S . -B $(BUILD)
	@cmake --build $(BUILD)

asan: setup
	@test -f $(BUILD)/asan/build.ninja || CC=clang CXX=clang++ cmake --log-level=NOTICE -G Ninja -S . -B $(BUILD)/asan -DCOT_SANITIZE=ON -DCOT_CUDA=OFF -DCOT_HIP=OFF
	@cmake --build $(BUILD)/asan

# In a fresh clone, build only the trainer; without a GPU also without device code, which takes minutes to compile.
TRAINER = $(if $(wildcard $(BUILD)/build.ninja),$(BUILD),$(BUILD)/trainer)
run: setup
	@test -f $(TRAINER)/build.ninja || cmake --log-level=NOTICE -G Ninja -S . -B $(TRAINER) -DCMAKE_BUILD_TYPE=Release \
		-DCOT_CUDA=$(if $(wildcard /dev/nvidia0),ON,OFF) -DCOT_PYTHON=OFF -DCOT_HIP=OFF
	@cmake --build $(TRAINER) --target train_lm
	@$(TRAINER)/train_lm --backend auto --out $(BUILD)/run $(if $(ARCH),--arch $(ARCH)) $(if $(SEEDS),--seeds $(SEEDS))

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
	@tools/check_device_code.sh $(BUILD) || [ $$? -eq 77 ]
	@tools/check_abi.sh $(BUILD)

faults: setup
	@tools/plant_faults.sh --work $(BUILD)/faults --cuda $(BUILD) --python $(BUILD) $(if $(NAME),"$(NAME)")

tables: setup
	@tools/make_tables.py
	@tools/make_charts.py
	@tools/make_reference.py

TIME = 60
fuzz: asan
	@tools/fuzz.sh $(BUILD)/asan $(TIME)

docs: setup
	@tools/make_docs.sh $(BUILD)/docs
	@tools/make_guide.py $(BUILD)/docs/guide

hf_kernels: setup
	@test -f $(BUILD)/build.ninja || cmake --log-level=NOTICE -G Ninja -S . -B $(BUILD)
	@cmake --build $(BUILD) --target kernels_layout

# The installed build has no tests and no debug information.
PREFIX = /usr/local
RELEASE = $(BUILD)/release
release_build:
	@cmake --log-level=NOTICE -G Ninja -S . -B $(RELEASE) -DCMAKE_BUILD_TYPE=Release -DCOT_TESTS=OFF -DCOT_PYTHON=OFF \
		-DCMAKE_INSTALL_PREFIX=$(PREFIX) "-DCOT_GPUS=$(GPUS)" "-DCOT_FATBINS=$(FATBINS)"
	@cmake --build $(RELEASE)

install: release_build
	@DESTDIR=$(DESTDIR) cmake --install $(RELEASE)

uninstall:
	@tools/uninstall.sh $(RELEASE)/install_manifest.txt $(DESTDIR)

deb: setup
	@$(MAKE) --no-print-directory release_build PREFIX=/usr
	@cd $(RELEASE) && cpack -G DEB

DIST = dist
wheel: setup
	@tools/make_wheel.sh $(BUILD) $(DIST)

release: setup
	@tools/make_release.sh $(TAG) $(BUILD) $(DIST)/$(TAG)

clean:
	rm -rf $(BUILD)
