// The intrinsics of x86, or an emulation of them: every kernel file includes this instead of <immintrin.h>.
//
// With INT8_EMULATE_ISA the AVX512 intrinsics come from SIMDe (Debian: apt-get install libsimde-dev), those that its
// older releases lack from below, and AMX tiles are plain arrays here. So the arithmetic of a kernel can be tested on a
// CPU that lacks its ISA: compile with -DINT8_EMULATE_ISA and without -m flags. What the CPU would answer with an
// exception (a tile used before it is configured, or with sizes that do not fit) ends the process with a message.
#pragma once

#include <cstdint>

#ifndef INT8_EMULATE_ISA

#include <immintrin.h>

#else

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// The same types as a compiler's own headers give them, which SIMDe may have included.
typedef unsigned char __mmask8;
typedef unsigned short __mmask16;
typedef unsigned int __mmask32;
typedef unsigned long long __mmask64;

#ifndef _MM_FROUND_NO_EXC
#define _MM_FROUND_NO_EXC 0x08
#endif

namespace int8_emulation {

template <class To, class From>
static inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T, int N>
struct Lanes {
  T lane[N];
};

// Applies `function` to every lane of `from` and gives a register of `to_lanes` lanes of type To.
template <class Register, class To, class From, int N, class Source, class Function>
static inline Register each(const Source& source, Function function) {
  const auto from = bits<Lanes<From, N>>(source);
  Lanes<To, N> to;
  for (int i = 0; i < N; ++i) to.lane[i] = function(from.lane[i]);
  return bits<Register>(to);
}

template <class Register, class T, int N>
static inline Register load_where(uint64_t mask, const void* from, Register otherwise) {
  auto to = bits<Lanes<T, N>>(otherwise);
  for (int i = 0; i < N; ++i)
    if (mask >> i & 1) std::memcpy(&to.lane[i], static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return bits<Register>(to);
}

template <class Register, class T, int N>
static inline void store_where(void* to, uint64_t mask, Register value) {
  const auto from = bits<Lanes<T, N>>(value);
  for (int i = 0; i < N; ++i)
    if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + i * sizeof(T), &from.lane[i], sizeof(T));
}

template <class T, int N, class Source, class Function>
static inline T fold(const Source& source, Function function) {
  auto values = bits<Lanes<T, N>>(source);
  for (int width = N / 2; width >= 1; width /= 2)  // in pairs, as compilers expand the real ones
    for (int i = 0; i < width; ++i) values.lane[i] = function(values.lane[i], values.lane[i + width]);
  return values.lane[0];
}

static inline uint16_t bfloat16_of(float value) {
  const uint32_t word = bits<uint32_t>(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
  if ((word & 0x7f800000u) == 0) return static_cast<uint16_t>((word >> 16) & 0x8000u);  // denormals count as zero
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

static inline float float_of(uint16_t value) {
  const bool denormal = (value & 0x7f80u) == 0;
  return bits<float>(static_cast<uint32_t>(denormal ? value & 0x8000u : value) << 16);
}

static inline int32_t rounded(float value) {
  const float nearest = std::nearbyint(value);
  return nearest >= -2147483648.0f && nearest < 2147483648.0f ? static_cast<int32_t>(nearest) : INT32_MIN;
}

static inline int32_t truncated(float value) {
  const float whole = std::trunc(value);
  return whole >= -2147483648.0f && whole < 2147483648.0f ? static_cast<int32_t>(whole) : INT32_MIN;
}

template <class To>
static inline To clipped(int64_t value, int64_t low, int64_t high) {
  return static_cast<To>(value < low ? low : value > high ? high : value);
}

// --- parts of AVX512 ---

template <class Half, class Whole>
static inline Half half_of(const Whole& whole, int which) {
  Half half;
  std::memcpy(&half, reinterpret_cast<const char*>(&whole) + (which & 1) * sizeof(Half), sizeof(Half));
  return half;
}

// The lower half of the result comes from the second operand, as the CPU has it.
template <class Whole, class Half>
static inline Whole joined(const Half& upper, const Half& lower) {
  Whole whole;
  std::memcpy(&whole, &lower, sizeof(Half));
  std::memcpy(reinterpret_cast<char*>(&whole) + sizeof(Half), &upper, sizeof(Half));
  return whole;
}

// Quarters of 128 bits: two of a, then two of b.
template <class Register>
static inline Register quarters(const Register& a, const Register& b, int choice) {
  Register to;
  for (int i = 0; i < 4; ++i)
    std::memcpy(reinterpret_cast<char*>(&to) + 16 * i,
                reinterpret_cast<const char*>(i < 2 ? &a : &b) + 16 * (choice >> (2 * i) & 3), 16);
  return to;
}

template <class T>
static inline T sum_of(T a, T b) { return a + b; }
template <class T>
static inline T larger_of(T a, T b) { return a > b ? a : b; }
template <class T>
static inline T smaller_of(T a, T b) { return a < b ? a : b; }
template <class To, class From>
static inline To converted(From value) { return static_cast<To>(value); }
static inline int8_t saturated(int32_t value) { return clipped<int8_t>(value, -128, 127); }
static inline uint8_t saturated_unsigned(uint32_t value) { return clipped<uint8_t>(value, 0, 255); }

// --- AMX ---

[[noreturn]] static inline void fault(const char* reason) {
  std::fprintf(stderr, "emulated AMX: %s\n", reason);
  std::abort();
}

struct Configuration {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64, "the layout that the CPU reads");

struct Tile {
  uint8_t row[16][64];
};

struct Tiles {
  Configuration configuration;
  Tile tile[8];
};

// One state a thread, shared by all files of a library as the registers of a CPU are.
inline Tiles& tiles() {
  static thread_local Tiles state = {};
  return state;
}

static inline Tile& tile(int number) {
  Tiles& state = tiles();
  if (state.configuration.palette != 1) fault("a tile is used before _tile_loadconfig");
  if (number < 0 || number > 7) fault("there are eight tiles");
  if (state.configuration.rows[number] == 0) fault("a tile is used that the configuration leaves out");
  return state.tile[number];
}

static inline void load_configuration(const void* from) {
  Tiles& state = tiles();
  std::memcpy(&state.configuration, from, sizeof(Configuration));
  if (state.configuration.palette > 1) fault("unknown palette");
  for (int number = 0; number < 8; ++number)
    if (state.configuration.rows[number] > 16 || state.configuration.column_bytes[number] > 64)
      fault("a tile has at most 16 rows of 64 bytes");
  std::memset(state.tile, 0, sizeof(state.tile));
}

static inline void load_tile(int number, const void* from, int64_t stride) {
  Tile& to = tile(number);
  const Configuration& sizes = tiles().configuration;
  std::memset(&to, 0, sizeof(to));
  for (int row = 0; row < sizes.rows[number]; ++row)
    std::memcpy(to.row[row], static_cast<const char*>(from) + row * stride, sizes.column_bytes[number]);
}

static inline void store_tile(int number, void* to, int64_t stride) {
  const Tile& from = tile(number);
  const Configuration& sizes = tiles().configuration;
  for (int row = 0; row < sizes.rows[number]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, from.row[row], sizes.column_bytes[number]);
}

static inline void zero_tile(int number) { std::memset(&tile(number), 0, sizeof(Tile)); }

// to (M x N dwords) += left (M x K dwords) * right (K x N dwords), `multiply` adding the parts of one dword.
template <class Sum, class Multiply>
static inline void product(int to, int left, int right, Multiply multiply) {
  Tile &result = tile(to), &a = tile(left), &b = tile(right);
  const Configuration& sizes = tiles().configuration;
  const int rows = sizes.rows[to], columns = sizes.column_bytes[to] / 4, inner = sizes.column_bytes[left] / 4;
  if (to == left || to == right || left == right) fault("a product takes three different tiles");
  if (sizes.rows[left] != rows || sizes.rows[right] != inner || sizes.column_bytes[right] != columns * 4)
    fault("the sizes of the tiles of a product do not fit");
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n) {
      Sum sum;
      std::memcpy(&sum, result.row[m] + 4 * n, 4);
      for (int k = 0; k < inner; ++k) sum = multiply(sum, a.row[m] + 4 * k, b.row[k] + 4 * n);
      std::memcpy(result.row[m] + 4 * n, &sum, 4);
    }
}

template <class A, class B>
static inline uint32_t add_bytes(uint32_t sum, const uint8_t* a, const uint8_t* b) {
  for (int i = 0; i < 4; ++i)
    sum += static_cast<uint32_t>(int32_t{static_cast<A>(a[i])} * int32_t{static_cast<B>(b[i])});
  return sum;
}

static inline float add_halves(float sum, const uint8_t* a, const uint8_t* b) {
  uint16_t left[2], right[2];
  std::memcpy(left, a, 4);
  std::memcpy(right, b, 4);
  sum = std::fma(float_of(left[0]), float_of(right[0]), sum);
  return std::fma(float_of(left[1]), float_of(right[1]), sum);
}

// Products of neighbouring 16-bit numbers, added in 32 bit.
inline __m512i products_of_pairs(__m512i a, __m512i b) {
  int16_t x[32], y[32];
  int32_t sum[16];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 16; ++i) sum[i] = int32_t{x[2 * i]} * y[2 * i] + int32_t{x[2 * i + 1]} * y[2 * i + 1];
  __m512i result;
  std::memcpy(&result, sum, sizeof result);
  return result;
}

}  // namespace int8_emulation

