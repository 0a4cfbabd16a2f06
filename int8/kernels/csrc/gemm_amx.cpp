// AMX: 32 x 32 outputs as 2 x 2 tiles of INT32, signed x signed, K in steps of 64.
//
// A is packed tile by tile (a row stride of 4 KiB costs 13 % even from L1), B panels are tiles as they lie. The
// outputs of one block are finished while the tile unit works on the next: the epilogue's vector instructions are dealt
// out between its K steps.
#include "intrinsics.h"
#include "epilogue.h"

namespace {

using int8_kernels::GemmCall;
using int8_kernels::kDepth;
using int8_kernels::kPanel;
using int8_kernels::round_up;

constexpr int64_t kTileRows = 16;
constexpr int64_t kBlock = 32;                        // rows and columns of a block of outputs
constexpr int64_t kTileBytes = kTileRows * kDepth;    // 1 KiB
constexpr int64_t kChunkBytes = 512 * 1024;           // of packed A, in half of an L2 of 1 MiB or more

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = kDepth;
    config.rows[tile] = kTileRows;
  }
  // The intrinsic takes a pointer that gcc 12 does not follow: without a barrier it drops the stores above.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

int64_t row_blocks(int64_t m) { return (m + kBlock - 1) / kBlock; }
int64_t packed_a_bytes(int64_t m, int64_t k) { return row_blocks(m) * kBlock * round_up(k, kDepth); }

// [block][K / 64][2][16 rows][64 bytes].
void pack_a(const int8_t* a, int64_t lda, int64_t m, int64_t k, void* packed, int64_t begin, int64_t end) {
  const int64_t depth = round_up(k, kDepth);
  for (int64_t block = begin; block < end; ++block) {
    int8_t* out = static_cast<int8_t*>(packed) + block * kBlock * depth;
    const int64_t valid = least(kBlock, m - block * kBlock);
    if (valid < kBlock || depth > k) std::memset(out, 0, kBlock * depth);
    for (int64_t i = 0; i < valid; ++i) {
      const int8_t* row = a + (block * kBlock + i) * lda;
      int8_t* to = out + i * kDepth;  // the second tile of a K step lies right behind the first
      for (int64_t at = 0; at < k; at += kDepth, to += 2 * kTileBytes) {
        if (k - at >= kDepth) {
          _mm512_storeu_si512(to, _mm512_loadu_si512(row + at));
        } else {
          std::memcpy(to, row + at, k - at);
        }
      }
    }
  }
}

// Row blocks of a chunk. Chunks are equal: a short last one would leave a thread without work.
inline int64_t chunk_blocks(const GemmCall& call) {
  const int64_t blocks = row_blocks(call.m), chunks = (blocks * kBlock * call.k + kChunkBytes - 1) / kChunkBytes;
  return (blocks + chunks - 1) / chunks;
}
inline int64_t column_groups(const GemmCall& call) { return (call.n + kBlock - 1) / kBlock; }

int64_t units(const GemmCall& call) {
  const int64_t blocks = row_blocks(call.m), chunk = chunk_blocks(call);
  return (blocks + chunk - 1) / chunk * column_groups(call);
}

// A finished block of accumulators whose outputs are still to be written.
struct Pending {
  int64_t m = 0;
  int64_t n = 0;
  int64_t rows = 0;  // valid ones
  int64_t done = 0;
};

inline void finish_some(
    const GemmCall& call, Finish finish, const int32_t* acc, Pending& pending, int64_t width, int64_t rows) {
  const int64_t now = least(rows, pending.rows - pending.done);
  if (now <= 0) return;
  finish(call.epilogue, acc + pending.done * kBlock, kBlock, pending.m + pending.done, now, pending.n, width, call.n);
  pending.done += now;
}

// One block of outputs over the whole of K into `out`; meanwhile the epilogue of `pending`, whose accumulators are in
// `before`. `stream` loads A with the hint that it will not be read again from L1.
template <bool stream, int panels>
void multiply(
    const GemmCall& call, Finish finish, const int8_t* a, const int8_t* b, int32_t* out, const int32_t* before,
    Pending& pending, int64_t width) {
  const int64_t steps = call.k / kDepth, panel_bytes = kPanel * call.k;
  const int64_t share = (pending.rows - pending.done + steps - 1) / steps;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    const int8_t* at = a + step * 2 * kTileBytes;
    const int8_t* bt = b + step * kTileBytes;
    _tile_loadd(6, bt, kDepth);
    if constexpr (stream) {
      _tile_stream_loadd(4, at, kDepth);
      _tile_stream_loadd(5, at + kTileBytes, kDepth);
    } else {
      _tile_loadd(4, at, kDepth);
      _tile_loadd(5, at + kTileBytes, kDepth);
    }
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
    if constexpr (panels > 1) {
      _tile_loadd(7, bt + panel_bytes, kDepth);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
    finish_some(call, finish, before, pending, width, share);
  }
  constexpr int64_t kStride = kBlock * sizeof(int32_t);
  _tile_stored(0, out, kStride);
  _tile_stored(1, out + kTileRows * kBlock, kStride);
  if constexpr (panels > 1) {
    _tile_stored(2, out + kPanel, kStride);
    _tile_stored(3, out + kTileRows * kBlock + kPanel, kStride);
  }
}

template <bool stream>
void run_blocks(const GemmCall& call, int64_t begin, int64_t end) {
  alignas(64) int32_t acc[2][kBlock * kBlock];
  const Finish finish = finisher(call.epilogue.post);
  const int64_t blocks = row_blocks(call.m), chunk = chunk_blocks(call), across = column_groups(call);
  Pending pending;
  int64_t width = kBlock;  // of the pending block
  int turn = 0;
  configure_tiles();
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit / across * chunk, last = least(blocks, first + chunk);
    const int64_t n = unit % across * kBlock;
    const int8_t* b = call.b + n * call.k;
    const bool both = call.n - n > kPanel;
    for (int64_t block = first; block < last; ++block) {
      const int8_t* a = static_cast<const int8_t*>(call.a) + block * kBlock * call.k;
      if (both) {
        multiply<stream, 2>(call, finish, a, b, acc[turn], acc[1 - turn], pending, width);
      } else {
        multiply<stream, 1>(call, finish, a, b, acc[turn], acc[1 - turn], pending, width);
      }
      finish_some(call, finish, acc[1 - turn], pending, width, kBlock);
      pending = {block * kBlock, n, least(kBlock, call.m - block * kBlock), 0};
      width = both ? kBlock : kPanel;
      turn = 1 - turn;
    }
  }
  finish_some(call, finish, acc[1 - turn], pending, width, kBlock);
  _tile_release();
}

bool available() {
#ifdef INT8_EMULATE_ISA
  return true;
#else
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8");
#endif
}

}  // namespace

namespace int8_kernels {

const GemmKernel kGemmAmx = {"int8:amx", 4, packed_a_bytes, row_blocks, pack_a, units, run_blocks<false>, available};
const GemmKernel kGemmAmxStream = {
    "int8:amx_stream", 4, packed_a_bytes, row_blocks, pack_a, units, run_blocks<true>, available};

}  // namespace int8_kernels
