// Measures what this host's cores and memory give at best, and prints it as one JSON object.
//
//   peaks CPUS ISA MEMORY_BYTES L3_BYTES L2_BYTES WINDOW_MS
//
// CPUS is a comma list, one thread on each. ISA is amx, vnni, avx512 or avx2; loops beyond it are not run. The byte
// counts are working sets of all threads together; 0 leaves the level out.
//
// Arithmetic: loops of register operands with enough independent accumulators to hide the latency of the instruction, so
// that nothing but the execution units limits them. Every instruction is inline assembly: a compiler would otherwise
// hoist products of operands that never change out of the loop. Bandwidth: threads pass over arrays of their own, which
// they touched first.
//
// A window is WINDOW_MS long on all threads together; its rate is all their work over the time from the first start to
// the last end. Of WINDOWS windows the best counts: a synthetic loop can be slowed down by what else runs, never sped
// up. `spread` is how far the median window stays below the best, as a share of it.
//
// Exit codes: 0, 2 wrong use, 3 the CPU lacks the ISA or the kernel denies it.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cpuid.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <immintrin.h>
#include <memory>
#include <pthread.h>
#include <sched.h>
#include <string>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr int WINDOWS = 15;
constexpr int BURST = 2048;  // iterations of an arithmetic loop between two looks at the clock
constexpr int ISA_LACKING = 3;

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
    return std::chrono::duration<double>(end - start).count();
}

// --- what the CPU and the kernel allow ------------------------------------------------------------------------------

struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf leaf7() {
    Leaf found;
    __get_cpuid_count(7, 0, &found.eax, &found.ebx, &found.ecx, &found.edx);
    return found;
}

bool bit(unsigned value, int position) { return (value >> position) & 1u; }

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }

bool has_vnni() { return has_avx512() && bit(leaf7().ecx, 11); }

bool has_amx() {
    const unsigned edx = leaf7().edx;
    return has_vnni() && bit(edx, 22) && bit(edx, 24) && bit(edx, 25);  // BF16, TILE, INT8
}

// Linux grants a process its tiles on request only (since 5.16).
bool may_use_amx() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// --- arithmetic: each function runs BURST iterations; OPS is what one iteration computes ----------------------------

#define REPEAT8(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define REPEAT12(DO) REPEAT8(DO) DO(8) DO(9) DO(10) DO(11)
#define REPEAT16(DO) REPEAT12(DO) DO(12) DO(13) DO(14) DO(15)

#define FMA(i) asm volatile("vfmadd231ps %1, %2, %0" : "+v"(sum[i]) : "v"(a), "v"(b));
#define DOT(i) asm volatile("vpdpbusd %1, %2, %0" : "+v"(sum[i]) : "v"(a), "v"(b));
#define MADDUBS(i)                                               \
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0" \
                 : "+v"(sum[i]), "=&v"(product)                  \
                 : "v"(a), "v"(b), "v"(ones));
#define MADDWD(i) \
    asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum[i]), "=&v"(product) : "v"(a), "v"(b));

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define AMX __attribute__((target("amx-tile,amx-int8,amx-bf16")))

constexpr double FP32_AVX2_OPS = 12 * 8 * 2, FP32_AVX512_OPS = 16 * 16 * 2;
constexpr double MADDUBS_AVX2_OPS = 8 * 32 * 2, MADDUBS_AVX512_OPS = 16 * 64 * 2;
constexpr double MADDWD_AVX2_OPS = 8 * 16 * 2, MADDWD_AVX512_OPS = 16 * 32 * 2;
constexpr double VNNI_OPS = 16 * 64 * 2;
constexpr double AMX_INT8_OPS = 4.0 * 16 * 16 * 64 * 2, AMX_BF16_OPS = 4.0 * 16 * 16 * 32 * 2;

AVX2 void fp32_avx2() {
    __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1e-3f), sum[12] = {};
    for (int n = 0; n < BURST; ++n) { REPEAT12(FMA) }
}

AVX2 void maddubs_avx2() {
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1), product, sum[8] = {};
    for (int n = 0; n < BURST; ++n) { REPEAT8(MADDUBS) }
}

AVX2 void maddwd_avx2() {
    __m256i a = _mm256_set1_epi16(3), b = _mm256_set1_epi16(1), product, sum[8] = {};
    for (int n = 0; n < BURST; ++n) { REPEAT8(MADDWD) }
}

AVX512 void fp32_avx512() {
    __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1e-3f), sum[16] = {};
    for (int n = 0; n < BURST; ++n) { REPEAT16(FMA) }
}

AVX512 void maddubs_avx512() {
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(1), ones = _mm512_set1_epi16(1), product, sum[16] = {};
    for (int n = 0; n < BURST; ++n) { REPEAT16(MADDUBS) }
}

