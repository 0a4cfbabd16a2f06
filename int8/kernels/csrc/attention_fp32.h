// Attention of one head in FP32, written once for every vector width.
//
// Keys are packed transposed, in panels of two vectors of keys; values row by row, padded to whole panels. Both
// products keep a block of kRows x two vectors in registers. Scores of a block of queries stay in cache as whole rows,
// so the softmax is the plain one: maximum, exponential and sum, and the division at the end, on the outputs.
//
// A kernel file says how wide its vectors are and how many query rows a block of sums has (kBytes and kRows, in the
// anonymous namespace of int8_kernels; kRows * 2 + 3 vectors must fit the registers), then includes this.
#include "attention_vector.h"

namespace int8_kernels {
namespace {

// Queries whose scores are kept at once: as many as leave them in a first-level cache, whole blocks of rows.
constexpr int kScoreBytes = 24 * 1024;
constexpr int kMaxBlocks = 8;

static size_t packed_bytes(int64_t keys, int64_t dim) {
  return static_cast<size_t>(padded(keys) * dim + keys * padded(dim)) * sizeof(float);
}

static int64_t blocks(int64_t queries, int64_t keys) {
  int64_t count = kScoreBytes / (kRows * padded(keys) * static_cast<int64_t>(sizeof(float)));
  if (count < 1) count = 1;
  if (count > kMaxBlocks) count = kMaxBlocks;
  const int64_t needed = (queries + kRows - 1) / kRows;
  return count < needed ? count : needed;
}

// Enough for every number of keys up to this one: with fewer, more queries have their scores kept at once.
static size_t scratch_bytes(int64_t, int64_t keys, int64_t dim) {
  const int64_t one_block = kRows * padded(keys) * static_cast<int64_t>(sizeof(float));
  const int64_t others = kMaxBlocks * kRows * dim + kRows * padded(dim);
  return static_cast<size_t>(one_block > kScoreBytes ? one_block : kScoreBytes) + others * sizeof(float);
}

// panel[d][j] = key[first + j][d] for kLanes keys; zeros beyond the last.
static void pack_keys(const AttentionTask& task, int64_t first, float* panel) {
  const int64_t left = task.keys - first;
  const int64_t count = left < 0 ? 0 : left < kLanes ? left : kLanes;
  const int64_t whole = task.dim / kLanes * kLanes;
  for (int64_t d = 0; d < whole; d += kLanes) {
    Vector rows[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j)
      rows[j] = j < count ? elements(task.key, (first + j) * task.key_stride + d, task.bfloat16) : Vector{};
    transpose<1>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kPanel, rows[i]);
  }
  for (int64_t d = whole; d < task.dim; ++d)
    for (int64_t j = 0; j < kLanes; ++j)
      panel[d * kPanel + j] = j < count ? element(task.key, (first + j) * task.key_stride + d, task.bfloat16) : 0.0f;
}

static void pack_value(const AttentionTask& task, int64_t key, float* to) {
  const int64_t offset = key * task.value_stride, width = padded(task.dim);
  int64_t d = 0;
  for (; d + kLanes <= task.dim; d += kLanes) store(to + d, elements(task.value, offset + d, task.bfloat16));
  for (; d < task.dim; ++d) to[d] = element(task.value, offset + d, task.bfloat16);
  for (; d < width; ++d) to[d] = 0.0f;
}

static void pack(const AttentionTask& task) {
  const int64_t size = task.bfloat16 ? 2 : 4;
  touch(task.key, task.keys, task.dim * size, task.key_stride * size);
  touch(task.value, task.keys, task.dim * size, task.value_stride * size);
  float* keys = static_cast<float*>(task.packed);
  float* values = keys + padded(task.keys) * task.dim;
  for (int64_t panel = 0; panel < task.keys; panel += kPanel) {
    pack_keys(task, panel, keys + panel * task.dim);
    pack_keys(task, panel + kLanes, keys + panel * task.dim + kLanes);
  }
  for (int64_t k = 0; k < task.keys; ++k) pack_value(task, k, values + k * padded(task.dim));
}

// queries[block][d][r], scaled; zeros beyond the last query of a block.
static void pack_queries(const AttentionTask& task, int64_t first, int64_t count, float* to) {
  for (int64_t r = 0; r < (count + kRows - 1) / kRows * kRows; ++r) {
    float* column = to + r / kRows * kRows * task.dim + r % kRows;
    const int64_t offset = (first + r) * task.query_stride;
    for (int64_t d = 0; d < task.dim; ++d)
      column[d * kRows] = r < count ? element(task.query, offset + d, task.bfloat16) * task.scale : 0.0f;
  }
}

static void score_block(const float* queries, const float* keys, int64_t dim, float* scores, int64_t stride) {
  Vector sum[kRows][2] = {};
  for (int64_t d = 0; d < dim; ++d) {
    const Vector left = load(keys + d * kPanel), right = load(keys + d * kPanel + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector query = broadcast(queries[d * kRows + r]);
      sum[r][0] += query * left;
      sum[r][1] += query * right;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    store(scores + r * stride, sum[r][0]);
    store(scores + r * stride + kLanes, sum[r][1]);
  }
}

static void score(const AttentionTask& task, int64_t count, const float* queries, float* scores) {
  const int64_t stride = padded(task.keys);
  const float* keys = static_cast<const float*>(task.packed);
  for (int64_t panel = 0; panel < task.keys; panel += kPanel)
    for (int64_t r = 0; r < count; r += kRows)
      score_block(queries + r * task.dim, keys + panel * task.dim, task.dim, scores + r * stride + panel, stride);
}

// Scores, scaled with the queries already, become weights in place; returns the reciprocal of their sum.
static float weights_of(const AttentionTask& task, int64_t query, float* scores) {
  return softmax<5>({scores, task.keys, 1.0f, mask_row(task, query)}, [scores](int64_t k, Vector a, Vector b) {
    store(scores + k, a);
    store(scores + k + kLanes, b);
  });
}

static void weigh_block(const float* weights, int64_t stride, const float* values, int64_t width, int64_t keys,
                        float* out) {
  Vector sum[kRows][2] = {};
  for (int64_t k = 0; k < keys; ++k) {
    const Vector left = load(values + k * width), right = load(values + k * width + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector weight = broadcast(weights[r * stride + k]);
      sum[r][0] += weight * left;
      sum[r][1] += weight * right;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    store(out + r * width, sum[r][0]);
    store(out + r * width + kLanes, sum[r][1]);
  }
}

// Output rows [first, first + height) from their weights; `space` is (kRows, padded(dim)).
static void weigh(const AttentionTask& task, const float* weights, const float* inverse, int64_t first,
                  int64_t height, float* space) {
  const int64_t width = padded(task.dim), stride = padded(task.keys);
  const float* values = static_cast<const float*>(task.packed) + padded(task.keys) * task.dim;
  for (int64_t d = 0; d < width; d += kPanel) weigh_block(weights, stride, values + d, width, task.keys, space + d);
  for (int64_t r = 0; r < height; ++r) {
    const int64_t offset = (first + r) * task.out_stride;
    const float* from = space + r * width;
    int64_t d = 0;
    for (; d + kLanes <= task.dim; d += kLanes)
      store_elements(task.out, offset + d, load(from + d) * inverse[r], task.bfloat16);
    for (; d < task.dim; ++d) store_element(task.out, offset + d, from[d] * inverse[r], task.bfloat16);
  }
}

static void run(const AttentionTask& task) {
  const int64_t size = task.bfloat16 ? 2 : 4;
  touch(task.query, task.queries, task.dim * size, task.query_stride * size);
  const int64_t rows = blocks(task.queries, task.keys) * kRows;
  float* scores = static_cast<float*>(task.scratch);
  float* queries = scores + rows * padded(task.keys);
  float* outputs = queries + rows * task.dim;
  for (int64_t first = 0; first < task.queries; first += rows) {
    const int64_t count = task.queries - first < rows ? task.queries - first : rows;
    pack_queries(task, first, count, queries);
    score(task, count, queries, scores);
    float inverse[kMaxBlocks * kRows];
    for (int64_t r = 0; r < count; ++r) inverse[r] = weights_of(task, first + r, scores + r * padded(task.keys));
    for (int64_t r = 0; r < count; r += kRows) {
      const int64_t height = count - r < kRows ? count - r : kRows;
      weigh(task, scores + r * padded(task.keys), inverse + r, first + r, height, outputs);
    }
  }
}

}  // namespace
}  // namespace int8_kernels
