// Attention in FP32 on AVX2: 12 of 16 registers hold sums, the others two vectors of keys and a query.
#include "attention.h"

namespace int8_kernels {
namespace {

constexpr int kBytes = 32;
constexpr int kRows = 6;

}  // namespace
}  // namespace int8_kernels

#include "attention_fp32.h"

namespace int8_kernels {
namespace {

static bool available() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace

const AttentionKernel kAttentionAvx2 = {
    "int8:attention_avx2", true, packed_bytes, scratch_bytes, pack, run, available,
};

}  // namespace int8_kernels
