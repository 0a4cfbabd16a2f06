// The operator int8::attention: softmax(scale * Q K^T + mask) V for encoders, without gradients.
//
// Reads the mask once a call: rows that are equal become one, and keys at the end that no query attends (padding) are
// left out of both products. Tasks are heads, or parts of heads where there are few, handed out one by one, because
// the sequences of a ragged batch take different times.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include "amx_permission.h"
#include "attention.h"
#include "calls.h"

namespace {

using namespace int8_kernels;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const AttentionKernel* const kAttentionKernels[] = {
    &kAttentionAmx, &kAttentionAvx512, &kAttentionAvx2, &kAttentionPortable,
};

// A mask at or below this is "not attended", be it -inf or the lowest number of a dtype.
constexpr float kMaskedOut = -1e30f;

// Fewest queries a task has where heads are split, and tasks a thread gets then.
constexpr int64_t kLeastQueries = 32;
constexpr int64_t kTasksPerThread = 4;

const AttentionKernel& find_kernel(c10::string_view name) {
  for (const AttentionKernel* kernel : kAttentionKernels) {
    if (name == kernel->name) return *kernel;
  }
  TORCH_CHECK(false, "int8::attention has no kernel named ", name);
}

void check_available(const AttentionKernel& kernel) {
  TORCH_CHECK(kernel.available(), "this CPU cannot run ", kernel.name, "; compile for an ISA that it has");
  TORCH_CHECK(&kernel != &kAttentionAmx || require_amx_permission(), kAmxDenied);
}

// The mask of one (batch, head): additive FP32 rows, as many as queries (`stride` keys apart) or one (0), and how many
// keys have to be looked at. No rows where nothing is masked among these.
struct MaskSlice {
  std::vector<float> rows;
  int64_t stride = 0;
  int64_t keys = 0;
};

// Strides of 0 stand for dimensions that the mask does not have.
struct MaskView {
  const char* data;
  at::ScalarType dtype;
  int64_t element_size;
  int64_t batch_stride, head_stride, query_stride;  // in elements
};

float additive(const MaskView& mask, const char* row, int64_t key) {
  const char* at = row + key * mask.element_size;
  if (mask.dtype == at::kBool) return *at ? 0.0f : -std::numeric_limits<float>::infinity();
  if (mask.dtype == at::kFloat) return *reinterpret_cast<const float*>(at);
  return static_cast<float>(*reinterpret_cast<const c10::BFloat16*>(at));
}

bool rows_are_equal(const MaskView& mask, const char* first, int64_t queries, int64_t keys) {
  if (mask.query_stride == 0) return true;
  for (int64_t query = 1; query < queries; ++query) {
    const char* row = first + query * mask.query_stride * mask.element_size;
    if (std::memcmp(first, row, keys * mask.element_size) != 0) return false;
  }
  return true;
}

// One more than the last attended key of a row; 0 if there is none.
int64_t attended_length(const float* row, int64_t keys) {
  while (keys > 0 && row[keys - 1] <= kMaskedOut) --keys;
  return keys;
}

MaskSlice read_slice(const MaskView& mask, const char* first, int64_t queries, int64_t keys) {
  MaskSlice slice;
  const int64_t rows = rows_are_equal(mask, first, queries, keys) ? 1 : queries;
  slice.rows.resize(rows * keys);
  slice.stride = rows == 1 ? 0 : keys;
  bool every_row_attends = true;
  for (int64_t r = 0; r < rows; ++r) {
    const char* from = first + r * mask.query_stride * mask.element_size;
    float* to = slice.rows.data() + r * keys;
    for (int64_t k = 0; k < keys; ++k) to[k] = additive(mask, from, k);
    const int64_t length = attended_length(to, keys);
    slice.keys = std::max(slice.keys, length);
    every_row_attends = every_row_attends && length > 0;
  }
  // A row that attends nothing is the mean over all keys where the mask is finite, so none may be left out.
  if (!every_row_attends) slice.keys = keys;
  const auto is_zero = [](float value) { return value == 0.0f; };
  if (rows == 1 && std::all_of(slice.rows.begin(), slice.rows.begin() + slice.keys, is_zero)) slice.rows.clear();
  return slice;
}

// All slices of a mask; batches and heads that share one index the same.
class Masks {
 public:
  Masks(const OptionalTensor& mask, int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
    if (!mask.has_value()) {
      slices_.resize(1);
      slices_[0].keys = keys;
      return;
    }
    check(*mask);
    Tensor expanded = mask->expand({batch, heads, queries, keys});
    if (keys > 1 && expanded.stride(3) != 1) expanded = mask->contiguous().expand({batch, heads, queries, keys});
    if (keys > 1 && expanded.stride(3) != 1) expanded = expanded.contiguous();  // one value for all keys
    const MaskView view = {
        static_cast<const char*>(expanded.const_data_ptr()), expanded.scalar_type(), expanded.element_size(),
        batch > 1 ? expanded.stride(0) : 0, heads > 1 ? expanded.stride(1) : 0, queries > 1 ? expanded.stride(2) : 0,
    };
    by_batch_ = view.batch_stride != 0;
    by_head_ = view.head_stride != 0;
    head_count_ = by_head_ ? heads : 1;
    slices_.resize((by_batch_ ? batch : 1) * head_count_);
    const int64_t values = view.query_stride == 0 ? keys : queries * keys;
    at::parallel_for(0, slices_.size(), std::max<int64_t>(1, 65536 / values), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t offset = i / head_count_ * view.batch_stride + i % head_count_ * view.head_stride;
        slices_[i] = read_slice(view, view.data + offset * view.element_size, queries, keys);
      }
    });
  }

  const MaskSlice& at(int64_t batch, int64_t head) const {
    return slices_[(by_batch_ ? batch : 0) * head_count_ + (by_head_ ? head : 0)];
  }

 private:
  static void check(const Tensor& mask) {
    const auto dtype = mask.scalar_type();
    TORCH_CHECK(
        dtype == at::kBool || dtype == at::kFloat || dtype == at::kBFloat16,
        "int8::attention takes masks of bool, float32 or bfloat16, not ", dtype);
  }

  std::vector<MaskSlice> slices_;
  bool by_batch_ = false;
  bool by_head_ = false;
  int64_t head_count_ = 1;
};

