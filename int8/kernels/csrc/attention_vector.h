// Vectors of kBytes, and the parts of attention that are the same for every kernel: reading operands, transposing,
// softmax. Uses the compiler's vector types; a kernel file defines kBytes (see attention_fp32.h), then includes this.
#include <cstring>
#include <utility>

#include "attention.h"

namespace int8_kernels {
namespace {

constexpr int kLanes = kBytes / 4;
constexpr int kPanel = 2 * kLanes;
typedef float Vector __attribute__((vector_size(kBytes)));
typedef int32_t Integers __attribute__((vector_size(kBytes)));
typedef float Unaligned __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(kBytes / 2), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(kBytes)));

static int64_t padded(int64_t size) { return (size + kPanel - 1) / kPanel * kPanel; }

static Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
static void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
static Vector broadcast(float value) { return value - Vector{}; }

static float widened(uint16_t half) {
  const uint32_t word = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

static uint16_t narrowed(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// Operands are read through these, as FP32 whatever they are.
[[maybe_unused]] static float element(const void* from, int64_t index, bool bfloat16) {
  return bfloat16 ? widened(static_cast<const uint16_t*>(from)[index]) : static_cast<const float*>(from)[index];
}

[[maybe_unused]] static Vector elements(const void* from, int64_t index, bool bfloat16) {
  if (!bfloat16) return load(static_cast<const float*>(from) + index);
  const Halves halves = *reinterpret_cast<const UnalignedHalves*>(static_cast<const uint16_t*>(from) + index);
  return (Vector)(__builtin_convertvector(halves, Words) << 16);
}

static void store_elements(void* to, int64_t index, Vector value, bool bfloat16) {
  if (!bfloat16) return store(static_cast<float*>(to) + index, value);
  const Words words = (Words)value;
  const Words rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
  const Words narrow = (value != value) ? (words >> 16) | 0x40u : rounded;
  *reinterpret_cast<UnalignedHalves*>(static_cast<uint16_t*>(to) + index) = __builtin_convertvector(narrow, Halves);
}

static void store_element(void* to, int64_t index, float value, bool bfloat16) {
  if (bfloat16) {
    static_cast<uint16_t*>(to)[index] = narrowed(value);
  } else {
    static_cast<float*>(to)[index] = value;
  }
}

template <int kSize, int... kLane>
static inline void exchange(Vector& a, Vector& b, std::integer_sequence<int, kLane...>) {
  const Vector upper = __builtin_shufflevector(a, b, ((kLane & kSize) == 0 ? kLane : kLanes + kLane - kSize)...);
  b = __builtin_shufflevector(a, b, ((kLane & kSize) == 0 ? kLane + kSize : kLanes + kLane)...);
  a = upper;
}

// Swaps rows and columns of kLanes x kLanes values: in each step, blocks of kSize off the diagonal change places.
template <int kSize>
static inline void transpose(Vector* rows) {
  if constexpr (kSize < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if ((i & kSize) == 0) exchange<kSize>(rows[i], rows[i + kSize], std::make_integer_sequence<int, kLanes>());
    transpose<2 * kSize>(rows);
  }
}

constexpr float kLog2E = 1.44269504088896341f;

// 2**power for power <= 0; 0 below the smallest normal result, NaN for NaN. Relative error 2e-7 with the polynomial of
// degree 5, 1e-4 with that of degree 3, which is a twentieth of what BF16 rounds off.
template <int kDegree>
static inline Vector power_of_two(Vector power) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest whole number in the low bits
  constexpr float kVanishing = -127.0f;    // its exponent field is 0, so the result is
  power = power < kVanishing ? broadcast(kVanishing) : power;
  const Vector shifted = power + kRounder;
  const Vector rest = power - (shifted - kRounder);
  // 2**rest on [-0.5, 0.5]: the polynomials with the smallest relative error (Remez).
  Vector result;
  if constexpr (kDegree == 5) {
    result = rest * 1.327647199e-03f + 9.675541334e-03f;
    result = result * rest + 5.550713273e-02f;
    result = result * rest + 2.402211972e-01f;
    result = result * rest + 6.931469671e-01f;
    result = result * rest + 1.000000072e+00f;
  } else {
    static_assert(kDegree == 3, "polynomials of degree 5 and 3");
    result = rest * 5.517166906e-02f + 2.426111222e-01f;
    result = result * rest + 6.932609855e-01f;
    result = result * rest + 9.999280735e-01f;
  }
  return result * (Vector)(((Integers)shifted << 23) + 0x3f800000);
}

static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

template <int kSize, int... kLane>
static inline Vector swapped(Vector value, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(value, value, (kLane ^ kSize)...);
}

// The largest lane and the sum of all, in every lane.
template <int kSize = kLanes / 2>
static inline Vector largest_lane(Vector value) {
  if constexpr (kSize == 0) return value;
  else return largest_lane<kSize / 2>(larger(value, swapped<kSize>(value, std::make_integer_sequence<int, kLanes>())));
}

template <int kSize = kLanes / 2>
static inline Vector lane_sum(Vector value) {
  if constexpr (kSize == 0) return value;
  else return lane_sum<kSize / 2>(value + swapped<kSize>(value, std::make_integer_sequence<int, kLanes>()));
}

// Scores of one row as they come from a product: FP32, padded to whole panels.
struct ScoreRow {
  float* scores;
  int64_t keys;
  float scale;        // not applied yet
  const float* mask;  // or null
};

// Applies scale and mask where there is a mask, makes what lies beyond the last key -inf, and returns the largest.
static float masked_maximum(const ScoreRow& row) {
  const float lowest = -__builtin_inff();
  const int64_t whole = row.keys / kPanel * kPanel;
  Vector left = broadcast(lowest), right = left;
  for (int64_t k = 0; k < whole; k += kPanel) {
    Vector a = load(row.scores + k), b = load(row.scores + k + kLanes);
    if (row.mask != nullptr) {
      a = a * row.scale + load(row.mask + k);
      b = b * row.scale + load(row.mask + k + kLanes);
      store(row.scores + k, a);
      store(row.scores + k + kLanes, b);
    }
    left = larger(a, left);
    right = larger(b, right);
  }
  float largest = largest_lane(larger(left, right))[0];
  for (int64_t k = whole; k < padded(row.keys); ++k) {
    float& score = row.scores[k];
    score = k >= row.keys ? lowest : row.mask == nullptr ? score : score * row.scale + row.mask[k];
    largest = score > largest ? score : largest;
  }
  return largest;
}

// Gives `keep(k, a, b)` the weights of keys k to k + kPanel, not divided by their sum yet. Returns its reciprocal,
// 0 for a row that attends nothing. The scale must be positive where there is no mask.
template <int kDegree, class Keep>
static inline float softmax(const ScoreRow& row, const Keep& keep) {
  const float maximum = masked_maximum(row);
  // Where all scores are -inf the weights become zeros, as torch has it. NaN passes the maximum, but not the sum.
  const Vector base = broadcast(maximum == -__builtin_inff() ? 0.0f : maximum);
  const Vector factor = broadcast(row.mask == nullptr ? row.scale * kLog2E : kLog2E);
  Vector left = {}, right = {};
  for (int64_t k = 0; k < padded(row.keys); k += kPanel) {
    const Vector a = power_of_two<kDegree>((load(row.scores + k) - base) * factor);
    const Vector b = power_of_two<kDegree>((load(row.scores + k + kLanes) - base) * factor);
    keep(k, a, b);
    left += a;
    right += b;
  }
  const float sum = lane_sum(left + right)[0];
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

static const float* mask_row(const AttentionTask& task, int64_t query) {
  return task.mask == nullptr ? nullptr : task.mask + query * task.mask_stride;
}

}  // namespace
}  // namespace int8_kernels
