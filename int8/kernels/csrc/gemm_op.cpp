// The operators int8::gemm, int8::pack and int8::unpack.
//
// A packed weight is one flat INT8 tensor: panels of 16 columns [N/16][K/group][16][group], N and K padded with zeros to
// multiples of 16 and 64, then the sums of its rows, sum_k W[n, k], as INT32 (padded N of them).
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "amx_permission.h"
#include "calls.h"
#include "gemm.h"

namespace {

using namespace int8_kernels;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const GemmKernel* const kKernels[] = {
    &kGemmAmx, &kGemmAmxStream, &kGemmVnni, &kGemmAvx512, &kGemmAvx2, &kGemm7Avx2, &kGemmPortable,
};

const GemmKernel& find_kernel(c10::string_view name) {
  for (const GemmKernel* kernel : kKernels) {
    if (name == kernel->name) return *kernel;
  }
  TORCH_CHECK(false, "int8::gemm has no kernel named ", name);
}

bool uses_tiles(const GemmKernel& kernel) { return &kernel == &kGemmAmx || &kernel == &kGemmAmxStream; }

void check_available(const GemmKernel& kernel) {
  TORCH_CHECK(kernel.available(), "this CPU cannot run ", kernel.name, "; quantize or compile for an ISA that it has");
  TORCH_CHECK(!uses_tiles(kernel) || require_amx_permission(), kAmxDenied);
}

int group_of(c10::string_view layout) {
  TORCH_CHECK(layout == "k2" || layout == "k4", "packed layouts are k2 and k4, not ", layout);
  return layout == "k2" ? 2 : 4;
}

int64_t packed_bytes(int64_t n, int64_t k) {
  const int64_t columns = round_up(n, kPanel);
  return columns * round_up(k, kDepth) + columns * static_cast<int64_t>(sizeof(int32_t));
}

// Offset of weight (n, k) among the panels.
int64_t packed_offset(int64_t n, int64_t k, int64_t depth, int group) {
  return n / kPanel * kPanel * depth + k / group * kPanel * group + n % kPanel * group + k % group;
}

Tensor pack(const Tensor& qweight, c10::string_view layout) {
  TORCH_CHECK(qweight.dim() == 2 && qweight.scalar_type() == at::kChar, "int8::pack takes (N, K) INT8 weights");
  const int group = group_of(layout);
  const Tensor weight = qweight.contiguous();
  const int64_t n = weight.size(0), k = weight.size(1), depth = round_up(k, kDepth), columns = round_up(n, kPanel);
  Tensor packed = at::empty({packed_bytes(n, k)}, weight.options());
  int8_t* out = packed.data_ptr<int8_t>();
  std::memset(out, 0, packed.numel());
  int32_t* sums = reinterpret_cast<int32_t*>(out + columns * depth);
  const int8_t* in = weight.data_ptr<int8_t>();
  at::parallel_for(0, n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int32_t sum = 0;
      for (int64_t at = 0; at < k; ++at) {
        out[packed_offset(row, at, depth, group)] = in[row * k + at];
        sum += in[row * k + at];
      }
      sums[row] = sum;
    }
  });
  return packed;
}

Tensor unpack(const Tensor& packed, int64_t n, int64_t k, c10::string_view layout) {
  const int group = group_of(layout);
  TORCH_CHECK(packed.is_contiguous() && packed.numel() == packed_bytes(n, k), "not a packed (", n, ", ", k, ") weight");
  const int64_t depth = round_up(k, kDepth);
  Tensor weight = at::empty({n, k}, packed.options());
  const int8_t* in = packed.data_ptr<int8_t>();
  int8_t* out = weight.data_ptr<int8_t>();
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t at = 0; at < k; ++at) out[row * k + at] = in[packed_offset(row, at, depth, group)];
  }
  return weight;
}