// Memory that a thread keeps from call to call; fresh pages would cost as much as packing.
class Memory {
 public:
  void* at_least(size_t bytes) {
    if (size_ < bytes) {
      memory_.reset();
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_.reset(std::aligned_alloc(4096, size_));
      TORCH_CHECK(memory_, "cannot allocate ", size_, " bytes for attention");
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

thread_local Memory thread_memory;
thread_local Memory call_memory;

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// One call: its operands, and the tasks it falls into.
class Attention {
 public:
  Attention(
      const AttentionKernel& kernel, const Tensor& query, const Tensor& key, const Tensor& value, const Masks& masks,
      float scale, Tensor& out)
      : kernel_(kernel), query_(query), key_(key), value_(value), masks_(masks), scale_(scale), out_(out),
        heads_(query.size(1)), head_tasks_(query.size(0) * query.size(1)) {}

  void run() {
    const int64_t threads = at::get_num_threads();
    const int64_t queries = query_.size(2);
    const int64_t wanted = (kTasksPerThread * threads + head_tasks_ - 1) / head_tasks_;
    const int64_t parts = std::min(wanted, (queries + kLeastQueries - 1) / kLeastQueries);
    if (parts == 1 || head_tasks_ % threads == 0) {
      run_heads(threads);
    } else {
      run_parts(threads, parts);
    }
  }

 private:
  // Each task packs its head for itself.
  void run_heads(int64_t threads) {
    each_task(threads, head_tasks_, [&](int64_t index) {
      AttentionTask task = head(index);
      char* memory = static_cast<char*>(thread_memory.at_least(packed_bytes() + scratch_bytes(task.queries)));
      task.packed = memory;
      task.scratch = memory + packed_bytes();
      kernel_.pack(task);
      kernel_.run(task);
    });
  }

  // Few heads for many threads: all are packed first, then shared by tasks of some queries each.
  void run_parts(int64_t threads, int64_t parts) {
    char* packed = static_cast<char*>(call_memory.at_least(packed_bytes() * head_tasks_));
    each_task(threads, head_tasks_, [&](int64_t index) {
      AttentionTask task = head(index);
      task.packed = packed + packed_bytes() * index;
      kernel_.pack(task);
    });
    const int64_t step = ((query_.size(2) + parts - 1) / parts + kLeastQueries - 1) / kLeastQueries * kLeastQueries;
    const int64_t whole = (query_.size(2) + step - 1) / step;
    each_task(threads, head_tasks_ * whole, [&](int64_t index) {
      AttentionTask task = part(head(index / whole), index % whole * step, step);
      task.packed = packed + packed_bytes() * (index / whole);
      task.scratch = thread_memory.at_least(scratch_bytes(task.queries));
      kernel_.run(task);
    });
  }

  template <class Function>
  static void each_task(int64_t threads, int64_t count, const Function& function) {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads, count), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) function(i);
    });
  }

  AttentionTask head(int64_t index) const {
    const int64_t b = index / heads_, h = index % heads_;
    const MaskSlice& mask = masks_.at(b, h);
    AttentionTask task;
    task.query = start(query_, b, h);
    task.key = start(key_, b, h);
    task.value = start(value_, b, h);
    task.out = const_cast<char*>(start(out_, b, h));
    task.query_stride = query_.stride(2);
    task.key_stride = key_.stride(2);
    task.value_stride = value_.stride(2);
    task.out_stride = out_.stride(2);
    task.queries = query_.size(2);
    task.keys = mask.keys;
    task.dim = query_.size(3);
    task.mask = mask.rows.empty() ? nullptr : mask.rows.data();
    task.mask_stride = mask.stride;
    task.scale = scale_;
    task.bfloat16 = query_.scalar_type() == at::kBFloat16;
    task.packed = task.scratch = nullptr;
    return task;
  }

  AttentionTask part(AttentionTask task, int64_t first, int64_t step) const {
    const int64_t bytes = query_.element_size();
    task.query = static_cast<const char*>(task.query) + first * task.query_stride * bytes;
    task.out = static_cast<char*>(task.out) + first * task.out_stride * bytes;
    if (task.mask != nullptr) task.mask += first * task.mask_stride;
    task.queries = std::min(step, task.queries - first);
    return task;
  }

  static const char* start(const Tensor& tensor, int64_t b, int64_t h) {
    const int64_t offset = b * tensor.stride(0) + h * tensor.stride(1);
    return static_cast<const char*>(tensor.const_data_ptr()) + offset * tensor.element_size();
  }

  size_t packed_bytes() const { return aligned(kernel_.packed_bytes(key_.size(2), key_.size(3))); }
  size_t scratch_bytes(int64_t queries) const {
    return aligned(kernel_.scratch_bytes(queries, key_.size(2), key_.size(3)));
  }

  const AttentionKernel& kernel_;
  const Tensor& query_;
  const Tensor& key_;
  const Tensor& value_;
  const Masks& masks_;
  const float scale_;
  Tensor& out_;
  const int64_t heads_;
  const int64_t head_tasks_;
};

