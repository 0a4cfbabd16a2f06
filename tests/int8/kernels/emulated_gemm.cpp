// Runs a kernel file compiled with INT8_EMULATE_ISA on operands from files, so that the arithmetic of an ISA is tested
// on a CPU that lacks it. Usage: emulated_gemm M N K GROUP POST FOLDER KERNEL
//
// FOLDER holds levels (M, K) and weights (N, K) as INT8, scale, bias (N) and row_scale (M) as FP32; y is written there.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "gemm.h"

using namespace int8_kernels;

template <class Element>
std::vector<Element> read(const std::string& path, int64_t count) {
  std::vector<Element> values(count);
  FILE* file = std::fopen(path.c_str(), "rb");
  if (!file || std::fread(values.data(), sizeof(Element), count, file) != static_cast<size_t>(count)) std::abort();
  std::fclose(file);
  return values;
}

int main(int, char** argv) {
  const int64_t m = std::atoll(argv[1]), n = std::atoll(argv[2]), k = std::atoll(argv[3]);
  const std::string post = argv[4], folder = std::string(argv[5]) + "/", name = argv[6];
  const GemmKernel* const kernels[] = {EMULATED_KERNELS};
  const GemmKernel* kernel = nullptr;
  for (const GemmKernel* one : kernels) {
    if (name == one->name) kernel = one;
  }
  if (!kernel) std::abort();
  const auto levels = read<int8_t>(folder + "levels", m * k), weights = read<int8_t>(folder + "weights", n * k);
  const auto scale = read<float>(folder + "scale", n), bias = read<float>(folder + "bias", n);
  const auto row_scale = read<float>(folder + "row_scale", m);
  const int64_t depth = round_up(k, kDepth), columns = round_up(n, kPanel), group = kernel->group;
  int8_t* panels = static_cast<int8_t*>(std::aligned_alloc(64, round_up(columns * depth, 64)));
  std::fill(panels, panels + columns * depth, int8_t{0});
  std::vector<int32_t> sums(columns, 0);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t at = 0; at < k; ++at) {
      const int8_t value = weights[row * k + at];
      panels[row / kPanel * kPanel * depth + at / group * kPanel * group + row % kPanel * group + at % group] = value;
      sums[row] += value;
    }
  }
  void* packed = std::aligned_alloc(64, round_up(kernel->packed_a_bytes(m, k), 64));
  kernel->pack_a(levels.data(), k, m, k, packed, 0, kernel->row_blocks(m));
  std::vector<float> y(m * n, -1.0f);
  GemmCall call;
  call.m = m;
  call.n = n;
  call.k = depth;
  call.a = packed;
  call.b = panels;
  Epilogue& e = call.epilogue;
  e.scale = scale.data();
  e.bias = bias.data();
  e.row_scale = row_scale.data();
  e.column_sum = sums.data();
  e.zero_point = 5;
  e.post = post == "gelu" ? Post::gelu : Post::none;
  e.out = y.data();
  e.out_stride = n;
  const int64_t units = kernel->units(call), half = units / 2;
  kernel->run(call, 0, half);  // two calls, as two threads make them
  kernel->run(call, half, units);
  FILE* file = std::fopen((folder + "y").c_str(), "wb");
  std::fwrite(y.data(), sizeof(float), y.size(), file);
  std::fclose(file);
}