OutType out_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return OutType::fp32;
    case at::kBFloat16:
      return OutType::bf16;
    case at::kChar:
      return OutType::int8;
    default:
      TORCH_CHECK(false, "int8::gemm computes float32, bfloat16 or int8, not ", dtype);
  }
}

Post post_of(c10::string_view name) {
  if (name == "none") return Post::none;
  if (name == "relu") return Post::relu;
  if (name == "gelu") return Post::gelu;
  if (name == "gelu_tanh") return Post::gelu_tanh;
  TORCH_CHECK(false, "int8::gemm has no post-operation ", name);
}

const float* floats(const OptionalTensor& tensor, int64_t size, const char* name) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(
      tensor->scalar_type() == at::kFloat && tensor->is_contiguous() && tensor->numel() == size, name,
      " must be ", size, " contiguous float32 values");
  return tensor->const_data_ptr<float>();
}

// Memory for packed activations, kept from call to call: fresh pages would cost as much as packing.
void* scratch(int64_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory.reset();
    size = round_up(bytes, 4096);
    memory.reset(std::aligned_alloc(4096, size));
    TORCH_CHECK(memory, "cannot allocate ", size, " bytes for packed activations");
  }
  return memory.get();
}

// The same epilogue for the columns from `column` on.
Epilogue at_column(Epilogue e, int64_t column) {
  const auto ahead = [column](const float* vector) { return vector ? vector + column : nullptr; };
  const auto bytes = [column](OutType type) { return column * (type == OutType::fp32 ? 4 : type == OutType::bf16 ? 2 : 1); };
  e.scale = ahead(e.scale);
  e.bias = ahead(e.bias);
  e.out_inverse = ahead(e.out_inverse);
  e.out_shift = ahead(e.out_shift);
  if (e.residual) e.residual = static_cast<const char*>(e.residual) + bytes(e.residual_type);
  e.out = static_cast<char*>(e.out) + bytes(e.out_type);
  return e;
}

// Packs the activations once and multiplies them by each weight; columns of the results lie side by side.
void multiply(const GemmKernel& kernel, const int8_t* a, int64_t k, std::vector<GemmCall>& calls) {
  const int64_t m = calls.front().m;
  void* packed = scratch(kernel.packed_a_bytes(m, k));
  const int64_t threads = at::get_num_threads(), blocks = kernel.row_blocks(m);
  at::parallel_for(0, blocks, (blocks + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    kernel.pack_a(a, k, m, k, packed, begin, end);
  });
  std::vector<int64_t> first{0};  // unit of all calls with which each call starts
  for (GemmCall& call : calls) {
    call.a = packed;
    first.push_back(first.back() + kernel.units(call));
  }
  const int64_t units = first.back();
  at::parallel_for(0, units, (units + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const int64_t from = std::max(begin, first[i]), to = std::min(end, first[i + 1]);
      if (from < to) kernel.run(calls[i], from - first[i], to - first[i]);
    }
  });
}

float number(const OptionalTensor& tensor, const char* name) {
  if (!tensor.has_value()) return 0.0f;
  TORCH_CHECK(tensor->numel() == 1, name, " must be one number");
  return tensor->scalar_type() == at::kChar ? static_cast<float>(*tensor->const_data_ptr<int8_t>())
                                            : tensor->to(at::kFloat).item<float>();
}

