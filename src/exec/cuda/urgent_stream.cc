// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/urgent_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/device_order.h"
#include "src/base/log.h"
#include "src/driver/fork_page.h"
#include "src/driver/thread.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;

namespace {

constexpr uint32_t kUsualQueues = 8, kMostQueues = 32;
// More than a device can have hardware queues.
constexpr size_t kMostStreams = kMostQueues + 1, kWordStride = 8;
// A store takes 4 us on an idle device, but processes that share it take turns of some milliseconds.
constexpr int64_t kLimit_ns = 300'000'000;
// The whole measurement takes little more than kLimit_ns. If it was cut short, only so many streams may wait.
constexpr int64_t kMost_ns = 5'000'000'000;
constexpr size_t kLeastKnown = 2;

// Streams of ordinary priority that wait for the host, as callers' streams wait for an operation to end. All are made
// before the first waits: a driver may hold up cuStreamCreate while streams wait. For the same reason a thread lets
// them go after kMost_ns whatever the measuring thread is doing: another thread of the program may be creating a
// stream, and hold a lock of the driver that the measuring thread needs.
class Waiting {
 public:
  explicit Waiting(uint64_t* go) : go_(go) {}
  ~Waiting() {
    let_go();
    if (timer_.joinable()) timer_.join();
  }
  Status create() {
    streams_.reserve(kMostStreams);
    for (size_t i = 0; i < kMostStreams; ++i) {
      MOECCL_ASSIGN_OR_RETURN(cuda::StreamOwner stream, cuda::make_stream());
      streams_.push_back(std::move(stream));
    }
    MOECCL_ASSIGN_OR_RETURN(timer_, driver::start_thread("moeccl-try", [this] {
                              {
                                std::unique_lock lock(mutex_);
                                (void)over_.wait_for(lock, std::chrono::nanoseconds(kMost_ns), [&] { return gone_; });
                              }
                              (void)let_go();
                            }));
    return {};
  }
  Status add() {
    constexpr unsigned kGreaterOrEqual = 0;
    const auto word = reinterpret_cast<cuda::Pointer>(go_);
    return cuda::check(cuda::driver()->cuStreamWaitValue64_v2(streams_[n_waiting_++].get(), word, 1, kGreaterOrEqual),
                       "a stream that waits");
  }
  // Returns false if the streams were let go before.
  bool let_go() {
    const std::lock_guard lock(mutex_);
    const bool first = !std::exchange(gone_, true);
    store_to_device(std::atomic_ref(*go_), 1);
    over_.notify_all();
    return first;
  }

 private:
  uint64_t* go_;
  std::vector<cuda::StreamOwner> streams_;
  size_t n_waiting_ = 0;
  std::mutex mutex_;
  std::condition_variable over_;
  bool gone_ = false;
  std::thread timer_;
};

// Lets streams wait, one after the other, until a store by the urgent stream does not come.
Result<size_t> try_how_many(cuda::Context context, cuda::Stream urgent) {
  MOECCL_ASSIGN_OR_RETURN(const cuda::Memory words, cuda::Memory::pinned(context, 2 * kWordStride * sizeof(uint64_t)));
  auto* const go = reinterpret_cast<uint64_t*>(words.data());
  uint64_t* const came = go + kWordStride;
  size_t n = 0;
  bool whole = true;
  {
    Waiting waiting(go);
    MOECCL_TRY(waiting.create());
    for (bool comes = true; comes && n < kMostStreams; n += comes) {
      MOECCL_TRY(waiting.add());
      MOECCL_TRY(
          cuda::check(cuda::driver()->cuStreamWriteValue64_v2(urgent, reinterpret_cast<cuda::Pointer>(came), n + 1, 0),
                      "a store by the urgent stream"));
      const int64_t until = now_ns() + kLimit_ns;
      while ((comes = load_from_device(std::atomic_ref(*came)) == n + 1) == false && now_ns() < until)
        driver::sleep_ns(20'000);
    }
    whole = waiting.let_go();
  }
  // The last store comes when the streams no longer wait. The words must outlive it.
  MOECCL_TRY(cuda::synchronize(urgent, "the urgent stream"));
  if (!whole) n = std::min(n, kLeastKnown);
  log(LogLevel::kInfo, "{} CUDA streams may wait at once before they hold up the library's own{}",
      n < kMostStreams ? std::to_string(n) : "any number of", whole ? "" : ", as far as could be tried");
  return n < kMostStreams ? n : SIZE_MAX;
}

// How many streams of a context may wait. `trying` is held while that is tried.
struct Tried {
  std::mutex trying;
  bool known = false;               // under `trying`
  std::atomic<size_t> result{0};    // 0 as long as it is not known
  std::atomic<bool> shared{false};  // by several ranks of this process
};
struct AllTried {
  std::mutex mutex;  // never held during a call of the driver
  std::map<cuda::Context, Tried> of;
};

Tried& tried(cuda::Context context) {
  static constinit driver::PerProcess<AllTried> own;
  AllTried& all = own.get();
  const std::lock_guard lock(all.mutex);
  return all.of[context];
}

}  // namespace

uint32_t hardware_queues() {
  const char* set = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int n = set != nullptr ? std::atoi(set) : static_cast<int>(kUsualQueues);
  return static_cast<uint32_t>(std::clamp(n, 1, static_cast<int>(kMostQueues)));
}

std::string held_up() {
  if (hardware_queues() == kMostQueues)
    return "let fewer CUDA streams have work at a time, because one that waits holds up others in its hardware queue";
  return "set CUDA_DEVICE_MAX_CONNECTIONS=32 for more hardware queues, because a CUDA stream that waits holds up "
         "others in its queue";
}

Result<cuda::StreamOwner> create_urgent_stream(cuda::Context context) {
  const cuda::Current current(context);
  Tried& t = tried(context);
  // Held until the number is known, because the driver may not return while another thread's streams wait in
  // try_how_many(). Not longer: it may not return while many of the program's streams wait, either.
  std::unique_lock trying(t.trying);
  if (t.known) trying.unlock();
  MOECCL_ASSIGN_OR_RETURN(cuda::StreamOwner stream, cuda::make_first_stream());
  if (!trying.owns_lock()) return stream;
  MOECCL_ASSIGN_OR_RETURN(const size_t n, try_how_many(context, stream.get()));  // after a failure the next one tries
  t.result = n;
  t.known = true;
  return stream;
}

size_t streams_that_may_wait(cuda::Context context) { return tried(context).result; }

void share_context(cuda::Context context) { tried(context).shared = true; }
bool is_shared(cuda::Context context) { return tried(context).shared; }

}  // namespace moeccl::exec