void check_operands(const AttentionKernel& kernel, const Tensor& query, const Tensor& key, const Tensor& value) {
  const auto dtype = query.scalar_type();
  TORCH_CHECK(
      query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
      "int8::attention takes (batch, heads, tokens, dim) operands");
  TORCH_CHECK(
      dtype == at::kBFloat16 || (dtype == at::kFloat && kernel.takes_fp32), kernel.name, " does not compute ", dtype);
  TORCH_CHECK(
      key.scalar_type() == dtype && value.scalar_type() == dtype, "query, key and value must have one dtype");
  TORCH_CHECK(
      key.sizes() == value.sizes() && key.size(0) == query.size(0) && key.size(1) == query.size(1) &&
          key.size(3) == query.size(3),
      "query ", query.sizes(), ", key ", key.sizes(), " and value ", value.sizes(), " do not fit");
}

Tensor rows_contiguous(const Tensor& operand) {
  return operand.size(3) > 1 && operand.stride(3) != 1 ? operand.contiguous() : operand;
}

Tensor attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double scale,
    c10::string_view kernel_name) {
  const AttentionKernel& kernel = find_kernel(kernel_name);
  check_available(kernel);
  check_operands(kernel, query, key, value);
  TORCH_CHECK(scale > 0, "int8::attention takes a positive scale, not ", scale);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), keys = key.size(2);
  Tensor out = at::empty({batch, queries, heads, query.size(3)}, query.options()).transpose(1, 2);
  if (out.numel() == 0) return out;
  if (keys == 0) return out.zero_();
  const Tensor q = rows_contiguous(query), k = rows_contiguous(key), v = rows_contiguous(value);
  const Masks masks(mask, batch, heads, queries, keys);
  Attention(kernel, q, k, v, masks, static_cast<float>(scale), out).run();
  int8_count_call(kernel.name);
  return out;
}

bool attention_available(c10::string_view name) { return find_kernel(name).available(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(int8, m) {
  // Any strides will do, so compilers must not copy operands to bring them into those of their trace.
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, str kernel) -> Tensor",
      {at::Tag::flexible_layout});
  m.def("attention_available(str kernel) -> bool", &attention_available);
}

TORCH_LIBRARY_IMPL(int8, CPU, m) {
  m.impl("attention", &attention);
}