#undef _tile_loadconfig
#define _tile_loadconfig(from) int8_emulation::load_configuration(from)
#undef _tile_zero
#define _tile_zero(number) int8_emulation::zero_tile(number)
#undef _tile_loadd
#define _tile_loadd(number, from, stride) int8_emulation::load_tile((number), (from), (stride))
#undef _tile_stream_loadd
#define _tile_stream_loadd(number, from, stride) int8_emulation::load_tile((number), (from), (stride))
#undef _tile_stored
#define _tile_stored(number, to, stride) int8_emulation::store_tile((number), (to), (stride))
#undef _tile_storeconfig
#define _tile_storeconfig(to) std::memcpy((to), &int8_emulation::tiles().configuration, 64)
#undef _tile_release
#define _tile_release() (void)(int8_emulation::tiles() = int8_emulation::Tiles{})
#undef _tile_dpbssd
#define _tile_dpbssd(to, a, b) \
  int8_emulation::product<uint32_t>((to), (a), (b), int8_emulation::add_bytes<int8_t, int8_t>)
#undef _tile_dpbsud
#define _tile_dpbsud(to, a, b) \
  int8_emulation::product<uint32_t>((to), (a), (b), int8_emulation::add_bytes<int8_t, uint8_t>)
#undef _tile_dpbusd
#define _tile_dpbusd(to, a, b) \
  int8_emulation::product<uint32_t>((to), (a), (b), int8_emulation::add_bytes<uint8_t, int8_t>)
