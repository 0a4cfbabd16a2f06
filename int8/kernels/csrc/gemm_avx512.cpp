// AVX512 without VNNI: as the AVX2 kernel, with vectors twice as wide. Exact with full 8-bit weights.
#include "intrinsics.h"
#include "levels.h"

namespace {

struct Isa {
  static constexpr int kGroup = 2;
  static constexpr int kRows = 12;
  static constexpr int kPanels = 2;
  static constexpr int kShift = 0;
  using Acc = __m512i;
  using Weights = __m512i;
  static inline Weights weights(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static inline void dot(Acc& acc, const int32_t& a, const Weights& w) {
    acc = _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_set1_epi32(a), w));
  }
  static inline int32_t group(const int8_t* from, int count) { return widened_pair(from, count); }
  static inline void store(int32_t* to, const Acc& acc) { _mm512_store_si512(to, acc); }
};

}  // namespace

#include "gemm_vector.h"

namespace int8_kernels {

const GemmKernel kGemmAvx512 = {"int8:avx512", Isa::kGroup, packed_a_bytes, row_blocks, pack_a, units, run, [] {
                                  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
                                }};

}  // namespace int8_kernels
