// SPDX-License-Identifier: Apache-2.0
// Which driver calls wait for work in flight of their context, and which keep other threads' calls waiting meanwhile.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/cuda/image.h"
#include "src/base/clock.h"
#include "tests/gpu/ladder/ladder.h"

namespace moeccl::ladder {
namespace {

constexpr int64_t kBusyMs = 120;
constexpr std::chrono::milliseconds kBefore{10};

// Something that keeps a stream busy until end(), for at most kBusyMs: a kernel that spins, or a wait for a word.
class Busy {
 public:
  static Result<std::unique_ptr<Busy>> on(const Device& device, bool kernel) {
    std::unique_ptr<Busy> b(new Busy(device));
    MOECCL_ASSIGN_OR_RETURN(b->stream_, device.stream());
    MOECCL_ASSIGN_OR_RETURN(b->words_, device.pinned(64));
    if (kernel) {
      MOECCL_ASSIGN_OR_RETURN(b->kernel_, device.kernel("moeccl_ladder_spin"));
    }
    return b;
  }
  ~Busy() { (void)end(); }

  Status start() {
    write_word(started(), 0);
    write_word(stop(), 0);
    if (kernel_ == nullptr) {
      const auto word = reinterpret_cast<cu::Pointer>(stop());
      MOECCL_TRY(cu::check(device_.d().cuStreamWaitValue64_v2(stream_, word, 1, 0), "a stream that waits"));
      timer_ = std::jthread([this](const std::stop_token& ended) {
        for (int64_t ms = 0; ms < kBusyMs && !ended.stop_requested(); ++ms)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        write_word(stop(), 1);
      });
      return {};
    }
    MOECCL_TRY(device_.launch(kernel_, stream_, SpinArgs{started(), stop(), kBusyMs * 1'000'000}));
    for (const int64_t until = now_ns() + int64_t{1'000'000'000} * patience(); read_word(started()) == 0;) {
      if (now_ns() > until) return error(moecclSystemError, "a kernel has not started after {} s", patience());
    }
    return {};
  }
  cu::Stream stream() const { return stream_; }
  Status end() {
    write_word(stop(), 1);
    timer_ = {};
    return cu::check(device_.d().cuStreamSynchronize(stream_), "the busy stream");
  }

 private:
  explicit Busy(const Device& device) : device_(device) {}
  uint64_t* started() const { return words(words_); }
  uint64_t* stop() const { return words(words_) + 1; }
  const Device& device_;
  cu::Stream stream_ = nullptr;
  cu::Memory words_;
  cu::Function kernel_ = nullptr;
  std::jthread timer_;
};

struct Call {
  const char* name;
  std::function<int()> make;
};

// What the calls work on. Functions that only some drivers have are left out where they are missing.
class Calls {
 public:
  static Result<std::unique_ptr<Calls>> on(const Device& device, cu::Stream busy) {
    std::unique_ptr<Calls> c(new Calls(device, busy));
    MOECCL_ASSIGN_OR_RETURN(c->other_, device.stream());
    MOECCL_ASSIGN_OR_RETURN(c->word_, device.pinned(64));
    MOECCL_ASSIGN_OR_RETURN(c->room_, device.memory(kCopied));
    MOECCL_ASSIGN_OR_RETURN(c->stores_, device.kernel("moeccl_ladder_stores"));
    MOECCL_TRY(cu::check(device.d().cuEventCreate(&c->driven_, 2), "an event"));
    MOECCL_TRY(c->make_graph());
    MOECCL_TRY(c->open_library());
    MOECCL_TRY(c->make_object());
    return c;
  }
  cu::Stream other() const { return other_; }
  uint64_t* word() const { return words(word_); }
  int launch(cu::Function f, cu::Stream stream) const {
    TouchArgs args{words(word_) + 1, 0, words(word_) + 2};
    void* parameters[] = {&args};
    return device_.d().cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr);
  }
  int launch() const { return launch(stores_, other_); }
  int launch_on(cu::Stream stream) const { return launch(stores_, stream); }
  std::vector<Call> of_a_driver(cu::Stream third) {
    const cu::Driver& d = device_.d();
    const auto word = reinterpret_cast<cu::Pointer>(words(word_) + 3);
    const auto room = reinterpret_cast<cu::Pointer>(room_.data());
    return {{"store", [=, &d] { return d.cuStreamWriteValue64_v2(third, word, 1, 0); }},
            {"copy", [=, &d] { return d.cuMemcpyAsync(room, room + (1 << 20), 4096, third); }},
            {"record", [=, this, &d] { return d.cuEventRecord(driven_, third); }},
            {"launch", [=, this] { return launch(stores_, third); }}};
  }
  std::vector<Call> all() {
    const cu::Driver& d = device_.d();
    const void* image = cu::emulated() || moeccl::cuda::images().empty() ? nullptr : moeccl::cuda::images()[0].begin;
    constexpr unsigned kNonBlocking = 1, kNoTiming = 2;
    const auto room = reinterpret_cast<cu::Pointer>(room_.data());
    std::vector<Call> calls = {
        {"MemAlloc", [&] { return d.cuMemAlloc_v2(&memory_, 1 << 20); }},
        {"MemFree", [&] { return d.cuMemFree_v2(memory_); }},
        {"HostAlloc", [&] { return d.cuMemHostAlloc(&host_, 1 << 16, 3); }},
        {"FreeHost", [&] { return d.cuMemFreeHost(host_); }},
        {"HostRegister", [&] { return d.cuMemHostRegister_v2(aligned(), 4096, 3); }},
        {"HostUnregister", [&] { return d.cuMemHostUnregister(aligned()); }},
        {"ModuleLoad", [&, image] { return d.cuModuleLoadDataEx(&module_, image, 0, nullptr, nullptr); }},
        {"ModuleUnload", [&] { return d.cuModuleUnload(module_); }},
        {"StreamCreate", [&] { return d.cuStreamCreate(&fresh_, kNonBlocking); }},
        {"StreamDestroy", [&] { return d.cuStreamDestroy_v2(fresh_); }},
        {"EventCreate", [&] { return d.cuEventCreate(&event_, kNoTiming); }},
        {"EventRecord", [&] { return d.cuEventRecord(event_, other_); }},
        {"EventDestroy", [&] { return d.cuEventDestroy_v2(event_); }},
        {"Launch", [&] { return launch(); }},
        {"Upload64K", [&, room] { return d.cuMemcpyHtoDAsync_v2(room, pageable_.data(), 1 << 16, other_); }},
        {"Upload4M", [&, room] { return d.cuMemcpyHtoDAsync_v2(room, pageable_.data(), kCopied, other_); }},
        {"Download4M", [&, room] { return d.cuMemcpyDtoHAsync_v2(pageable_.data(), room, kCopied, other_); }},
        // On the busy stream itself, as a program does that reads an operation's result.
        {"SynchronizeBusy", [&] { return d.cuStreamSynchronize(busy_); }},
        {"Download4KBusy", [&, room] { return d.cuMemcpyDtoHAsync_v2(pageable_.data(), room, 4096, busy_); }},
        {"Download4MBusy", [&, room] { return d.cuMemcpyDtoHAsync_v2(pageable_.data(), room, kCopied, busy_); }},
        {"Upload4MBusy", [&, room] { return d.cuMemcpyHtoDAsync_v2(room, pageable_.data(), kCopied, busy_); }},
    };
    if (pool_alloc_ != nullptr) {
      calls.push_back({"AllocAsync", [&] { return pool_alloc_(&memory_, size_t{1} << 28, other_); }});
      calls.push_back({"FreeAsync", [&] { return pool_free_(memory_, other_); }});
    }
    if (object_ != 0) {  // memory that processes share; the release, which comes last, gives it back
      calls.push_back({"MemMap", [&] { return map_(range_, object_bytes_, 0, object_, 0); }});
      calls.push_back({"MemSetAccess", [&] { return set_access_(range_, object_bytes_, &access_, 1); }});
      calls.push_back({"MemUnmap", [&] { return unmap_(range_, object_bytes_); }});
      calls.push_back({"MemRelease", [&] { return release_(object_); }});
    }
    if (graph_ != nullptr) {
      calls.push_back({"GraphInstantiate", [&] { return instantiate_(&instance_, graph_, 0); }});
      calls.push_back({"GraphLaunchFirst", [&] { return launch_graph_(instance_, other_); }});
      calls.push_back({"GraphLaunch", [&] { return launch_graph_(instance_, other_); }});
    }
    if (lazy_ != nullptr) {  // as the CUDA runtime does, which loads a kernel when a program first launches it
      calls.push_back({"LaunchFirst", [&] { return launch(lazy_, other_); }});
      calls.push_back({"LaunchSecond", [&] { return launch(lazy_, other_); }});
    }
    return calls;
  }