#undef _tile_dpbuud
#define _tile_dpbuud(to, a, b) \
  int8_emulation::product<uint32_t>((to), (a), (b), int8_emulation::add_bytes<uint8_t, uint8_t>)
#undef _tile_dpbf16ps
#define _tile_dpbf16ps(to, a, b) int8_emulation::product<float>((to), (a), (b), int8_emulation::add_halves)

// --- AVX512 that older releases of SIMDe lack; macros, because compilers may declare functions of these names. ---

#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, from) \
  int8_emulation::load_where<__m512, float, 16>((mask), (from), _mm512_setzero_ps())
#undef _mm512_mask_loadu_ps
#define _mm512_mask_loadu_ps(other, mask, from) int8_emulation::load_where<__m512, float, 16>((mask), (from), (other))
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(to, mask, value) int8_emulation::store_where<__m512, float, 16>((to), (mask), (value))
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32(mask, from) \
  int8_emulation::load_where<__m512i, int32_t, 16>((mask), (from), _mm512_setzero_si512())
#undef _mm512_mask_loadu_epi32
#define _mm512_mask_loadu_epi32(other, mask, from) \
  int8_emulation::load_where<__m512i, int32_t, 16>((mask), (from), (other))
#undef _mm512_mask_storeu_epi32
#define _mm512_mask_storeu_epi32(to, mask, value) \
  int8_emulation::store_where<__m512i, int32_t, 16>((to), (mask), (value))
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16(mask, from) \
  int8_emulation::load_where<__m512i, int16_t, 32>((mask), (from), _mm512_setzero_si512())
