// Attention of one head in BF16 on AMX tiles; scores and softmax in FP32 on AVX512.
//
// All tiles have 16 rows of 64 bytes. Keys are packed as right operands of Q K^T (pairs of dims by 16 keys), values as
// right operands of P V (pairs of keys by 16 dims), queries and weights as left operands; each tile is 1 KiB in one
// piece, because a stride of 4 KiB costs tile loads dearly. Both products keep 2 x 2 tiles of sums.
#include "intrinsics.h"

#include "attention.h"

namespace int8_kernels {
namespace {

constexpr int kBytes = 64;

}  // namespace
}  // namespace int8_kernels

#include "attention_vector.h"

namespace int8_kernels {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 16;
constexpr int64_t kDepth = 32;  // BF16 values in a row of a left operand: dims of Q K^T, keys of P V
constexpr int64_t kQueries = 2 * kTileRows;  // of one block

typedef uint16_t Row __attribute__((vector_size(64)));
typedef uint16_t UnalignedRow __attribute__((vector_size(64), aligned(2), may_alias));

static int64_t depths(int64_t size) { return (size + kDepth - 1) / kDepth; }

// Scores of one query; not a power of two, so that rows do not compete for the same lines of a cache.
static int64_t score_stride(int64_t keys) { return padded(keys) + 16; }

static size_t key_bytes(int64_t keys, int64_t dim) {
  return static_cast<size_t>(2 * depths(keys) * depths(dim) * kTileBytes);
}

static size_t packed_bytes(int64_t keys, int64_t dim) { return 2 * key_bytes(keys, dim); }

// Where the parts of the scratch memory lie, in bytes.
struct Layout {
  int64_t scores, queries, weights, outputs, end;
  Layout(int64_t keys, int64_t dim) {
    scores = 0;
    queries = scores + kQueries * score_stride(keys) * 4;
    weights = queries + 2 * depths(dim) * kTileBytes;
    outputs = weights + 2 * depths(keys) * kTileBytes;
    end = outputs + kQueries * depths(dim) * kDepth * 4;
  }
};

static size_t scratch_bytes(int64_t, int64_t keys, int64_t dim) { return static_cast<size_t>(Layout(keys, dim).end); }

// 32 values of row `row` from dim `d` on; zeros beyond the last dim or row.
static Row piece(const void* operand, int64_t stride, int64_t row, int64_t rows, int64_t d, int64_t dim) {
  Row values = {};
  if (row >= rows) return values;
  const uint16_t* from = static_cast<const uint16_t*>(operand) + row * stride + d;
  if (d + kDepth <= dim) return *reinterpret_cast<const UnalignedRow*>(from);
  std::memcpy(&values, from, static_cast<size_t>(dim - d) * 2);
  return values;
}

static void store_row(void* to, Row values) { *static_cast<UnalignedRow*>(to) = values; }

// One right operand of Q K^T: row p holds dims (d + 2p, d + 2p + 1) of 16 keys, a transposition of pairs.
static void pack_key_tile(const AttentionTask& task, int64_t first, int64_t d, char* tile) {
  Vector pairs[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j)
    pairs[j] = (Vector)piece(task.key, task.key_stride, first + j, task.keys, d, task.dim);
  transpose<1>(pairs);
#pragma GCC unroll 16
  for (int p = 0; p < kLanes; ++p) store_row(tile + p * 64, (Row)pairs[p]);
}

template <int kFirst, int... kLane>
static inline Row interleaved(Row even, Row odd, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(even, odd, (kFirst + kLane / 2 + kLane % 2 * 32)...);
}

// Two right operands of P V: row p holds keys (first + 2p, first + 2p + 1) of 16 dims, from d and from d + 16 on.
static void pack_value_tiles(const AttentionTask& task, int64_t first, int64_t d, char* tiles) {
  using Lanes = std::make_integer_sequence<int, 32>;
  for (int64_t p = 0; p < kTileRows; ++p) {
    const Row even = piece(task.value, task.value_stride, first + 2 * p, task.keys, d, task.dim);
    const Row odd = piece(task.value, task.value_stride, first + 2 * p + 1, task.keys, d, task.dim);
    store_row(tiles + p * 64, interleaved<0>(even, odd, Lanes()));
    store_row(tiles + kTileBytes + p * 64, interleaved<16>(even, odd, Lanes()));
  }
}

// Keys: [32 keys][depth of dims][2 tiles of 16 keys]; values: [32 dims][32 keys][2 tiles of 16 dims].
static void pack(const AttentionTask& task) {
  touch(task.key, task.keys, task.dim * 2, task.key_stride * 2);
  touch(task.value, task.keys, task.dim * 2, task.value_stride * 2);
  const int64_t key_blocks = depths(task.keys), dim_blocks = depths(task.dim);
  char* keys = static_cast<char*>(task.packed);
  char* values = keys + key_bytes(task.keys, task.dim);
  for (int64_t k = 0; k < key_blocks; ++k)
    for (int64_t d = 0; d < dim_blocks; ++d) {
      char* tiles = keys + 2 * (k * dim_blocks + d) * kTileBytes;
      pack_key_tile(task, k * kDepth, d * kDepth, tiles);
      pack_key_tile(task, k * kDepth + kTileRows, d * kDepth, tiles + kTileBytes);
      pack_value_tiles(task, k * kDepth, d * kDepth, values + 2 * (d * key_blocks + k) * kTileBytes);
    }
}

// [depth of dims][2 tiles of 16 queries]
static void pack_queries(const AttentionTask& task, int64_t first, char* to) {
  for (int64_t d = 0; d < depths(task.dim); ++d)
    for (int64_t r = 0; r < kQueries; ++r)
      store_row(to + 2 * d * kTileBytes + r * 64,
                piece(task.query, task.query_stride, first + r, task.queries, d * kDepth, task.dim));
}

// The compiler does not know what tile loads read: everything stored before must be in memory.
static inline void finish_stores() { asm volatile("" ::: "memory"); }

// out (32 x 32 floats, `stride` apart) = sum over `count` pairs of left tiles times pairs of right tiles.
static void multiply(const char* left, const char* right, int64_t count, float* out, int64_t stride) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < count; ++i, left += 2 * kTileBytes, right += 2 * kTileBytes) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_loadd(7, right + kTileBytes, 64);
    _tile_loadd(5, left + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, stride * 4);
  _tile_stored(1, out + kTileRows, stride * 4);
  _tile_stored(2, out + kTileRows * stride, stride * 4);
  _tile_stored(3, out + kTileRows * stride + kTileRows, stride * 4);
}

