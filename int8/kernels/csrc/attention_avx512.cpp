// Attention in FP32 on AVX512: 24 of 32 registers hold sums. CPUs with VNNI use it as well.
#include "attention.h"

namespace int8_kernels {
namespace {

constexpr int kBytes = 64;
constexpr int kRows = 12;

}  // namespace
}  // namespace int8_kernels

#include "attention_fp32.h"

namespace int8_kernels {
namespace {

static bool available() {
#ifdef INT8_EMULATE_ISA
  return true;
#else
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
}

}  // namespace

const AttentionKernel kAttentionAvx512 = {
    "int8:attention_avx512", true, packed_bytes, scratch_bytes, pack, run, available,
};

}  // namespace int8_kernels