#undef _mm512_mask_loadu_epi16
#define _mm512_mask_loadu_epi16(other, mask, from) \
  int8_emulation::load_where<__m512i, int16_t, 32>((mask), (from), (other))
#undef _mm512_mask_storeu_epi16
#define _mm512_mask_storeu_epi16(to, mask, value) \
  int8_emulation::store_where<__m512i, int16_t, 32>((to), (mask), (value))
#undef _mm512_maskz_loadu_epi8
#define _mm512_maskz_loadu_epi8(mask, from) \
  int8_emulation::load_where<__m512i, int8_t, 64>((mask), (from), _mm512_setzero_si512())
#undef _mm512_mask_loadu_epi8
#define _mm512_mask_loadu_epi8(other, mask, from) \
  int8_emulation::load_where<__m512i, int8_t, 64>((mask), (from), (other))
#undef _mm512_mask_storeu_epi8
#define _mm512_mask_storeu_epi8(to, mask, value) \
  int8_emulation::store_where<__m512i, int8_t, 64>((to), (mask), (value))
#undef _mm256_maskz_loadu_ps
#define _mm256_maskz_loadu_ps(mask, from) \
  int8_emulation::load_where<__m256, float, 8>((mask), (from), _mm256_setzero_ps())
#undef _mm256_mask_loadu_ps
#define _mm256_mask_loadu_ps(other, mask, from) int8_emulation::load_where<__m256, float, 8>((mask), (from), (other))
#undef _mm256_mask_storeu_ps
#define _mm256_mask_storeu_ps(to, mask, value) int8_emulation::store_where<__m256, float, 8>((to), (mask), (value))
#undef _mm256_maskz_loadu_epi32
#define _mm256_maskz_loadu_epi32(mask, from) \
  int8_emulation::load_where<__m256i, int32_t, 8>((mask), (from), _mm256_setzero_si256())
#undef _mm256_mask_loadu_epi32
#define _mm256_mask_loadu_epi32(other, mask, from) \
  int8_emulation::load_where<__m256i, int32_t, 8>((mask), (from), (other))
#undef _mm256_mask_storeu_epi32
#define _mm256_mask_storeu_epi32(to, mask, value) \
  int8_emulation::store_where<__m256i, int32_t, 8>((to), (mask), (value))
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16(mask, from) \
  int8_emulation::load_where<__m256i, int16_t, 16>((mask), (from), _mm256_setzero_si256())
#undef _mm256_mask_loadu_epi16
#define _mm256_mask_loadu_epi16(other, mask, from) \
  int8_emulation::load_where<__m256i, int16_t, 16>((mask), (from), (other))
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16(to, mask, value) \
  int8_emulation::store_where<__m256i, int16_t, 16>((to), (mask), (value))
#undef _mm256_maskz_loadu_epi8
#define _mm256_maskz_loadu_epi8(mask, from) \
  int8_emulation::load_where<__m256i, int8_t, 32>((mask), (from), _mm256_setzero_si256())
#undef _mm256_mask_loadu_epi8
#define _mm256_mask_loadu_epi8(other, mask, from) \
  int8_emulation::load_where<__m256i, int8_t, 32>((mask), (from), (other))
