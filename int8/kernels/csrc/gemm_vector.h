// The register-blocked loop that the vector kernels share. A kernel file defines `Isa` and includes this.
//
//     struct Isa {
//       static constexpr int kGroup;            // bytes of K that one dot product takes, 2 or 4
//       static constexpr int kRows;             // rows of a register block
//       static constexpr int kPanels;           // weight panels of a register block, 1 or 2
//       using Acc;                              // accumulators of 16 columns
//       using Weights;                          // one K group of 16 columns
//       static Weights weights(const int8_t*);
//       static void dot(Acc&, int32_t a, const Weights&);
//       static int32_t group(const int8_t*, int count);   // one K group of A, the broadcast operand
//       static constexpr int32_t kShift;        // what group() adds to each level
//       static void store(int32_t*, const Acc&);
//     };
//
// Blocks: rows in chunks whose packed A stays in half of L2; inside a chunk one pair of weight panels at a time, which
// the row blocks reuse from L1 (or L2 where K is large).
#include "epilogue.h"

namespace {

using int8_kernels::GemmCall;
using int8_kernels::kDepth;
using int8_kernels::kPanel;
using int8_kernels::round_up;

constexpr int64_t kChunkBytes = 256 * 1024;
// Few rows are multiplied by a smaller block, so that padding costs little.
constexpr int kFewRows = 4;

// Not std::min and std::fill: their instances would be shared with files compiled for a lesser ISA.
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t block_rows(int64_t m) { return m <= kFewRows ? kFewRows : Isa::kRows; }
inline int64_t row_blocks(int64_t m) { return (m + block_rows(m) - 1) / block_rows(m); }

// One INT32 a row and K group.
inline int64_t packed_row_bytes(int64_t k) { return round_up(k, kDepth) / Isa::kGroup * 4; }
inline int64_t packed_a_bytes(int64_t m, int64_t k) { return row_blocks(m) * block_rows(m) * packed_row_bytes(k); }

// [block][K / group][row]: the inner loop broadcasts neighbours.
void pack_a(const int8_t* a, int64_t lda, int64_t m, int64_t k, void* packed, int64_t begin, int64_t end) {
  const int64_t rows = block_rows(m), groups = round_up(k, kDepth) / Isa::kGroup, whole = k / Isa::kGroup;
  for (int64_t block = begin; block < end; ++block) {
    int32_t* out = static_cast<int32_t*>(packed) + block * groups * rows;
    const int64_t valid = least(rows, m - block * rows);
    if (valid < rows || whole < groups) std::memset(out, 0, groups * rows * sizeof(int32_t));
    for (int64_t i = 0; i < valid; ++i) {
      const int8_t* row = a + (block * rows + i) * lda;
      for (int64_t g = 0; g < whole; ++g) out[g * rows + i] = Isa::group(row + g * Isa::kGroup, Isa::kGroup);
      if (whole * Isa::kGroup < k) {
        out[whole * rows + i] = Isa::group(row + whole * Isa::kGroup, static_cast<int>(k - whole * Isa::kGroup));
      }
    }
  }
}

// rows x (panels * 16) accumulators over the whole of K.
template <int rows, int panels>
inline void multiply(const int32_t* a, const int8_t* b, int64_t panel_bytes, int64_t groups, int32_t* out) {
  typename Isa::Acc acc[rows][panels] = {};
  for (int64_t g = 0; g < groups; ++g) {
    typename Isa::Weights w[panels];
#pragma GCC unroll 4
    for (int p = 0; p < panels; ++p) w[p] = Isa::weights(b + p * panel_bytes + g * kPanel * Isa::kGroup);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
      for (int p = 0; p < panels; ++p) Isa::dot(acc[i][p], a[g * rows + i], w[p]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < panels; ++p) Isa::store(out + (i * panels + p) * kPanel, acc[i][p]);
  }
}

// Row blocks of a chunk. Chunks are equal: a short last one would leave a thread without work.
inline int64_t chunk_blocks(const GemmCall& call) {
  const int64_t block_bytes = block_rows(call.m) * packed_row_bytes(call.k), blocks = row_blocks(call.m);
  const int64_t chunks = (blocks * block_bytes + kChunkBytes - 1) / kChunkBytes;
  return (blocks + chunks - 1) / chunks;
}

inline int64_t column_groups(const GemmCall& call) {
  constexpr int64_t width = Isa::kPanels * kPanel;
  return (call.n + width - 1) / width;
}

int64_t units(const GemmCall& call) {
  const int64_t blocks = row_blocks(call.m), chunk = chunk_blocks(call);
  return (blocks + chunk - 1) / chunk * column_groups(call);
}

template <int rows, int panels>
void run_columns(const GemmCall& call, const Epilogue& e, int64_t first, int64_t last, int64_t n) {
  const int64_t groups = call.k / Isa::kGroup, panel_bytes = kPanel * call.k;
  const Finish finish = finisher(e.post);
  alignas(64) int32_t acc[rows * panels * kPanel];
  for (int64_t block = first; block < last; ++block) {
    const int32_t* a = static_cast<const int32_t*>(call.a) + block * groups * rows;
    multiply<rows, panels>(a, call.b + n / kPanel * panel_bytes, panel_bytes, groups, acc);
    const int64_t m = block * rows;
    finish(e, acc, panels * kPanel, m, least(rows, call.m - m), n, panels * kPanel, call.n);
  }
}

template <int rows>
void run_rows(const GemmCall& call, int64_t begin, int64_t end) {
  Epilogue e = call.epilogue;
  // Levels were shifted to unsigned: sum_k (A + shift) B = acc + shift * column_sum.
  e.zero_point += Isa::kShift;
  const int64_t blocks = row_blocks(call.m), chunk = chunk_blocks(call), across = column_groups(call);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit / across * chunk, last = least(blocks, first + chunk);
    const int64_t n = unit % across * Isa::kPanels * kPanel;
    if (Isa::kPanels > 1 && call.n - n > kPanel) {
      run_columns<rows, Isa::kPanels>(call, e, first, last, n);
    } else {
      run_columns<rows, 1>(call, e, first, last, n);
    }
  }
}

void run(const GemmCall& call, int64_t begin, int64_t end) {
  if (call.m <= kFewRows) {
    run_rows<kFewRows>(call, begin, end);
  } else {
    run_rows<Isa::kRows>(call, begin, end);
  }
}

}  // namespace