Tensor gemm(
    const Tensor& levels, at::TensorList packed, at::IntArrayRef n, const Tensor& scale, const OptionalTensor& bias,
    const OptionalTensor& row_scale, const OptionalTensor& row_zero_point, const OptionalTensor& zero_point,
    c10::string_view post, const OptionalTensor& residual, const OptionalTensor& out_inverse,
    const OptionalTensor& out_shift, const OptionalTensor& out_zero_point, bool out_full_range,
    at::ScalarType out_dtype, c10::string_view kernel_name) {
  const GemmKernel& kernel = find_kernel(kernel_name);
  check_available(kernel);
  TORCH_CHECK(levels.scalar_type() == at::kChar && levels.dim() >= 1, "int8::gemm takes INT8 levels (..., K)");
  TORCH_CHECK(!packed.empty() && packed.size() == n.size(), "int8::gemm takes one N for each packed weight");
  const Tensor a = levels.contiguous();
  const int64_t k = a.size(-1), m = k ? a.numel() / k : 0;
  const int64_t columns = std::accumulate(n.begin(), n.end(), int64_t{0});
  std::vector<int64_t> shape(a.sizes().begin(), a.sizes().end());
  shape.back() = columns;
  Tensor out = at::empty(shape, a.options().dtype(out_dtype));
  if (!m) return out;

  Epilogue e;
  e.scale = floats(scale, columns, "scale");
  e.bias = floats(bias, columns, "bias");
  e.row_scale = floats(row_scale, m, "row_scale");
  e.row_zero_point = floats(row_zero_point, m, "row_zero_point");
  e.zero_point = static_cast<int32_t>(number(zero_point, "zero_point"));
  e.post = post_of(post);
  Tensor added;
  if (residual.has_value()) {
    TORCH_CHECK(residual->numel() == m * columns, "the residual must have the result's shape");
    added = residual->contiguous();
    e.residual = added.const_data_ptr();
    e.residual_type = out_type(added.scalar_type());
    e.residual_stride = columns;
    TORCH_CHECK(e.residual_type != OutType::int8, "the residual must be float32 or bfloat16");
  }
  e.out_inverse = floats(out_inverse, columns, "out_inverse");
  e.out_shift = floats(out_shift, columns, "out_shift");
  e.out_zero_point = number(out_zero_point, "out_zero_point");
  e.out_low = out_full_range ? -128.0f : -127.0f;
  e.out = out.data_ptr();
  e.out_type = out_type(out_dtype);
  e.out_stride = columns;
  TORCH_CHECK((e.out_type == OutType::int8) == (e.out_inverse != nullptr), "INT8 results need out_inverse, others none");

  std::vector<GemmCall> calls;
  int64_t column = 0;
  for (size_t i = 0; i < packed.size(); ++i) {
    const Tensor& weight = packed[i];
    TORCH_CHECK(
        weight.scalar_type() == at::kChar && weight.is_contiguous() && weight.numel() == packed_bytes(n[i], k),
        "the packed weight does not fit ", n[i], " x ", k);
    GemmCall call;
    call.m = m;
    call.n = n[i];
    call.k = round_up(k, kDepth);
    call.b = weight.const_data_ptr<int8_t>();
    call.epilogue = at_column(e, column);
    call.epilogue.column_sum = reinterpret_cast<const int32_t*>(call.b + round_up(n[i], kPanel) * call.k);
    calls.push_back(call);
    column += n[i];
  }
  multiply(kernel, a.const_data_ptr<int8_t>(), k, calls);
  int8_count_call(kernel.name);
  return out;
}

bool kernel_available(c10::string_view name) { return find_kernel(name).available(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(int8, m) {
  m.def(
      "gemm(Tensor levels, Tensor[] packed, int[] n, Tensor scale, Tensor? bias, Tensor? row_scale, "
      "Tensor? row_zero_point, Tensor? zero_point, str post, Tensor? residual, Tensor? out_inverse, "
      "Tensor? out_shift, Tensor? out_zero_point, bool out_full_range, ScalarType out_dtype, str kernel) -> Tensor",
      {at::Tag::flexible_layout});
  m.def("pack(Tensor qweight, str layout) -> Tensor");
  m.def("unpack(Tensor packed, int n, int k, str layout) -> Tensor");
  m.def("kernel_available(str kernel) -> bool", &kernel_available);
}

TORCH_LIBRARY_IMPL(int8, CPU, m) {
  m.impl("gemm", &gemm);
  m.impl("pack", &pack);
  m.impl("unpack", &unpack);
}
