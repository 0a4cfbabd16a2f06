// Interface between the operator (gemm_op.cpp, plain x86-64, torch headers) and the kernels (one file an ISA, no torch).
//
// One call computes, for m < M rows of signed levels A (M, K) and n < N rows of signed levels B (N, K):
//
//     acc[m, n] = sum_k A[m, k] * B[n, k]                                     exact, in INT32
//     y = (acc - zero_point * sum_k B[n, k]) * scale[n]
//     y = (y - row_zero_point[m] * scale[n] * sum_k B[n, k]) * row_scale[m]   where rows have their own
//     y = post(y + bias[n]) + residual[m, n]
//
// and writes y as FP32 or BF16, or the levels clip(round((y - out_shift[n]) * out_inverse[n]) + out_zero_point).
#pragma once

#include <cstdint>

namespace int8_kernels {

// Columns of one panel of packed weights; every kernel reads whole panels.
constexpr int64_t kPanel = 16;
// K is padded with zeros to a multiple of this, the depth of an AMX tile.
constexpr int64_t kDepth = 64;

static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

enum class Post { none, relu, gelu, gelu_tanh };
enum class OutType { fp32, bf16, int8 };

// What becomes of an accumulator. Vectors have N elements, rows M; null pointers mean "not there".
struct Epilogue {
  const float* scale = nullptr;
  const float* bias = nullptr;
  const float* row_scale = nullptr;
  const float* row_zero_point = nullptr;
  const int32_t* column_sum = nullptr;  // sum_k B[n, k], from the packed weights
  int32_t zero_point = 0;
  Post post = Post::none;
  const void* residual = nullptr;  // (M, N) of residual_type with row stride residual_stride (elements)
  OutType residual_type = OutType::fp32;
  int64_t residual_stride = 0;
  const float* out_inverse = nullptr;
  const float* out_shift = nullptr;
  float out_zero_point = 0.0f;
  float out_low = -127.0f;
  void* out = nullptr;  // (M, N) of out_type with row stride out_stride (elements)
  OutType out_type = OutType::fp32;
  int64_t out_stride = 0;
};

struct GemmCall {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;  // padded
  const void* a = nullptr;    // packed by pack_a of the same kernel
  const int8_t* b = nullptr;  // panels
  Epilogue epilogue;
};

// How weights are packed: panels of 16 columns, K in groups of `group` bytes a column: [N/16][K/group][16][group].
// 4 is what VNNI and AMX multiply, 2 what kernels that widen to 16 bit multiply.
struct GemmKernel {
  const char* name;
  int group;
  int64_t (*packed_a_bytes)(int64_t m, int64_t k);
  // Packs rows of A (unpadded K, row stride lda) for the blocks of rows [begin, end).
  int64_t (*row_blocks)(int64_t m);
  void (*pack_a)(const int8_t* a, int64_t lda, int64_t m, int64_t k, void* packed, int64_t begin, int64_t end);
  // Independent pieces of a call, in the order in which neighbours share operands, and the computation of some.
  int64_t (*units)(const GemmCall& call);
  void (*run)(const GemmCall& call, int64_t begin, int64_t end);
  bool (*available)();
};

extern const GemmKernel kGemmPortable;
extern const GemmKernel kGemmAvx2;
extern const GemmKernel kGemm7Avx2;  // weights of 7 bits only
extern const GemmKernel kGemmAvx512;
extern const GemmKernel kGemmVnni;
extern const GemmKernel kGemmAmx;
extern const GemmKernel kGemmAmxStream;

}  // namespace int8_kernels
