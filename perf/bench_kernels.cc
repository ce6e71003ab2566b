// SPDX-License-Identifier: Apache-2.0
// Times the host kernels of every table that this processor can run. Each case checks its result against the reference
// before it is timed. Bytes are counted as read and written once each, without the read-for-ownership of ordinary
// stores.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/codec.h"
#include "kernels/table.h"

namespace moeccl::kernels {
namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;

// Page-aligned, and all pages are touched. Every float type reads these bytes as small ordinary numbers.
class Buffer {
 public:
  explicit Buffer(size_t bytes, unsigned seed = 0)
      : bytes_(bytes), data_(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)) {
    std::mt19937 random(seed);
    uint8_t* p = static_cast<uint8_t*>(data_.get());
    for (size_t i = 0; i < bytes; ++i) p[i] = static_cast<uint8_t>(0x38 + random() % 8);
  }
  uint8_t* data() { return static_cast<uint8_t*>(data_.get()); }
  bool operator==(const Buffer& other) const { return std::memcmp(data_.get(), other.data_.get(), bytes_) == 0; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> data_;
};

void set_bytes(benchmark::State& state, size_t per_iteration) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(per_iteration));
}

// Runs `kernel(table, dst)` once with the reference and once with the table, and compares, before the timing.
template <class Kernel>
void check_and_time(benchmark::State& state, const KernelTable& table, size_t dst_bytes, size_t traffic,
                    Kernel kernel) {
  Buffer expected(dst_bytes), dst(dst_bytes);
  kernel(*select("reference"), expected.data());
  kernel(table, dst.data());
  if (!(dst == expected)) return state.SkipWithError("differs from the reference");
  for (auto _ : state) {
    kernel(table, dst.data());
    benchmark::ClobberMemory();
  }
  set_bytes(state, traffic);
}

void copy(benchmark::State& state, const KernelTable& table, size_t bytes, bool stream) {
  Buffer src(bytes, 1);
  check_and_time(state, table, bytes, 2 * bytes,
                 [&](const KernelTable& t, void* dst) { (stream ? t.copy_stream : t.copy)(dst, src.data(), bytes); });
}

size_t element_bytes(moecclDataType_t type) {
  if (type == moecclFloat32) return 4;
  return type == moecclBfloat16 || type == moecclFloat16 ? 2 : 1;
}

void reduce(benchmark::State& state, const KernelTable& table, moecclDataType_t type, size_t n, size_t bytes,
            bool stream) {
  std::vector<Buffer> buffers;
  std::vector<const void*> srcs;
  for (size_t k = 0; k < n; ++k) srcs.push_back(buffers.emplace_back(bytes, static_cast<unsigned>(k + 1)).data());
  const ReduceArgs args{
      .srcs = srcs.data(), .count = bytes / element_bytes(type), .n_srcs = static_cast<uint32_t>(n), .stream = stream};
  check_and_time(state, table, bytes, (n + 1) * bytes, [&](const KernelTable& t, void* dst) {
    ReduceArgs a = args;
    a.dst = dst;
    t.reduce[type][static_cast<int>(ReduceOp::kSum)](a);
  });
}

struct RowsShape {
  size_t count, row_bytes;
};

// Gather copies random rows to consecutive ones; scatter does the reverse.
void copy_rows(benchmark::State& state, const KernelTable& table, RowsShape shape, bool gather, bool stream) {
  Buffer src(shape.count * shape.row_bytes, 1);
  std::vector<uint32_t> order(shape.count);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  CopyRowsArgs args;
  args.src = src.data();
  (gather ? args.src_index : args.dst_index) = order.data();
  args.count = shape.count;
  args.row_bytes = shape.row_bytes;
  args.stream = stream;
  const size_t bytes = shape.count * shape.row_bytes;
  check_and_time(state, table, bytes, 2 * bytes, [&](const KernelTable& t, void* dst) {
    CopyRowsArgs a = args;
    a.dst = dst;
    t.copy_rows(a);
  });
}