 private:
  static constexpr size_t kCopied = 4 << 20;
  Calls(const Device& device, cu::Stream busy) : device_(device), busy_(busy), pageable_(kCopied) {}
  void* aligned() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(page_) + 4095) / 4096 * 4096); }

  Status make_graph() {
    auto* const begin = symbol<int(cu::Stream, int)>("cuStreamBeginCapture_v2");
    auto* const end = symbol<int(cu::Stream, void**)>("cuStreamEndCapture");
    if (begin == nullptr || end == nullptr || instantiate_ == nullptr || launch_graph_ == nullptr) return {};
    MOECCL_TRY(cu::check(begin(other_, 2), "a capture"));
    MOECCL_TRY(cu::check(launch(), "a captured launch"));
    return cu::check(end(other_, &graph_), "a capture");
  }
  Status open_library() {
    using Load = int(void**, const void*, const int*, void**, unsigned, const int*, void**, unsigned);
    auto* const load = symbol<Load>("cuLibraryLoadData");
    auto* const kernel = symbol<int(cu::Function*, void*, const char*)>("cuLibraryGetKernel");
    const std::vector<moeccl::cuda::Image> images = moeccl::cuda::ladder_images();
    if (cu::emulated() || load == nullptr || kernel == nullptr || images.empty()) return {};
    void* library = nullptr;
    MOECCL_TRY(cu::check(load(&library, images[0].begin, nullptr, nullptr, 0, nullptr, nullptr, 0), "a library"));
    return cu::check(kernel(&lazy_, library, "moeccl_ladder_loads"), "a kernel of a library");
  }

  Status make_object() {
    auto* const granularity = symbol<int(size_t*, const void*, int)>("cuMemGetAllocationGranularity");
    auto* const create = symbol<int(uint64_t*, size_t, const void*, unsigned long long)>("cuMemCreate");
    auto* const reserve =
        symbol<int(cu::Pointer*, size_t, size_t, cu::Pointer, unsigned long long)>("cuMemAddressReserve");
    if (granularity == nullptr || create == nullptr || reserve == nullptr || map_ == nullptr ||
        set_access_ == nullptr || unmap_ == nullptr || release_ == nullptr)
      return {};
    // Pinned memory of the first device, with a descriptor, as src/driver/cuda/vmm.cc makes it.
    struct {
      int type = 1, handles = 1, location = 1, device = 0;
      void* windows = nullptr;
      uint64_t flags = 0;
    } properties;
    MOECCL_TRY(cu::check(device_.d().cuCtxGetDevice(&properties.device), "the device"));
    access_.device = properties.device;
    MOECCL_TRY(cu::check(granularity(&object_bytes_, &properties, 0), "the granularity of device memory"));
    object_bytes_ *= 8;
    MOECCL_TRY(cu::check(reserve(&range_, object_bytes_, 0, 0, 0), "device addresses"));
    // Without descriptors (some containers and MIG devices), these calls are left out.
    if (create(&object_, object_bytes_, &properties, 0) != 0) object_ = 0;
    return {};
  }

  const Device& device_;
  cu::Stream busy_, other_ = nullptr, fresh_ = nullptr;
  cu::Memory word_, room_;
  cu::Function stores_ = nullptr, lazy_ = nullptr;
  std::vector<char> pageable_;
  cu::Pointer memory_ = 0;
  void *host_ = nullptr, *graph_ = nullptr, *instance_ = nullptr;
  cu::Module module_ = nullptr;
  cu::Event event_ = nullptr, driven_ = nullptr;
  char page_[8192] = {};
  cu::Pointer range_ = 0;
  uint64_t object_ = 0;
  size_t object_bytes_ = 0;
  struct {
    int location = 1, device = 0, flags = 3;  // read and write
  } access_;
  int (*map_)(cu::Pointer, size_t, size_t, uint64_t,
              unsigned long long) = symbol<int(cu::Pointer, size_t, size_t, uint64_t, unsigned long long)>("cuMemMap");
  int (*set_access_)(cu::Pointer, size_t, const void*,
                     size_t) = symbol<int(cu::Pointer, size_t, const void*, size_t)>("cuMemSetAccess");
  int (*unmap_)(cu::Pointer, size_t) = symbol<int(cu::Pointer, size_t)>("cuMemUnmap");
  int (*release_)(uint64_t) = symbol<int(uint64_t)>("cuMemRelease");
  int (*pool_alloc_)(cu::Pointer*, size_t,
                     cu::Stream) = symbol<int(cu::Pointer*, size_t, cu::Stream)>("cuMemAllocAsync");
  int (*pool_free_)(cu::Pointer, cu::Stream) = symbol<int(cu::Pointer, cu::Stream)>("cuMemFreeAsync");
  int (*instantiate_)(void**, void*, unsigned long long) =
      symbol<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags");
  int (*launch_graph_)(void*, cu::Stream) = symbol<int(void*, cu::Stream)>("cuGraphLaunch");
};

