# Compiler flags of each instruction set, for the kernels (CMakeLists.txt), the ceilings (src/bench) and the tests of
# src/simd (tests/simd). A source that includes src/simd/simd.h is compiled once for each of them.
set(COT_FLAGS_portable "-DCOT_SIMD_PORTABLE")
set(COT_FLAGS_avx2 "-DCOT_SIMD_AVX2 -mavx2 -mfma -mf16c")
set(COT_FLAGS_avx512
  "-DCOT_SIMD_AVX512 -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512")
# With the instructions that convert to bf16.
set(COT_FLAGS_avx512bf16 "${COT_FLAGS_avx512} -mavx512bf16")
# Products on AMX tiles of bf16. split: f16 as sums of two bf16. split3: float32 as sums of three.
set(COT_FLAGS_amx "${COT_FLAGS_avx512bf16} -DCOT_MATMUL_AMX -mamx-tile -mamx-bf16")
set(COT_FLAGS_amx_split "${COT_FLAGS_amx} -DCOT_MATMUL_SPLIT=2")
set(COT_FLAGS_amx_split3 "${COT_FLAGS_amx} -DCOT_MATMUL_SPLIT=3")
