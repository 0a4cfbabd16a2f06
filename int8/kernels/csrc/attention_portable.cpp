// Attention for every x86-64 CPU, with vectors of 16 bytes.
#include "attention.h"

namespace int8_kernels {
namespace {

constexpr int kBytes = 16;
constexpr int kRows = 4;

}  // namespace
}  // namespace int8_kernels

#include "attention_fp32.h"

namespace int8_kernels {
namespace {

static bool available() {
  return true;
}

}  // namespace

const AttentionKernel kAttentionPortable = {
    "int8:attention_portable", true, packed_bytes, scratch_bytes, pack, run, available,
};

}  // namespace int8_kernels