#undef _mm256_mask_storeu_epi8
#define _mm256_mask_storeu_epi8(to, mask, value) \
  int8_emulation::store_where<__m256i, int8_t, 32>((to), (mask), (value))
#undef _mm_maskz_loadu_ps
#define _mm_maskz_loadu_ps(mask, from) int8_emulation::load_where<__m128, float, 4>((mask), (from), _mm_setzero_ps())
#undef _mm_mask_loadu_ps
#define _mm_mask_loadu_ps(other, mask, from) int8_emulation::load_where<__m128, float, 4>((mask), (from), (other))
#undef _mm_mask_storeu_ps
#define _mm_mask_storeu_ps(to, mask, value) int8_emulation::store_where<__m128, float, 4>((to), (mask), (value))
#undef _mm_maskz_loadu_epi32
#define _mm_maskz_loadu_epi32(mask, from) \
  int8_emulation::load_where<__m128i, int32_t, 4>((mask), (from), _mm_setzero_si128())
#undef _mm_mask_loadu_epi32
#define _mm_mask_loadu_epi32(other, mask, from) \
  int8_emulation::load_where<__m128i, int32_t, 4>((mask), (from), (other))
#undef _mm_mask_storeu_epi32
#define _mm_mask_storeu_epi32(to, mask, value) int8_emulation::store_where<__m128i, int32_t, 4>((to), (mask), (value))
#undef _mm_maskz_loadu_epi16
#define _mm_maskz_loadu_epi16(mask, from) \
  int8_emulation::load_where<__m128i, int16_t, 8>((mask), (from), _mm_setzero_si128())
#undef _mm_mask_loadu_epi16
#define _mm_mask_loadu_epi16(other, mask, from) \
  int8_emulation::load_where<__m128i, int16_t, 8>((mask), (from), (other))
#undef _mm_mask_storeu_epi16
#define _mm_mask_storeu_epi16(to, mask, value) int8_emulation::store_where<__m128i, int16_t, 8>((to), (mask), (value))
#undef _mm_maskz_loadu_epi8
#define _mm_maskz_loadu_epi8(mask, from) \
  int8_emulation::load_where<__m128i, int8_t, 16>((mask), (from), _mm_setzero_si128())
#undef _mm_mask_loadu_epi8
#define _mm_mask_loadu_epi8(other, mask, from) \
  int8_emulation::load_where<__m128i, int8_t, 16>((mask), (from), (other))
#undef _mm_mask_storeu_epi8
#define _mm_mask_storeu_epi8(to, mask, value) int8_emulation::store_where<__m128i, int8_t, 16>((to), (mask), (value))
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(a) \
  int8_emulation::each<__m512, float, int32_t, 16>((a), int8_emulation::converted<float, int32_t>)
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(a) int8_emulation::each<__m512i, int32_t, float, 16>((a), int8_emulation::rounded)
#undef _mm512_cvttps_epi32
#define _mm512_cvttps_epi32(a) int8_emulation::each<__m512i, int32_t, float, 16>((a), int8_emulation::truncated)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(a) \
  int8_emulation::each<__m512i, int32_t, int8_t, 16>((a), int8_emulation::converted<int32_t, int8_t>)
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(a) \
  int8_emulation::each<__m512i, int32_t, uint8_t, 16>((a), int8_emulation::converted<int32_t, uint8_t>)
#undef _mm512_cvtepi16_epi32
#define _mm512_cvtepi16_epi32(a) \
  int8_emulation::each<__m512i, int32_t, int16_t, 16>((a), int8_emulation::converted<int32_t, int16_t>)
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(a) \
  int8_emulation::each<__m512i, int32_t, uint16_t, 16>((a), int8_emulation::converted<int32_t, uint16_t>)
