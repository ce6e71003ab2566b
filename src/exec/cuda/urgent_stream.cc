// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/urgent_stream.h"

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "src/base/clock.h"
#include "src/driver/fork_page.h"
#include "src/driver/thread.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;

namespace {

constexpr unsigned kNonBlocking = 1;
// More streams than a device has connections for its work queue (CUDA_DEVICE_MAX_CONNECTIONS: 8, at most 32), so that
// at least one shares the urgent stream's connection, if that is possible at all.
constexpr size_t kStreams = 33, kWordStride = 8;
constexpr int64_t kLimit_ns = 5'000'000'000;

// Streams of ordinary priority that wait for the host, as callers' streams wait for an operation to end.
class Waiting {
 public:
  explicit Waiting(uint64_t* go) : go_(go) {}
  ~Waiting() {
    std::atomic_ref(*go_).store(1, std::memory_order_release);
    for (const cuda::Stream s : streams_) {
      (void)cuda::driver()->cuStreamSynchronize(s);
      (void)cuda::driver()->cuStreamDestroy_v2(s);
    }
  }
  Status add() {
    cuda::Stream s = nullptr;
    MOECCL_TRY(cuda::check(cuda::driver()->cuStreamCreate(&s, kNonBlocking), "a CUDA stream"));
    streams_.push_back(s);
    constexpr unsigned kGreaterOrEqual = 0;
    const auto word = reinterpret_cast<cuda::Pointer>(go_);
    return cuda::check(cuda::driver()->cuStreamWaitValue64_v2(s, word, 1, kGreaterOrEqual), "a stream that waits");
  }

 private:
  uint64_t* go_;
  std::vector<cuda::Stream> streams_;
};

Status try_to_overtake(cuda::Context context, cuda::Stream urgent) {
  MOECCL_ASSIGN_OR_RETURN(const cuda::Memory words, cuda::Memory::pinned(context, 2 * kWordStride * sizeof(uint64_t)));
  auto* const go = reinterpret_cast<uint64_t*>(words.data());
  uint64_t* const came = go + kWordStride;
  Waiting waiting(go);
  for (size_t i = 0; i < kStreams; ++i) MOECCL_TRY(waiting.add());
  MOECCL_TRY(cuda::check(cuda::driver()->cuStreamWriteValue64_v2(urgent, reinterpret_cast<cuda::Pointer>(came), 1, 0),
                         "a store by the urgent stream"));
  const int64_t began_ns = now_ns();
  while (std::atomic_ref(*came).load(std::memory_order_acquire) == 0) {
    if (now_ns() - began_ns > kLimit_ns) {
      return error(moecclUnsupported,
                   "on this device a stream of the highest priority waits behind ordinary streams, so an operation "
                   "could wait for itself: set CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts");
    }
    driver::sleep_ns(20'000);
  }
  return {};
}

// The result for each context. The mutex is held while one is tested, because other threads need the result as well.
struct Tried {
  std::mutex mutex;
  std::map<cuda::Context, Status> result;
};

}  // namespace

Result<cuda::Stream> create_urgent_stream(cuda::Context context) {
  static constinit driver::PerProcess<Tried> tried;
  const cuda::Current current(context);
  int lowest = 0, highest = 0;
  MOECCL_TRY(cuda::check(cuda::driver()->cuCtxGetStreamPriorityRange(&lowest, &highest), "the streams' priorities"));
  cuda::Stream stream = nullptr;
  MOECCL_TRY(cuda::check(cuda::driver()->cuStreamCreateWithPriority(&stream, kNonBlocking, highest), "a CUDA stream"));
  const std::lock_guard lock(tried.get().mutex);
  auto& result = tried.get().result;
  auto it = result.find(context);
  if (it == result.end()) it = result.emplace(context, try_to_overtake(context, stream)).first;
  if (it->second.ok()) return stream;
  (void)cuda::driver()->cuStreamDestroy_v2(stream);
  return Status(it->second);
}

}  // namespace moeccl::exec
