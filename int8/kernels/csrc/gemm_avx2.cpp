// AVX2 without VNNI. Levels are widened to 16 bit and multiplied by vpmaddwd: exact with full 8-bit weights, where
// the unsigned x signed vpmaddubsw saturates, and on these cores just as many products a cycle.
#include "intrinsics.h"
#include "levels.h"

namespace {

struct Isa {
  static constexpr int kGroup = 2;
  static constexpr int kRows = 6;
  static constexpr int kPanels = 1;
  static constexpr int kShift = 0;
  struct Acc {
    __m256i half[2];
  };
  struct Weights {
    __m256i half[2];
  };
  static inline Weights weights(const int8_t* from) {
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))};
  }
  static inline void dot(Acc& acc, const int32_t& a, const Weights& w) {
    const __m256i both = _mm256_set1_epi32(a);
    acc.half[0] = _mm256_add_epi32(acc.half[0], _mm256_madd_epi16(both, w.half[0]));
    acc.half[1] = _mm256_add_epi32(acc.half[1], _mm256_madd_epi16(both, w.half[1]));
  }
  static inline int32_t group(const int8_t* from, int count) { return widened_pair(from, count); }
  static inline void store(int32_t* to, const Acc& acc) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), acc.half[0]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to) + 1, acc.half[1]);
  }
};

}  // namespace

#define INT8_LANES 8
#include "gemm_vector.h"

namespace int8_kernels {

const GemmKernel kGemmAvx2 = {"int8:avx2", Isa::kGroup, packed_a_bytes, row_blocks, pack_a, units, run,
                              [] { return static_cast<bool>(__builtin_cpu_supports("avx2")); }};

}  // namespace int8_kernels