#undef _mm512_cvtepi8_epi16
#define _mm512_cvtepi8_epi16(a) \
  int8_emulation::each<__m512i, int16_t, int8_t, 32>((a), int8_emulation::converted<int16_t, int8_t>)
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16(a) \
  int8_emulation::each<__m512i, int16_t, uint8_t, 32>((a), int8_emulation::converted<int16_t, uint8_t>)
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8(a) \
  int8_emulation::each<__m128i, int8_t, int32_t, 16>((a), int8_emulation::converted<int8_t, int32_t>)
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(a) \
  int8_emulation::each<__m256i, int16_t, int32_t, 16>((a), int8_emulation::converted<int16_t, int32_t>)
#undef _mm512_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi8(a) int8_emulation::each<__m128i, int8_t, int32_t, 16>((a), int8_emulation::saturated)
#undef _mm512_cvtusepi32_epi8
#define _mm512_cvtusepi32_epi8(a) \
  int8_emulation::each<__m128i, uint8_t, uint32_t, 16>((a), int8_emulation::saturated_unsigned)
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh(a) int8_emulation::each<__m256bh, uint16_t, float, 16>((a), int8_emulation::bfloat16_of)
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh(a, b) int8_emulation::joined<__m512bh>(_mm512_cvtneps_pbh(a), _mm512_cvtneps_pbh(b))
#undef _mm512_srai_epi32
#define _mm512_srai_epi32(a, count)                   \
  int8_emulation::each<__m512i, int32_t, int32_t, 16>( \
      (a), [&](int32_t x) { return x >> ((count) > 31 ? 31 : (count)); })
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps(a) int8_emulation::fold<float, 16>((a), int8_emulation::sum_of<float>)
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32(a) int8_emulation::fold<int32_t, 16>((a), int8_emulation::sum_of<int32_t>)
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps(a) int8_emulation::fold<float, 16>((a), int8_emulation::larger_of<float>)
#undef _mm512_reduce_max_epi32
#define _mm512_reduce_max_epi32(a) int8_emulation::fold<int32_t, 16>((a), int8_emulation::larger_of<int32_t>)
#undef _mm512_reduce_min_ps
#define _mm512_reduce_min_ps(a) int8_emulation::fold<float, 16>((a), int8_emulation::smaller_of<float>)
#undef _mm512_reduce_min_epi32
#define _mm512_reduce_min_epi32(a) int8_emulation::fold<int32_t, 16>((a), int8_emulation::smaller_of<int32_t>)
#undef _mm512_stream_ps
#define _mm512_stream_ps(to, value) _mm512_store_ps((to), (value))
#undef _mm512_stream_si512
#define _mm512_stream_si512(to, value) _mm512_store_si512((to), (value))
#undef _mm512_undefined_ps
#define _mm512_undefined_ps() _mm512_setzero_ps()
#undef _mm512_undefined_epi32
#define _mm512_undefined_epi32() _mm512_setzero_si512()
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(a, which) int8_emulation::half_of<__m256>((a), (which))
#undef _mm512_extracti32x8_epi32
#define _mm512_extracti32x8_epi32(a, which) int8_emulation::half_of<__m256i>((a), (which))
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4(a, b, choice) int8_emulation::quarters((a), (b), (choice))
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2(a, b, choice) int8_emulation::quarters((a), (b), (choice))
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, choice) int8_emulation::quarters((a), (b), (choice))
#undef _mm512_shuffle_f64x2
#define _mm512_shuffle_f64x2(a, b, choice) int8_emulation::quarters((a), (b), (choice))
#undef _mm512_cmplt_epi32_mask
#define _mm512_cmplt_epi32_mask(a, b) _mm512_cmpgt_epi32_mask((b), (a))
#undef _mm512_cmpneq_epi32_mask
#define _mm512_cmpneq_epi32_mask(a, b) static_cast<__mmask16>(~_mm512_cmpeq_epi32_mask((a), (b)))

#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) int8_emulation::products_of_pairs((a), (b))

#endif  // INT8_EMULATE_ISA