// Reports findings without judging them; docs/cuda.md says what the library expects.
Result<std::string> calls_beside(bool kernel) {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  MOECCL_ASSIGN_OR_RETURN(const auto busy, Busy::on(device, kernel));
  MOECCL_ASSIGN_OR_RETURN(const auto calls, Calls::on(device, busy->stream()));
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream third, device.stream());
  std::string waiting, locking, refused;
  for (const Call& call : calls->all()) {
    MOECCL_TRY(busy->start());
    // What a thread does that drives an operation in flight. It has to get through while the call waits.
    double longest_ms = 0;
    std::string longest;
    std::thread driving([&] {
      (void)device.d().cuCtxSetCurrent(device.context());
      std::this_thread::sleep_for(kBefore);
      for (const Call& c : calls->of_a_driver(third)) {
        const int64_t since = now_ns();
        (void)c.make();
        const double ms = milliseconds_of(now_ns() - since);
        if (ms > longest_ms) longest_ms = ms, longest = c.name;
      }
    });
    const int64_t since = now_ns();
    const int result = call.make();
    const double ms = milliseconds_of(now_ns() - since);
    driving.join();
    MOECCL_TRY(busy->end());
    MOECCL_TRY(cu::check(device.d().cuStreamSynchronize(calls->other()), call.name));
    std::fprintf(stderr, "%-16s %8.2f ms, result %d; on another thread %s takes %8.2f ms\n", call.name, ms, result,
                 longest.c_str(), longest_ms);
    if (result != 0) refused += format(" {} ({})", call.name, result);
    if (ms > kBusyMs * 0.6) waiting += format(" {}", call.name);
    if (longest_ms > kBusyMs * 0.6) locking += format(" {} ({})", call.name, longest);
  }
  if (!refused.empty()) return error(moecclSystemError, "refused:{}", refused);
  if (waiting.empty()) return std::string("none waits for the ") + (kernel ? "kernel" : "stream");
  return format("these wait for the {}:{}; beside these no other thread's call returns:{}",
                kernel ? "kernel" : "stream", waiting, locking.empty() ? " none" : locking);
}

