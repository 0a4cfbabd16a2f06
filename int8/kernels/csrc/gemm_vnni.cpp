// AVX512-VNNI: vpdpbusd multiplies unsigned by signed bytes and adds four products in 32 bit without saturation. Levels
// of A become unsigned by adding 128; the epilogue takes 128 times the column sums off again.
#include "intrinsics.h"
#include "levels.h"

namespace {

struct Isa {
  static constexpr int kGroup = 4;
  static constexpr int kRows = 12;
  static constexpr int kPanels = 2;
  static constexpr int kShift = 128;
  using Acc = __m512i;
  using Weights = __m512i;
  static inline Weights weights(const int8_t* from) { return _mm512_loadu_si512(from); }
  static inline void dot(Acc& acc, const int32_t& a, const Weights& w) {
    acc = _mm512_dpbusd_epi32(acc, _mm512_set1_epi32(a), w);
  }
  static inline int32_t group(const int8_t* from, int count) { return unsigned_quad(from, count); }
  static inline void store(int32_t* to, const Acc& acc) { _mm512_store_si512(to, acc); }
};

}  // namespace

#include "gemm_vector.h"

namespace int8_kernels {

const GemmKernel kGemmVnni = {"int8:vnni", Isa::kGroup, packed_a_bytes, row_blocks, pack_a, units, run, [] {
                                return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                                       __builtin_cpu_supports("avx512vnni");
                              }};

}  // namespace int8_kernels