// The combine of a top-8 layer with hidden size 7168 in bf16. Grouped: two levels, groups of two in groups of four.
void reduce_rows(benchmark::State& state, const KernelTable& table, size_t n_tokens, bool grouped, bool stream) {
  constexpr size_t kTopK = 8, kHidden = 7168, kRowBytes = 2 * kHidden;
  Buffer src(n_tokens * kTopK * kRowBytes, 1);
  std::vector<RowTerm> terms(n_tokens * kTopK);
  std::mt19937 random(2);
  for (size_t t = 0; t < terms.size(); ++t) {
    terms[t].row = static_cast<uint32_t>(t);
    terms[t].close = t % 4 == 3 ? 2 : t % 2;
  }
  if (n_tokens > 1) {
    for (size_t t = 0; t < terms.size(); ++t) std::swap(terms[t].row, terms[random() % terms.size()].row);
  }
  std::vector<float> weights(terms.size(), 0.125f);
  std::vector<uint64_t> offsets;
  for (size_t i = 0; i <= n_tokens; ++i) offsets.push_back(i * kTopK);
  const void* base = src.data();
  const ReduceRowsArgs args{.bases = &base,
                            .offsets = offsets.data(),
                            .terms = terms.data(),
                            .weights = weights.data(),
                            .count = n_tokens,
                            .row_elements = kHidden,
                            .grouped = grouped,
                            .stream = stream};
  const size_t bytes = n_tokens * kRowBytes;
  check_and_time(state, table, bytes, (kTopK + 1) * bytes, [&](const KernelTable& t, void* dst) {
    ReduceRowsArgs a = args;
    a.dst = dst;
    t.reduce_rows[moecclBfloat16](a);
  });
}

void dot_rows(benchmark::State& state, const KernelTable& table, size_t count) {
  constexpr size_t kHidden = 7168;
  Buffer a(count * kHidden * 2, 1), b(count * kHidden * 2, 2);
  check_and_time(state, table, count * sizeof(float), 2 * count * kHidden * 2, [&](const KernelTable& t, void* dst) {
    t.dot_rows[moecclBfloat16](
        {.out = static_cast<float*>(dst), .a = a.data(), .b = b.data(), .count = count, .row_elements = kHidden});
  });
}

// One expert of 32 MiB at the paper's 50x. "memcpy" is the baseline for the other steps. Rates are the expert's bytes
// over the time.
constexpr size_t kExpertBytes = 32 * kMiB;

enum class CodecStep { kEncode, kDecode, kMemcpy };

void codec(benchmark::State& state, const CodecTable& table, moecclDataType_t type, CodecStep step) {
  const CodecShape shape{type, kExpertBytes / element_bytes(type), 50};
  Buffer expert(kExpertBytes), shared(kExpertBytes), out(kExpertBytes), encoded(codec_bytes(shape));
  std::mt19937 random(1);
  // Normal residuals around a normal shared expert, by sums of uniform numbers.
  const auto normal = [&] {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(random()) * 0x1p-32f;
    return sum;
  };
  for (size_t i = 0; i < shape.count; ++i) {
    const float s = 0.02f * normal(), e = s + 0.005f * normal();
    uint32_t bits[2];
    std::memcpy(&bits[0], &s, 4);
    std::memcpy(&bits[1], &e, 4);
    const size_t n = element_bytes(type);
    std::memcpy(shared.data() + i * n, reinterpret_cast<const char*>(&bits[0]) + 4 - n, n);
    std::memcpy(expert.data() + i * n, reinterpret_cast<const char*>(&bits[1]) + 4 - n, n);
  }
  codec_encode(table, shape, expert.data(), shared.data(), encoded.data());
  for (auto _ : state) {
    if (step == CodecStep::kEncode) codec_encode(table, shape, expert.data(), shared.data(), encoded.data());
    if (step == CodecStep::kDecode &&
        !codec_decode(shape, encoded.data(), codec_bytes(shape), shared.data(), out.data()))
      return state.SkipWithError("does not decode");
    if (step == CodecStep::kMemcpy) std::memcpy(out.data(), expert.data(), kExpertBytes);
    benchmark::ClobberMemory();
  }
  set_bytes(state, kExpertBytes);
}