// Launches on a stream that waits until a launch does not return, and asks whether another thread's launch, on another
// stream, returns meanwhile. If it did not, a rank that has launched so much would keep the ranks on its device, for
// which it waits, from launching anything.
Result<std::string> launches_behind_a_wait() {
  constexpr int kMost = 2048, kStuckMs = 100, kReleaseMs = 2000;
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream busy, device.stream());
  MOECCL_ASSIGN_OR_RETURN(const auto calls, Calls::on(device, busy));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory go, device.pinned(64));
  MOECCL_TRY(cu::check(calls->launch(), "a launch"));  // loads the kernel
  MOECCL_TRY(cu::check(device.d().cuStreamSynchronize(calls->other()), "a launch"));
  write_word(words(go), 0);
  MOECCL_TRY(cu::check(device.d().cuStreamWaitValue64_v2(busy, reinterpret_cast<cu::Pointer>(words(go)), 1, 0),
                       "a stream that waits"));
  std::atomic<int> n = 0, refused = 0;
  std::thread launching([&] {
    (void)device.d().cuCtxSetCurrent(device.context());
    while (n < kMost && refused == 0) {
      refused = calls->launch_on(busy);
      ++n;
    }
  });
  std::jthread timer([&](const std::stop_token& ended) {
    for (int ms = 0; ms < kReleaseMs * patience() && !ended.stop_requested(); ++ms)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    write_word(words(go), 1);
  });
  const auto stands = [&] {
    const int before = n;
    std::this_thread::sleep_for(std::chrono::milliseconds(kStuckMs * patience()));
    return n == before;
  };
  while (!stands()) {
  }
  const int behind = n;
  const int64_t since = now_ns();
  const int result = calls->launch();
  const double ms = milliseconds_of(now_ns() - since);
  timer = {};
  launching.join();
  MOECCL_TRY(cu::check(device.d().cuStreamSynchronize(busy), "the stream that waited"));
  MOECCL_TRY(cu::check(refused, "a launch behind a wait"));
  MOECCL_TRY(cu::check(result, "a launch beside it"));
  return format("{} launches return behind a wait{}; another thread's launch then takes {:.1f} ms", behind,
                behind == kMost ? ", and perhaps more" : "", ms);
}

}  // namespace

Result<std::string> launch_queue() { return launches_behind_a_wait(); }
Result<std::string> calls_beside_a_kernel() { return calls_beside(true); }
Result<std::string> calls_beside_a_stream() { return calls_beside(false); }

}  // namespace moeccl::ladder
