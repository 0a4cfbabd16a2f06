// Attention of one head: softmax(scale * Q K^T + mask) V. The plain types here are what the kernel files and the
// operator share; attention_fp32.h has the arithmetic.
//
// Kernel files are compiled for one ISA each and linked together, so whatever they define must be local to its file
// (a template shared by two of them would keep one body, compiled for whichever ISA the linker met first), and no
// header of torch or of the standard library's containers is included there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace int8_kernels {

// Some query rows of one head. Strides count elements; those of the innermost dimension are 1.
struct AttentionTask {
  const void* query;  // (queries, dim), FP32 or BF16
  const void* key;    // (keys, dim)
  const void* value;  // (keys, dim)
  void* out;          // (queries, dim), of the same dtype
  int64_t query_stride, key_stride, value_stride, out_stride;
  int64_t queries, keys, dim;
  const float* mask;    // added to the scores: (queries or 1, keys), or null
  int64_t mask_stride;  // 0 where all queries share one row
  float scale;
  bool bfloat16;
  // Holds this head's keys and values as the kernel multiplies them; written by pack, read by run.
  void* packed;
  // For run's own use; one a thread.
  void* scratch;
};

// Loads something from every cache line of some rows. A head lies in short pieces, one a token, often pages apart;
// loads that need nothing of each other wait for many of them at once, where packing would wait for a few. It saves a
// sixth of the time with 32 dims a head. (Prefetch instructions did not help: a CPU may drop them.)
static inline void touch(const void* operand, int64_t rows, int64_t row_bytes, int64_t stride_bytes) {
  const char* row = static_cast<const char*>(operand);
  for (int64_t r = 0; r < rows; ++r, row += stride_bytes)
    for (int64_t at = 0; at < row_bytes; at += 64) {
      const char loaded = *static_cast<const volatile char*>(row + at);
      (void)loaded;
    }
}

// Buffers are aligned to 64 bytes; their contents do not matter before.
struct AttentionKernel {
  const char* name;
  bool takes_fp32;
  size_t (*packed_bytes)(int64_t keys, int64_t dim);
  size_t (*scratch_bytes)(int64_t queries, int64_t keys, int64_t dim);
  void (*pack)(const AttentionTask& task);
  void (*run)(const AttentionTask& task);
  bool (*available)();
};

extern const AttentionKernel kAttentionPortable;
extern const AttentionKernel kAttentionAvx2;
extern const AttentionKernel kAttentionAvx512;
extern const AttentionKernel kAttentionAmx;

}  // namespace int8_kernels
