// How vector kernels pack one K group of an activation's levels: the operand that they broadcast, as one INT32. Bytes
// beyond K (`count` is less than the group there) multiply zeros of B.
#pragma once

#include <cstdint>

namespace {

// Two levels as 16 bit, for kernels that widen.
inline int32_t widened_pair(const int8_t* from, int count) {
  const uint32_t low = static_cast<uint16_t>(static_cast<int16_t>(from[0]));
  const uint32_t high = count > 1 ? static_cast<uint16_t>(static_cast<int16_t>(from[1])) : 0;
  return static_cast<int32_t>(low | high << 16);
}

// Four levels plus 128 as unsigned bytes: flipping the sign bit of a byte adds 128 to it.
inline int32_t unsigned_quad(const int8_t* from, int count) {
  uint32_t word = 0;
  __builtin_memcpy(&word, from, count < 4 ? count : 4);
  return static_cast<int32_t>(word ^ 0x80808080u);
}

}  // namespace
