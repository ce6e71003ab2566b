// SPDX-License-Identifier: Apache-2.0
// Times the device kernels against the driver's own device-to-device copy, in one run, after checking each result:
//   bench_cuda [MIB]      MiB of each buffer (512)
//   --sms N               most multiprocessors that a kernel takes (all)
//   --only GROUP,...      of copies, rows, reduce, tables, codec
// Prints a line per kernel: name | ok or WRONG | seconds of all repetitions | time, rate, share of the copy rate. Bytes
// count reads and writes. Without a GPU it says so and exits with 77; with the emulated driver it only checks, because
// the times mean nothing.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/args.h"
#include "src/base/clock.h"
#include "src/exec/cuda/cuda_codec.h"
#include "src/exec/cuda/stream_engine.h"
#include "src/exec/cuda/tables/cuda_tables.h"
#include "src/routing/routing.h"

using namespace moeccl;
namespace cu = moeccl::driver::cuda;

namespace {

struct Bench {
  std::unique_ptr<exec::StreamEngine> engine;
  double copy_rate = 0;  // of the first line, the driver's copy
  int bad = 0;
  int64_t since = now_ns();

  // Returns the median of 9 rounds of `fn`, in ns. The emulation runs one, because its times mean nothing.
  double time(const std::function<void()>& fn) {
    const int rounds = cu::emulated() ? 1 : 9, repeats = cu::emulated() ? 1 : 5;
    std::vector<double> ns;
    fn();
    (void)engine->synchronize();
    for (int i = 0; i < rounds; ++i) {
      const int64_t start = now_ns();
      for (int k = 0; k < repeats; ++k) fn();
      (void)engine->synchronize();
      ns.push_back(static_cast<double>(now_ns() - start) / repeats);
    }
    std::sort(ns.begin(), ns.end());
    return ns[ns.size() / 2];
  }
  void report(const char* name, double bytes, double ns, bool right) {
    const double rate = bytes / ns;
    if (copy_rate == 0) copy_rate = rate;
    right = right && engine->status().ok();
    std::printf("%-14s | %-5s | %4.1f | %.1f us, %.1f GB/s, %.1f %% of the copy rate\n", name, right ? "ok" : "WRONG",
                static_cast<double>(now_ns() - since) / 1e9, ns / 1e3, rate, 100 * rate / copy_rate);
    std::fflush(stdout);
    since = now_ns();
    bad += !right;
  }
};

std::vector<unsigned char> fetch(exec::StreamEngine& engine, const void* p, size_t bytes) {
  std::vector<unsigned char> out(bytes);
  (void)cu::driver()->cuMemcpyDtoHAsync_v2(out.data(), reinterpret_cast<cu::Pointer>(p), bytes, engine.stream());
  (void)engine.synchronize();
  return out;
}

// The source of all groups, and the place of results.
struct Buffers {
  cu::Memory a, b;
  std::vector<unsigned char> host;  // the contents of a
  size_t bytes() const { return host.size(); }
};

constexpr size_t kRow = 7168 * 2, kTop = 8;

// A permutation of the rows of a buffer, on the host and on the device.
struct Order {
  std::vector<uint32_t> host;
  const uint32_t* device = nullptr;
  Order(exec::StreamEngine& e, size_t rows) : host(rows) {
    for (size_t i = 0; i < rows; ++i) host[i] = static_cast<uint32_t>((i * 7919) % rows);
    if (rows % 7919 == 0) std::reverse(host.begin(), host.end());
    device = static_cast<const uint32_t*>(e.upload(host.data(), rows * 4));
  }
};

// All other rates are relative to this one, so it always runs.
void bench_driver(Bench& bench, const Buffers& m) {
  exec::StreamEngine& e = *bench.engine;
  const double ns = bench.time([&] {
    (void)cu::driver()->cuMemcpyAsync(reinterpret_cast<cu::Pointer>(m.b.data()),
                                      reinterpret_cast<cu::Pointer>(m.a.data()), m.bytes(), e.stream());
  });
  bench.report("driver-copy", static_cast<double>(2 * m.bytes()), ns, fetch(e, m.b.data(), m.bytes()) == m.host);
}

void bench_copies(Bench& bench, const Buffers& m) {
  exec::StreamEngine& e = *bench.engine;
  (void)cu::driver()->cuMemsetD8Async(reinterpret_cast<cu::Pointer>(m.b.data()), 0, m.bytes(), e.stream());
  const cuda::CopyArgs args{m.b.data(), m.a.data(), m.bytes()};
  const double ns = bench.time([&] { e.launch("moeccl_copy", &args, 2 * m.bytes()); });
  bench.report("copy", static_cast<double>(2 * m.bytes()), ns, fetch(e, m.b.data(), m.bytes()) == m.host);
}

void bench_rows(Bench& bench, const Buffers& m) {
  exec::StreamEngine& e = *bench.engine;
  const size_t rows = m.bytes() / kRow;
  const Order order(e, rows);
  for (const bool gather : {true, false}) {
    const cuda::RowsKernelArgs args{
        m.b.data(), m.a.data(), gather ? nullptr : order.device, gather ? order.device : nullptr, 0, 0, rows,
        kRow,       nullptr};
    const double ns = bench.time([&] { e.launch("moeccl_copy_rows", &args, 2 * rows * kRow); });
    const std::vector<unsigned char> got = fetch(e, m.b.data(), rows * kRow);
    bool right = true;
    for (size_t i = 0; i < rows; ++i) {
      const size_t to = gather ? i : order.host[i], from = gather ? order.host[i] : i;
      right = right && std::memcmp(&got[to * kRow], &m.host[from * kRow], kRow) == 0;
    }
    bench.report(gather ? "gather-rows" : "scatter-rows", static_cast<double>(2 * rows * kRow), ns, right);
  }
  // Combine: each token sums eight rows.
  const size_t tokens = rows / kTop;
  std::vector<uint64_t> offsets(tokens + 1);
  std::vector<kernels::RowTerm> terms(tokens * kTop);
  std::vector<float> weights(tokens * kTop, 0.125f);
  for (size_t t = 0; t <= tokens; ++t) offsets[t] = t * kTop;
  for (size_t i = 0; i < terms.size(); ++i) terms[i].row = order.host[i];
  cuda::ReduceRowsKernelArgs sum{};
  sum.dst = m.b.data();
  sum.offsets = static_cast<const uint64_t*>(e.upload(offsets.data(), offsets.size() * 8));
  sum.terms = static_cast<const cuda::RowTermBits*>(e.upload(terms.data(), terms.size() * sizeof(terms[0])));
  sum.weights = static_cast<const float*>(e.upload(weights.data(), weights.size() * 4));
  sum.count = tokens;
  sum.row_elements = kRow / 2;
  sum.n_bases = 1;
  const void* const from = m.a.data();
  sum.bases = static_cast<const void* const*>(e.upload(&from, sizeof(from)));
  const size_t touched = (terms.size() + tokens) * kRow;
  const double ns = bench.time([&] { e.launch("moeccl_reduce_rows_9", &sum, touched); });
  std::vector<unsigned char> want(tokens * kRow);
  const void* base = m.host.data();
  kernels::ReduceRowsArgs reference;
  reference.dst = want.data();
  reference.bases = &base;
  reference.offsets = offsets.data();
  reference.terms = terms.data();
  reference.weights = weights.data();
  reference.count = tokens;
  reference.row_elements = kRow / 2;
  kernels::select("reference")->reduce_rows[moecclBfloat16](reference);
  bench.report("sum-rows-top8", static_cast<double>(touched), ns, fetch(e, m.b.data(), want.size()) == want);
}

// Sums 2 and 8 sources that lie one after the other. Checks the first and the last piece of the result.
void bench_reduce(Bench& bench, const Buffers& m) {
  exec::StreamEngine& e = *bench.engine;
  struct Type {
    moecclDataType_t type;
    const char* name;
  };
  for (const Type& t : {Type{moecclFloat32, "fp32"}, Type{moecclBfloat16, "bf16"}, Type{moecclFloat8e4m3, "e4m3"}}) {
    for (const uint32_t n : {2u, 8u}) {
      const size_t size = moecclTypeSize(t.type), each = m.bytes() / n / 256 * 256,
                   piece = std::min(each, size_t{1} << 18);
      cuda::ReduceKernelArgs args{};
      args.dst = m.b.data();
      args.count = each / size;
      args.n_srcs = n;
      for (uint32_t i = 0; i < n; ++i) args.srcs[i] = m.a.data() + i * each;
      const std::string kernel = format("moeccl_reduce_{}", static_cast<int>(t.type));
      const double ns = bench.time([&] { e.launch(kernel, &args, (n + 1) * each); });
      bool right = true;
      for (const size_t at : {size_t{0}, each - piece}) {
        std::vector<unsigned char> want(piece);
        const void* srcs[8];
        for (uint32_t i = 0; i < n; ++i) srcs[i] = m.host.data() + i * each + at;
        kernels::select("reference")
            ->reduce[t.type][0]({.dst = want.data(), .srcs = srcs, .count = piece / size, .n_srcs = n});
        right = right && fetch(e, m.b.data() + at, piece) == want;
      }
      bench.report(format("reduce-{}-{}", n, t.name).c_str(), static_cast<double>((n + 1) * each), ns, right);
    }
  }
}

// Makes one rank's tables from the choices of 8 ranks of 4096 tokens, each with 8 of 256 experts.
void bench_tables(Bench& bench, const Buffers& m) {
  exec::StreamEngine& e = *bench.engine;
  constexpr uint32_t kRanks = 8, kExperts = 256;
  const plan::LevelTree tree = plan::LevelTree::flat(kRanks);
  algo::MoeShape shape;
  shape.top_k = kTop;
  shape.row_bytes = kRow;
  shape.max_tokens = std::min<uint64_t>(4096, m.bytes() >> 14);  // fewer with little memory: a trial run
  shape.expert_major = true;
  const algo::Placement placement = algo::Placement::make(kExperts, kRanks, nullptr).value();
  const algo::CanonicalOrder order(tree, placement);
  const algo::Paths paths({algo::PathKind::kFlat, 1}, tree, placement, nullptr);
  const algo::RankPaths rank(paths, tree, placement, 0);
  const auto n = static_cast<uint32_t>(shape.max_tokens);
  std::vector<int32_t> topk(size_t{n} * kTop);
  uint64_t local = 0;
  for (size_t i = 0; i < topk.size(); ++i) {
    topk[i] = static_cast<int32_t>((i / kTop * 97 + i % kTop * 31) % kExperts);
    local += static_cast<uint64_t>(topk[i]) < kExperts / kRanks;
  }
  const std::vector<float> weight(topk.size(), 0.125f);
  auto tables = exec::CudaTables::create(e.context(),
                                         {&paths, &rank, &placement, nullptr, &order, &shape, shape.max_tokens, 0}, 0);
  auto results = cu::Memory::device(e.context(), 65536);
  if (!tables.ok() || !results.ok()) return bench.report("tables", 1, 1, false);
  exec::CudaTables& t = **tables;
  const exec::StreamChoices choices{static_cast<const int32_t*>(e.upload(topk.data(), topk.size() * 4)),
                                    static_cast<const float*>(e.upload(weight.data(), weight.size() * 4)), n};
  double ns = bench.time([&] { e.note(t.pack(e, e.stream(), choices)); });
  bench.report("tables-pack", static_cast<double>(topk.size() * 8 * 2), ns, true);
  for (uint32_t r = 0; r < kRanks; ++r)
    (void)cu::driver()->cuMemcpyAsync(reinterpret_cast<cu::Pointer>(t.recv() + r * t.block_bytes()),
                                      reinterpret_cast<cu::Pointer>(t.send()), t.block_bytes(), e.stream());
  exec::CudaTables::Target target;
  target.head = reinterpret_cast<cuda::WalkTables*>(results->data());
  target.counts = reinterpret_cast<cuda::TableCounts*>(results->data() + 32768);
  target.expert_offsets = reinterpret_cast<int64_t*>(results->data() + 40960);
  target.expert_counts = reinterpret_cast<int32_t*>(results->data() + 49152);
  ns = bench.time([&] { e.note(t.make(e, e.stream(), false, true, target)); });
  const std::vector<unsigned char> got = fetch(e, target.counts, sizeof(cuda::TableCounts));
  cuda::TableCounts counts{};
  std::memcpy(&counts, got.data(), sizeof(counts));
  bench.report("tables-make", static_cast<double>(kRanks * topk.size() * 6), ns, counts.n_rows == kRanks * local);
}

// Encodes and decode-adds an expert of 32 MiB, and compares with the host's bytes.
void bench_codec(Bench& bench, const Buffers& m) {
  exec::StreamEngine& e = *bench.engine;
  const size_t bytes = std::min(m.bytes() / 4, size_t{32} << 20);
  kernels::CodecShape shape{moecclBfloat16, bytes / 2, 50};
  auto codec = exec::CudaCodec::create(e, shape);
  if (!codec.ok()) {
    std::fprintf(stderr, "%s\n", codec.status().message().c_str());
    return bench.report("codec", 1, 1, false);
  }
  const std::byte *expert = m.a.data(), *shared = m.a.data() + bytes;
  std::byte *encoded = m.b.data(), *held = m.b.data() + 2 * bytes;
  double ns = bench.time([&] { e.note((*codec)->encode(expert, shared, encoded, 1, nullptr)); });
  std::vector<unsigned char> want(kernels::codec_bytes(shape)), out(bytes);
  (void)kernels::codec_encode(kernels::best_codec(), shape, m.host.data(), m.host.data() + bytes, want.data());
  bench.report("codec-encode", static_cast<double>(2 * bytes + want.size()), ns,
               fetch(e, encoded, want.size()) == want);
  ns = bench.time([&] { e.note((*codec)->decode(encoded, shared, held, 1)); });
  const bool decoded = kernels::codec_decode(shape, want.data(), want.size(), m.host.data() + bytes, out.data());
  bench.report("codec-decode", static_cast<double>(2 * bytes + want.size()), ns,
               decoded && fetch(e, held, bytes) == out);
}

struct Group {
  const char* name;
  void (*run)(Bench&, const Buffers&);
};
constexpr Group kGroups[] = {{"copies", bench_copies},
                             {"rows", bench_rows},
                             {"reduce", bench_reduce},
                             {"tables", bench_tables},
                             {"codec", bench_codec}};

int run(size_t bytes, uint32_t sm_limit, const std::string& only) {
  cu::Context context = nullptr;
  if (cu::driver()->cuDevicePrimaryCtxRetain(&context, 0) != 0) return 1;
  const cu::Current current(context);
  int sms = 1;
  (void)cu::driver()->cuDeviceGetAttribute(&sms, cu::kMultiprocessors, 0);
  auto engine = exec::StreamEngine::create(context, sm_limit > 0 ? sm_limit : static_cast<uint32_t>(sms));
  auto a = cu::Memory::device(context, bytes), b = cu::Memory::device(context, bytes);
  if (!engine.ok() || !a.ok() || !b.ok()) {
    std::fprintf(stderr, "%s\n",
                 (!engine.ok() ? engine.status()
                  : !a.ok()    ? a.status()
                               : b.status())
                     .message()
                     .c_str());
    return 2;
  }
  Bench bench{std::move(*engine)};
  Buffers m{std::move(*a), std::move(*b), std::vector<unsigned char>(bytes)};
  for (size_t i = 0; i < bytes; i += 2) {  // bf16 and fp32 that stay finite in sums, e4m3 without NaNs
    m.host[i] = static_cast<unsigned char>(0x80 | (i / 2 * 37 % 126));
    m.host[i + 1] = 0x3f;
  }
  (void)cu::driver()->cuMemcpyHtoDAsync_v2(reinterpret_cast<cu::Pointer>(m.a.data()), m.host.data(), bytes,
                                           bench.engine->stream());
  bench_driver(bench, m);
  for (const Group& g : kGroups) {
    if (!only.empty() && ("," + only + ",").find(std::string(",") + g.name + ",") == std::string::npos) continue;
    const exec::StreamEngine::Scope scope(*bench.engine);
    g.run(bench, m);
    (void)bench.engine->synchronize();
  }
  return bench.bad;
}

}  // namespace

int main(int argc, char** argv) {
  long mib = 512, sms = 0;
  std::string only;
  bool wrong = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--sms" && i + 1 < argc)
      sms = std::atol(argv[++i]);
    else if (arg == "--only" && i + 1 < argc)
      only = argv[++i];
    else if (arg[0] != '-')
      mib = std::atol(argv[i]);
    else
      wrong = true;
  }
  if (wrong || mib < 1 || mib > 16384 || sms < 0 || sms > 1024) {
    std::fprintf(stderr,
                 "usage: bench_cuda [MIB] [--sms N] [--only GROUP,...], 1 to 16384 MiB; groups: copies, rows, reduce, "
                 "tables, codec\n");
    return 2;
  }
  if (cu::driver() == nullptr) {
    std::printf("no CUDA device: %s\n", cu::why_absent().c_str());
    return 77;
  }
  return run(static_cast<size_t>(mib) << 20, static_cast<uint32_t>(sms), only) == 0 ? 0 : 1;
}