// Weights of one query as a row of left operands, [32 keys][2 tiles of 16 queries]. Returns the reciprocal of their
// sum.
static float weights_of(const AttentionTask& task, int64_t query, float* scores, char* row) {
  return softmax<3>({scores, task.keys, task.scale, mask_row(task, query)}, [row](int64_t k, Vector a, Vector b) {
    store_row(row + k / kDepth * 2 * kTileBytes, (Row)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
  });
}

static void write_rows(const AttentionTask& task, int64_t first, int64_t count, const float* inverse,
                       const float* outputs) {
  const int64_t stride = depths(task.dim) * kDepth;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t offset = (first + r) * task.out_stride;
    const float* from = outputs + r * stride;
    int64_t d = 0;
    for (; d + kLanes <= task.dim; d += kLanes)
      store_elements(task.out, offset + d, load(from + d) * inverse[r], true);
    for (; d < task.dim; ++d) store_element(task.out, offset + d, from[d] * inverse[r], true);
  }
}

// Queries [first, first + 32) or as many as there are.
static void run_block(const AttentionTask& task, int64_t first) {
  const int64_t key_blocks = depths(task.keys), dim_blocks = depths(task.dim), stride = score_stride(task.keys);
  const int64_t count = task.queries - first < kQueries ? task.queries - first : kQueries;
  const Layout layout(task.keys, task.dim);
  char* memory = static_cast<char*>(task.scratch);
  float* scores = reinterpret_cast<float*>(memory + layout.scores);
  char *queries = memory + layout.queries, *weights = memory + layout.weights;
  float* outputs = reinterpret_cast<float*>(memory + layout.outputs);
  const char* keys = static_cast<const char*>(task.packed);
  const char* values = keys + key_bytes(task.keys, task.dim);

  pack_queries(task, first, queries);
  finish_stores();
  for (int64_t k = 0; k < key_blocks; ++k)
    multiply(queries, keys + 2 * k * dim_blocks * kTileBytes, dim_blocks, scores + k * kDepth, stride);
  float inverse[kQueries];
  // Rows of a tile beyond the last query are what an earlier block left there; nobody reads what comes of them.
  for (int64_t r = 0; r < count; ++r)
    inverse[r] = weights_of(task, first + r, scores + r * stride, weights + r * 64);
  finish_stores();
  for (int64_t d = 0; d < dim_blocks; ++d)
    multiply(weights, values + 2 * d * key_blocks * kTileBytes, key_blocks, outputs + d * kDepth, dim_blocks * kDepth);
  finish_stores();
  write_rows(task, first, count, inverse, outputs);
}

static void run(const AttentionTask& task) {
  struct alignas(64) Configuration {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } configuration;
  finish_stores();
  _tile_loadconfig(&configuration);
  touch(task.query, task.queries, task.dim * 2, task.query_stride * 2);
  for (int64_t first = 0; first < task.queries; first += kQueries) run_block(task, first);
  _tile_release();
}

static bool available() {
#ifdef INT8_EMULATE_ISA
  return true;
#else
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
         __builtin_cpu_supports("amx-bf16");
#endif
}

}  // namespace

const AttentionKernel kAttentionAmx = {
    "int8:attention_amx", false, packed_bytes, scratch_bytes, pack, run, available,
};

}  // namespace int8_kernels
