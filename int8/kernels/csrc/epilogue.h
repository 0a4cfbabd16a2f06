// From accumulators to outputs, written with the compiler's vector types so that one text serves every ISA.
//
// Included by each kernel file inside a namespace of its own ISA: functions compiled with different instruction sets
// must never be merged by the linker.
#include <cstdint>
#include <cstring>

#include "gemm.h"

namespace {

using int8_kernels::Epilogue;
using int8_kernels::OutType;
using int8_kernels::Post;

// Vectors as wide as the ISA's registers; wider ones the compiler would keep in memory. A divisor of a panel.
#ifndef INT8_LANES
#define INT8_LANES 16
#endif
constexpr int64_t kLanes = INT8_LANES;
typedef float Floats __attribute__((vector_size(4 * INT8_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * INT8_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * INT8_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * INT8_LANES)));
typedef int8_t Bytes __attribute__((vector_size(INT8_LANES)));

inline Floats all(float value) { return Floats{} + value; }

// `count` of a vector's elements from memory, zeros behind them. Whole vectors are the common case and one instruction.
template <class Vector, class Element>
inline Vector load(const Element* from, int64_t count) {
  Vector value{};
  if (__builtin_expect(count >= kLanes, 1)) {
    std::memcpy(&value, from, sizeof value);
  } else {
    std::memcpy(&value, from, count * sizeof(Element));
  }
  return value;
}

template <class Vector, class Element>
inline void store(Element* to, Vector value, int64_t count) {
  if (__builtin_expect(count >= kLanes, 1)) {
    std::memcpy(to, &value, sizeof value);
  } else {
    std::memcpy(to, &value, count * sizeof(Element));
  }
}

inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Clamps to [low, high]; NaN becomes low.
inline Floats clamped(Floats value, float low, float high) {
  return smaller(larger(value, all(low)), all(high));
}

// To the nearest whole number, ties to even, for |value| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
inline Floats rounded(Floats value) {
  constexpr float kMagic = 12582912.0f;
  return (value + kMagic) - kMagic;
}

inline Floats widened(Halves bf16) {
  const Words words = __builtin_convertvector(bf16, Words) << 16;
  return (Floats)words;
}

inline Halves narrowed(Floats value) {
  const Words bits = (Words)value;
  const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;  // NaN stays NaN
  const Words chosen = (value == value) ? nearest : quiet;
  return __builtin_convertvector(chosen, Halves);
}

// erf by the rational approximation that Eigen and XLA use in FP32 (x times a ratio of polynomials in x^2, |x| <= 4).
inline Floats erf(Floats value) {
  const Floats x = clamped(value, -4.0f, 4.0f);
  const Floats square = x * x;
  Floats p = all(-2.72614225801306e-10f);
  p = p * square + 2.77068142495902e-08f;
  p = p * square + -2.10102402082508e-06f;
  p = p * square + -5.69250639462346e-05f;
  p = p * square + -7.34990630326855e-04f;
  p = p * square + -2.95459980854025e-03f;
  p = p * square + -1.60960333262415e-02f;
  Floats q = all(-1.45660718464996e-05f);
  q = q * square + -2.13374055278905e-04f;
  q = q * square + -1.68282697438203e-03f;
  q = q * square + -7.37332916720468e-03f;
  q = q * square + -1.42647390514189e-02f;
  return x * p / q;
}

// tanh the same way, |x| <= 7.9.
inline Floats tanh(Floats value) {
  const Floats x = clamped(value, -7.90531110763549805f, 7.90531110763549805f);
  const Floats square = x * x;
  Floats p = all(-2.76076847742355e-16f);
  p = p * square + 2.00018790482477e-13f;
  p = p * square + -8.60467152213735e-11f;
  p = p * square + 5.12229709037114e-08f;
  p = p * square + 1.48572235717979e-05f;
  p = p * square + 6.37261928875436e-04f;
  p = p * square + 4.89352455891786e-03f;
  Floats q = all(1.19825839466702e-06f);
  q = q * square + 1.18534705686654e-04f;
  q = q * square + 2.26843463243900e-03f;
  q = q * square + 4.89352518554385e-03f;
  return x * p / q;
}

template <Post post>
inline Floats after(Floats y) {
  if constexpr (post == Post::relu) {
    return y < 0.0f ? all(0.0f) : y;  // NaN stays
  } else if constexpr (post == Post::gelu) {
    return 0.5f * y * (1.0f + erf(y * 0.70710678118654752f));
  } else if constexpr (post == Post::gelu_tanh) {
    return 0.5f * y * (1.0f + tanh(0.79788456080286536f * (y + 0.044715f * y * y * y)));
  } else {
    return y;
  }
}

// Residual of row m, columns [n, n + count).
inline Floats residual(const Epilogue& e, int64_t m, int64_t n, int64_t count) {
  const int64_t at = m * e.residual_stride + n;
  if (e.residual_type == OutType::bf16) {
    return widened(load<Halves>(static_cast<const uint16_t*>(e.residual) + at, count));
  }
  return load<Floats>(static_cast<const float*>(e.residual) + at, count);
}

inline void write(const Epilogue& e, Floats y, int64_t m, int64_t n, int64_t count) {
  const int64_t at = m * e.out_stride + n;
  if (e.out_type == OutType::fp32) {
    store(static_cast<float*>(e.out) + at, y, count);
  } else if (e.out_type == OutType::bf16) {
    store(static_cast<uint16_t*>(e.out) + at, narrowed(y), count);
  } else {
    if (e.out_shift) y -= load<Floats>(e.out_shift + n, count);
    // Clamped before rounding too: rounding by addition needs a bounded value.
    y = clamped(y * load<Floats>(e.out_inverse + n, count), -65536.0f, 65536.0f);
    y = clamped(rounded(y) + e.out_zero_point, e.out_low, 127.0f);
    store(static_cast<int8_t*>(e.out) + at, __builtin_convertvector(__builtin_convertvector(y, Ints), Bytes), count);
  }
}

// Finishes `rows` rows from row m of `width` accumulators each (whole panels, row stride `stride`) from column n.
template <Post post>
inline void finish_rows(
    const Epilogue& e, const int32_t* acc, int64_t stride, int64_t m, int64_t rows, int64_t n, int64_t width,
    int64_t columns) {
  for (int64_t j = 0; j < width; j += kLanes) {
    const int64_t count = columns - n - j;
    if (count <= 0) return;
    const Floats scale = load<Floats>(e.scale + n + j, count);
    const Floats bias = e.bias ? load<Floats>(e.bias + n + j, count) : Floats{};
    Ints correction{};
    Floats scaled_sum{};
    if (e.zero_point) correction = load<Ints>(e.column_sum + n + j, kLanes) * e.zero_point;
    if (e.row_zero_point) {
      scaled_sum = __builtin_convertvector(load<Ints>(e.column_sum + n + j, kLanes), Floats) * scale;
    }
    for (int64_t i = 0; i < rows; ++i) {
      Floats y = __builtin_convertvector(load<Ints>(acc + i * stride + j, kLanes) - correction, Floats) * scale;
      if (e.row_zero_point) y -= e.row_zero_point[m + i] * scaled_sum;
      if (e.row_scale) y *= e.row_scale[m + i];
      y = after<post>(y + bias);
      if (e.residual) y += residual(e, m + i, n + j, count);
      write(e, y, m + i, n + j, count);
    }
  }
}

using Finish = void (*)(const Epilogue&, const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

inline Finish finisher(Post post) {
  switch (post) {
    case Post::relu:
      return finish_rows<Post::relu>;
    case Post::gelu:
      return finish_rows<Post::gelu>;
    case Post::gelu_tanh:
      return finish_rows<Post::gelu_tanh>;
    default:
      return finish_rows<Post::none>;
  }
}

}  // namespace
