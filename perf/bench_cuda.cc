// Times the device kernels against the driver's own device-to-device copy, in one run, after checking each result:
//   bench_cuda [MIB]      MiB of each buffer (512)
// Bytes are read plus written. Without a GPU it says so and exits 77; with the emulated driver it checks and times
// nothing worth reading.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/cuda/args.h"
#include "src/base/clock.h"
#include "src/exec/cuda/stream_engine.h"

using namespace moeccl;
namespace cu = moeccl::driver::cuda;

namespace {

struct Bench {
  std::unique_ptr<exec::StreamEngine> engine;
  double copy_rate = 0;
  int bad = 0;

  // Median of 9 of `fn`, in ns.
  double time(const std::function<void()>& fn) {
    std::vector<double> ns;
    fn();
    (void)engine->synchronize();
    for (int i = 0; i < 9; ++i) {
      const int64_t start = now_ns();
      for (int k = 0; k < 5; ++k) fn();
      (void)engine->synchronize();
      ns.push_back(static_cast<double>(now_ns() - start) / 5);
    }
    std::sort(ns.begin(), ns.end());
    return ns[ns.size() / 2];
  }
  void report(const char* name, double bytes, double ns, bool right) {
    const double rate = bytes / ns;
    if (copy_rate == 0) copy_rate = rate;
    std::printf("%-28s %10.1f us %9.1f GB/s %6.1f %% of the copy rate  %s\n", name, ns / 1e3, rate,
                100 * rate / copy_rate, right && engine->status().ok() ? "right" : "WRONG");
    bad += !right || !engine->status().ok();
  }
};

std::vector<unsigned char> fetch(exec::StreamEngine& engine, const void* p, size_t bytes) {
  std::vector<unsigned char> out(bytes);
  (void)cu::driver()->cuMemcpyDtoHAsync_v2(out.data(), reinterpret_cast<cu::Pointer>(p), bytes, engine.stream());
  (void)engine.synchronize();
  return out;
}

int run(size_t bytes) {
  cu::Context context = nullptr;
  if (cu::driver()->cuDevicePrimaryCtxRetain(&context, 0) != 0) return 1;
  const cu::Current current(context);
  int sms = 1;
  (void)cu::driver()->cuDeviceGetAttribute(&sms, cu::kMultiprocessors, 0);
  auto engine = exec::StreamEngine::create(context, static_cast<uint32_t>(sms));
  auto a = cu::Memory::device(context, bytes), b = cu::Memory::device(context, bytes);
  if (!engine.ok() || !a.ok() || !b.ok()) {
    std::fprintf(stderr, "%s\n",
                 (!engine.ok() ? engine.status()
                  : !a.ok()    ? a.status()
                               : b.status())
                     .message()
                     .c_str());
    return 1;
  }
  Bench bench{std::move(*engine)};
  exec::StreamEngine& e = *bench.engine;
  const exec::StreamEngine::Scope scope(e);
  constexpr size_t kRow = 7168 * 2, kTop = 8;
  const size_t rows = bytes / kRow;
  std::vector<unsigned char> host(bytes);
  for (size_t i = 0; i < bytes; i += 2) {  // bf16 1.0 to 1.99: sums stay finite
    host[i] = static_cast<unsigned char>(i / 2 * 37 % 128);
    host[i + 1] = 0x3f;
    host[i] |= 0x80;
  }
  (void)cu::driver()->cuMemcpyHtoDAsync_v2(reinterpret_cast<cu::Pointer>(a->data()), host.data(), bytes, e.stream());
  const auto same = [&] { return fetch(e, b->data(), bytes) == host; };
  const auto moved = static_cast<double>(2 * bytes);

  double ns = bench.time([&] {
    (void)cu::driver()->cuMemcpyAsync(reinterpret_cast<cu::Pointer>(b->data()),
                                      reinterpret_cast<cu::Pointer>(a->data()), bytes, e.stream());
  });
  bench.report("driver's copy", moved, ns, same());
  for (const char* kernel : {"moeccl_copy", "moeccl_copy_bulk"}) {
    (void)cu::driver()->cuMemsetD8Async(reinterpret_cast<cu::Pointer>(b->data()), 0, bytes, e.stream());
    const cuda::CopyArgs args{b->data(), a->data(), bytes};
    ns = bench.time([&] { e.launch(kernel, &args, 2 * bytes); });
    bench.report(kernel, moved, ns, same());
  }
  // A permutation of rows, as a gather and as a scatter.
  std::vector<uint32_t> order(rows);
  for (size_t i = 0; i < rows; ++i) order[i] = static_cast<uint32_t>((i * 7919) % rows);
  if (rows % 7919 == 0) std::reverse(order.begin(), order.end());
  const auto* index = static_cast<const uint32_t*>(e.upload(order.data(), rows * 4));
  const std::vector<uint32_t> kept = order;
  for (const bool gather : {true, false}) {
    const cuda::RowsKernelArgs args{
        b->data(), a->data(), gather ? nullptr : index, gather ? index : nullptr, 0, 0, rows, kRow, nullptr};
    ns = bench.time([&] { e.launch("moeccl_copy_rows", &args, 2 * rows * kRow); });
    const std::vector<unsigned char> got = fetch(e, b->data(), rows * kRow);
    bool right = true;
    for (size_t i = 0; i < rows; ++i) {
      const size_t to = gather ? i : kept[i], from = gather ? kept[i] : i;
      right = right && std::memcmp(&got[to * kRow], &host[from * kRow], kRow) == 0;
    }
    bench.report(gather ? "gather-rows 7168 bf16" : "scatter-rows 7168 bf16", static_cast<double>(2 * rows * kRow), ns,
                 right);
  }
  // Combine: each token sums eight rows.
  const size_t tokens = rows / kTop;
  std::vector<uint64_t> offsets(tokens + 1);
  std::vector<kernels::RowTerm> terms(tokens * kTop);
  std::vector<float> weights(tokens * kTop, 0.125f);
  for (size_t t = 0; t <= tokens; ++t) offsets[t] = t * kTop;
  for (size_t i = 0; i < terms.size(); ++i) terms[i].row = kept[i];
  cuda::ReduceRowsKernelArgs sum{};
  sum.dst = b->data();
  sum.offsets = static_cast<const uint64_t*>(e.upload(offsets.data(), offsets.size() * 8));
  sum.terms = static_cast<const cuda::RowTermBits*>(e.upload(terms.data(), terms.size() * sizeof(terms[0])));
  sum.weights = static_cast<const float*>(e.upload(weights.data(), weights.size() * 4));
  sum.count = tokens;
  sum.row_elements = kRow / 2;
  sum.n_bases = 1;
  sum.bases[0] = a->data();
  const size_t touched = (terms.size() + tokens) * kRow;
  ns = bench.time([&] { e.launch("moeccl_reduce_rows_9", &sum, touched); });
  std::vector<unsigned char> want(tokens * kRow);
  const void* base = host.data();
  kernels::ReduceRowsArgs reference;
  reference.dst = want.data();
  reference.bases = &base;
  reference.offsets = offsets.data();
  reference.terms = terms.data();
  reference.weights = weights.data();
  reference.count = tokens;
  reference.row_elements = kRow / 2;
  kernels::select("reference")->reduce_rows[moecclBfloat16](reference);
  bench.report("reduce-rows top-8 bf16", static_cast<double>(touched), ns, fetch(e, b->data(), want.size()) == want);
  return bench.bad;
}

}  // namespace

int main(int argc, char** argv) {
  if (cu::driver() == nullptr) {
    std::printf("no CUDA device: %s\n", cu::why_absent().c_str());
    return 77;
  }
  const long mib = argc > 1 ? std::atol(argv[1]) : 512;
  if (mib < 1 || mib > 16384) {
    std::fprintf(stderr, "usage: bench_cuda [MIB], 1 to 16384\n");
    return 2;
  }
  return run(static_cast<size_t>(mib) << 20) == 0 ? 0 : 1;
}