AVX512 void maddwd_avx512() {
    __m512i a = _mm512_set1_epi16(3), b = _mm512_set1_epi16(1), product, sum[16] = {};
    for (int n = 0; n < BURST; ++n) { REPEAT16(MADDWD) }
}

VNNI void int8_vnni() {
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(1), sum[16] = {};
    for (int n = 0; n < BURST; ++n) { REPEAT16(DOT) }
}

// Tiles 0-3 accumulate 2x2 products of 4, 5 (16 rows of 64 bytes) and 6, 7: the shape of a GEMM's inner loop.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_a_row[16] = {};
    std::uint8_t rows[16] = {};
};

AMX void configure_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.bytes_a_row[tile] = 64;
        config.rows[tile] = 16;
    }
    asm volatile("" ::"r"(&config) : "memory");  // gcc 12 drops the stores above otherwise
    _tile_loadconfig(&config);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
}

AMX void int8_amx() {
    configure_tiles();
    for (int n = 0; n < BURST; ++n) {
        _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
}

AMX void bf16_amx() {
    configure_tiles();
    for (int n = 0; n < BURST; ++n) {
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

// --- bandwidth: one pass over a thread's arrays ----------------------------------------------------------------------

using Floats = std::unique_ptr<float, decltype(&std::free)>;

Floats aligned_floats(std::size_t count) {
    auto* memory = static_cast<float*>(std::aligned_alloc(64, count * sizeof(float)));
    if (memory == nullptr) {
        std::fprintf(stderr, "peaks: no memory for %zu bytes\n", count * sizeof(float));
        std::exit(1);
    }
    std::fill_n(memory, count, 1.0f);
    return Floats(memory, &std::free);
}

// Loads alone; 32 floats (two cache lines) an iteration.
AVX2 void read(const float* from, std::size_t count) {
    for (std::size_t i = 0; i < count; i += 32) {
        asm volatile("vmovaps (%0), %%ymm0\n\tvmovaps 32(%0), %%ymm1\n\tvmovaps 64(%0), %%ymm2\n\tvmovaps 96(%0), %%ymm3"
                     ::"r"(from + i) : "ymm0", "ymm1", "ymm2", "ymm3");
    }
}

// to = one + 3 two, as in McCalpin's STREAM: 12 bytes an element, the read that a store causes not counted.
AVX2 void triad(float* to, const float* one, const float* two, std::size_t count) {
    const __m256 factor = _mm256_set1_ps(3.0f);
    for (std::size_t i = 0; i < count; i += 8)
        _mm256_store_ps(to + i, _mm256_fmadd_ps(factor, _mm256_load_ps(two + i), _mm256_load_ps(one + i)));
}

// --- windows on all threads -----------------------------------------------------------------------------------------

class Barrier {
  public:
    explicit Barrier(int count) : count_(count) {}
    void wait() {
        const int phase = phase_.load();
        if (waiting_.fetch_add(1) + 1 == count_) {
            waiting_ = 0;
            phase_.fetch_add(1);
        } else {
            while (phase_.load() == phase) sched_yield();
        }
    }

  private:
    const int count_;
    std::atomic<int> waiting_{0}, phase_{0};
};

void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

struct Rate {
    double best = 0, spread = 0;
};

// What one thread runs: `step` does `amount` units of work (operations, or bytes).
struct Work {
    std::function<void()> step;
    double amount = 0;
};

// The best rate of WINDOWS windows. `prepare` is called once on each pinned thread, so that it touches its own memory.
Rate measure(const std::vector<int>& cpus, double window_s, const std::function<Work()>& prepare) {
    const int count = static_cast<int>(cpus.size());
    Barrier barrier(count);
    std::vector<std::vector<Clock::time_point>> starts(WINDOWS), ends(WINDOWS);
    std::vector<std::vector<double>> amounts(WINDOWS);
    for (int w = 0; w < WINDOWS; ++w) {
        starts[w].resize(count);
        ends[w].resize(count);
        amounts[w].resize(count);
    }
    std::vector<std::thread> threads;
    for (int t = 0; t < count; ++t) {
        threads.emplace_back([&, t] {
            pin(cpus[t]);
            const Work work = prepare();
            work.step();
            for (int w = 0; w < WINDOWS; ++w) {
                barrier.wait();
                const auto start = Clock::now();
                auto now = start;
                double done = 0;
                do {
                    work.step();
                    done += work.amount;
                    now = Clock::now();
                } while (seconds_between(start, now) < window_s);
                starts[w][t] = start;
                ends[w][t] = now;
                amounts[w][t] = done;
            }
        });
    }
    for (auto& thread : threads) thread.join();
    std::vector<double> rates;
    for (int w = 0; w < WINDOWS; ++w) {
        double total = 0;
        for (double amount : amounts[w]) total += amount;
        const auto first = *std::min_element(starts[w].begin(), starts[w].end());
        const auto last = *std::max_element(ends[w].begin(), ends[w].end());
        rates.push_back(total / seconds_between(first, last));
    }
    std::sort(rates.begin(), rates.end());
    const double best = rates.back();
    return {best, 1.0 - rates[rates.size() / 2] / best};
}

Work arithmetic(void (*loop)(), double ops) { return {loop, ops * BURST}; }

Work reading(std::size_t bytes) {
    const std::size_t count = std::max<std::size_t>(bytes / sizeof(float) / 32, 1) * 32;
    std::shared_ptr<float> memory = aligned_floats(count);
    // Small working sets are passed over several times between two looks at the clock.
    const int passes = static_cast<int>(std::max<std::size_t>((1u << 22) / (count * sizeof(float)), 1));
    const auto step = [memory, count, passes] { for (int n = 0; n < passes; ++n) read(memory.get(), count); };
    return {step, static_cast<double>(count * sizeof(float)) * passes};
}

Work triads(std::size_t bytes) {
    const std::size_t count = std::max<std::size_t>(bytes / 3 / sizeof(float) / 32, 1) * 32;
    std::shared_ptr<float> to = aligned_floats(count), one = aligned_floats(count), two = aligned_floats(count);
    return {[=] { triad(to.get(), one.get(), two.get(), count); }, static_cast<double>(count * sizeof(float)) * 3};
}

// --- the command line -------------------------------------------------------------------------------------------------

std::vector<int> numbers(const char* text) {
    std::vector<int> found;
    for (const char* at = text; *at != '\0';) {
        char* end = nullptr;
        found.push_back(static_cast<int>(std::strtol(at, &end, 10)));
        if (end == at) return {};
        at = *end == ',' ? end + 1 : end;
    }
    return found;
}

class Report {
  public:
    void add(const char* name, Rate rate) {
        std::printf("%s\"%s\": {\"rate\": %.6g, \"spread\": %.4f}", first_ ? "" : ", ", name, rate.best, rate.spread);
        first_ = false;
    }

  private:
    bool first_ = true;
};

int refuse(const char* why) {
    std::fprintf(stderr, "peaks: %s\n", why);
    return ISA_LACKING;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) {
        std::fprintf(stderr, "peaks: write peaks CPUS ISA MEMORY_BYTES L3_BYTES L2_BYTES WINDOW_MS\n");
        return 2;
    }
    const std::vector<int> cpus = numbers(argv[1]);
    const std::string isa = argv[2];
    const std::vector<std::string> known = {"avx2", "avx512", "vnni", "amx"};
    const auto level = std::find(known.begin(), known.end(), isa) - known.begin();
    if (cpus.empty() || level == 4) {
        std::fprintf(stderr, "peaks: CPUS is a list such as 0,1 and ISA one of amx, vnni, avx512, avx2\n");
        return 2;
    }
    if (!has_avx2()) return refuse("this CPU lacks AVX2 and FMA");
    if (level >= 1 && !has_avx512()) return refuse("this CPU lacks AVX512F and AVX512BW");
    if (level >= 2 && !has_vnni()) return refuse("this CPU lacks AVX512-VNNI");
    if (level >= 3 && !has_amx()) return refuse("this CPU lacks AMX-INT8 or AMX-BF16");
    if (level >= 3 && !may_use_amx()) return refuse("the kernel denies this process AMX");

    const double window_s = std::atof(argv[6]) / 1000;
    const std::size_t threads = cpus.size();
    Report report;
    const auto compute = [&](const char* name, void (*loop)(), double ops) {
        report.add(name, measure(cpus, window_s, [=] { return arithmetic(loop, ops); }));
    };
    const auto move = [&](const char* name, const char* bytes, Work (*make)(std::size_t)) {
        const std::size_t each = std::strtoull(bytes, nullptr, 10) / threads;
        if (each > 0) report.add(name, measure(cpus, window_s, [=] { return make(each); }));
    };
    std::printf("{");
    compute("fp32_avx2", fp32_avx2, FP32_AVX2_OPS);
    compute("int8_maddubs_avx2", maddubs_avx2, MADDUBS_AVX2_OPS);
    compute("int8_maddwd_avx2", maddwd_avx2, MADDWD_AVX2_OPS);
    if (level >= 1) {
        compute("fp32_avx512", fp32_avx512, FP32_AVX512_OPS);
        compute("int8_maddubs_avx512", maddubs_avx512, MADDUBS_AVX512_OPS);
        compute("int8_maddwd_avx512", maddwd_avx512, MADDWD_AVX512_OPS);
    }
    if (level >= 2) compute("int8_vnni", int8_vnni, VNNI_OPS);
    if (level >= 3) {
        compute("int8_amx", int8_amx, AMX_INT8_OPS);
        compute("bf16_amx", bf16_amx, AMX_BF16_OPS);
    }
    move("l2_read", argv[5], reading);
    move("l3_read", argv[4], reading);
    move("memory_read", argv[3], reading);
    move("memory_triad", argv[3], triads);
    std::printf("}\n");
    return 0;
}
