// Runs one head through an attention kernel compiled with INT8_EMULATE_ISA, on operands from files, so that the
// arithmetic of an ISA is tested on a CPU that lacks it.
// Usage: emulated_attention QUERIES KEYS DIM STRIDE MASK_ROWS ELEMENT_BYTES SCALE FOLDER
//
// FOLDER holds query, key and value with STRIDE elements a row, and the mask's FP32 rows if there are any; out
// (QUERIES, DIM) is written there.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention.h"

using namespace int8_kernels;

std::vector<char> read(const std::string& path, size_t bytes) {
  std::vector<char> content(bytes);
  FILE* file = std::fopen(path.c_str(), "rb");
  if (!file || std::fread(content.data(), 1, bytes, file) != bytes) std::abort();
  std::fclose(file);
  return content;
}

void* allocate(size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }

int main(int, char** argv) {
  const int64_t queries = std::atoll(argv[1]), keys = std::atoll(argv[2]), dim = std::atoll(argv[3]);
  const int64_t stride = std::atoll(argv[4]), mask_rows = std::atoll(argv[5]), size = std::atoll(argv[6]);
  const std::string folder = std::string(argv[8]) + "/";
  const auto query = read(folder + "query", queries * stride * size), key = read(folder + "key", keys * stride * size);
  const auto value = read(folder + "value", keys * stride * size);
  std::vector<char> mask, out(queries * dim * size);
  if (mask_rows) mask = read(folder + "mask", mask_rows * keys * sizeof(float));
  AttentionTask task;
  task.query = query.data();
  task.key = key.data();
  task.value = value.data();
  task.out = out.data();
  task.query_stride = task.key_stride = task.value_stride = stride;
  task.out_stride = dim;
  task.queries = queries;
  task.keys = keys;
  task.dim = dim;
  task.mask = mask_rows ? reinterpret_cast<const float*>(mask.data()) : nullptr;
  task.mask_stride = mask_rows > 1 ? keys : 0;
  task.scale = static_cast<float>(std::atof(argv[7]));
  task.bfloat16 = size == 2;
  const AttentionKernel& kernel = EMULATED_KERNEL;
  task.packed = allocate(kernel.packed_bytes(keys, dim));
  task.scratch = allocate(kernel.scratch_bytes(queries, keys, dim));
  kernel.pack(task);
  kernel.run(task);
  FILE* file = std::fopen((folder + "out").c_str(), "wb");
  std::fwrite(out.data(), 1, out.size(), file);
  std::fclose(file);
}