std::string size_name(size_t bytes) {
  return bytes >= kMiB ? std::to_string(bytes / kMiB) + "MiB" : std::to_string(bytes / kKiB) + "KiB";
}

template <class... Args>
void add(const std::string& name, const KernelTable& table,
         void (*function)(benchmark::State&, const KernelTable&, Args...), std::type_identity_t<Args>... args) {
  benchmark::RegisterBenchmark((name + "/" + table.name).c_str(),
                               [=, &table](benchmark::State& state) { function(state, table, args...); });
}

void add_copies(const KernelTable& t) {
  // Where the two curves cross is stream_threshold_bytes().
  for (size_t bytes = 64 * kKiB; bytes <= 64 * kMiB; bytes *= 2) {
    add("copy/" + size_name(bytes), t, copy, bytes, false);
    add("copy_stream/" + size_name(bytes), t, copy, bytes, true);
  }
}

void add_reductions(const KernelTable& t) {
  const std::pair<moecclDataType_t, const char*> types[] = {
      {moecclFloat32, "fp32"}, {moecclBfloat16, "bf16"}, {moecclFloat16, "fp16"}, {moecclFloat8e4m3, "e4m3"}};
  for (auto [type, type_name] : types) {
    for (size_t n : {2u, 4u, 8u}) {
      const std::string name = std::string("reduce/") + type_name + "/n" + std::to_string(n) + "/";
      add(name + "32KiB", t, reduce, type, n, 32 * kKiB, false);
      add(name + "256KiB", t, reduce, type, n, 256 * kKiB, false);
      add(name + "16MiB", t, reduce, type, n, 16 * kMiB, false);
      add(name + "16MiB_stream", t, reduce, type, n, 16 * kMiB, true);
    }
  }
}

void add_rows(const KernelTable& t) {
  for (bool gather : {true, false}) {
    const std::string name = gather ? "gather" : "scatter";
    add(name + "/14336B_x4096", t, copy_rows, RowsShape{4096, 14336}, gather, false);
    add(name + "/14336B_x4096_stream", t, copy_rows, RowsShape{4096, 14336}, gather, true);
    add(name + "/1B_x4096", t, copy_rows, RowsShape{4096, 1}, gather, false);
    add(name + "/13B_x4096", t, copy_rows, RowsShape{4096, 13}, gather, false);
  }
  for (bool grouped : {false, true}) {
    const std::string name = grouped ? "reduce_rows_grouped/" : "reduce_rows/";
    add(name + "bf16_top8_x1", t, reduce_rows, size_t{1}, grouped, false);
    add(name + "bf16_top8_x1024", t, reduce_rows, size_t{1024}, grouped, false);
    add(name + "bf16_top8_x1024_stream", t, reduce_rows, size_t{1024}, grouped, true);
  }
  add("dot_rows/bf16_x8", t, dot_rows, size_t{8});
  add("dot_rows/bf16_x2048", t, dot_rows, size_t{2048});
}

void add_codec(const CodecTable& t) {
  for (auto [type, type_name] : {std::pair{moecclFloat32, "fp32"}, {moecclBfloat16, "bf16"}})
    for (auto [step, step_name] :
         {std::pair{CodecStep::kEncode, "encode"}, {CodecStep::kDecode, "decode_add"}, {CodecStep::kMemcpy, "memcpy"}})
      benchmark::RegisterBenchmark((std::string("codec/") + type_name + "/32MiB/" + step_name + "/" + t.name).c_str(),
                                   [=, &t](benchmark::State& state) { codec(state, t, type, step); });
}

}  // namespace
}  // namespace moeccl::kernels

int main(int argc, char** argv) {
  using namespace moeccl::kernels;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  for (const char* name : names()) {
    const KernelTable* table = select(name);
    if (!table) {
      std::fprintf(stderr, "this processor does not run the %s kernels\n", name);
      continue;
    }
    add_copies(*table);
    add_reductions(*table);
    add_rows(*table);
    add_codec(*select_codec(name));
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
