// AVX2 for weights that keep to 7 bits: vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16 bit, which
// 2 x 255 x 63 does not overflow. A third fewer instructions than widening to 16 bit first.
#include "intrinsics.h"
#include "levels.h"

namespace {

struct Isa {
  static constexpr int kGroup = 4;
  static constexpr int kRows = 6;
  static constexpr int kPanels = 1;
  static constexpr int kShift = 128;
  struct Acc {
    __m256i half[2];
  };
  struct Weights {
    __m256i half[2];
  };
  static inline Weights weights(const int8_t* from) {
    const __m256i* at = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
  }
  static inline __m256i products(__m256i a, __m256i w) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(a, w), _mm256_set1_epi16(1));
  }
  static inline void dot(Acc& acc, const int32_t& a, const Weights& w) {
    const __m256i both = _mm256_set1_epi32(a);
    acc.half[0] = _mm256_add_epi32(acc.half[0], products(both, w.half[0]));
    acc.half[1] = _mm256_add_epi32(acc.half[1], products(both, w.half[1]));
  }
  static inline int32_t group(const int8_t* from, int count) { return unsigned_quad(from, count); }
  static inline void store(int32_t* to, const Acc& acc) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), acc.half[0]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to) + 1, acc.half[1]);
  }
};

}  // namespace

#define INT8_LANES 8
#include "gemm_vector.h"

namespace int8_kernels {

const GemmKernel kGemm7Avx2 = {"int8:avx2_7bit", Isa::kGroup, packed_a_bytes, row_blocks, pack_a, units, run,
                               [] { return static_cast<bool>(__builtin_cpu_supports("avx2")); }};

}  // namespace int8_kernels
