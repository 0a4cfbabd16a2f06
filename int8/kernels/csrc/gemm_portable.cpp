// Plain C++ for any CPU: the reference that the other kernels are tested against.
#include <cstdint>

#include "levels.h"

namespace {

struct Isa {
  static constexpr int kGroup = 2;
  static constexpr int kRows = 4;
  static constexpr int kPanels = 1;
  static constexpr int kShift = 0;
  struct Acc {
    int32_t lane[16];
  };
  struct Weights {
    const int8_t* from;
  };
  static inline Weights weights(const int8_t* from) { return {from}; }
  static inline void dot(Acc& acc, const int32_t& a, const Weights& w) {
    const int32_t low = static_cast<int16_t>(a & 0xffff), high = a >> 16;
    for (int j = 0; j < 16; ++j) acc.lane[j] += low * w.from[2 * j] + high * w.from[2 * j + 1];
  }
  static inline int32_t group(const int8_t* from, int count) { return widened_pair(from, count); }
  static inline void store(int32_t* to, const Acc& acc) {
    for (int j = 0; j < 16; ++j) to[j] = acc.lane[j];
  }
};

}  // namespace

#define INT8_LANES 4
#include "gemm_vector.h"

namespace int8_kernels {

const GemmKernel kGemmPortable = {"int8:portable", Isa::kGroup, packed_a_bytes, row_blocks,
                                  pack_a,          units,       run,            [] { return true; }};

}  // namespace int8_kernels
