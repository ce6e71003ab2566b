// SPDX-License-Identifier: Apache-2.0
#include "src/comm/cuda_stream.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "src/base/device_order.h"
#include "src/base/per_thread.h"
#include "src/driver/cuda/modules.h"
#include "src/driver/thread.h"
#include "src/exec/cuda/stream_name.h"
#include "src/exec/cuda/urgent_stream.h"

namespace moeccl::comm {

namespace cuda = driver::cuda;

namespace {

Home home_of(cuda::Context context) { return {context, cuda::number_of(context)}; }

constexpr size_t kPage = 64 << 10, kStride = 64;
// Page-locked memory for the words of many streams.
struct Page {
  cuda::Memory memory;
  size_t used = 0;
};

std::mutex& words() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// Returns a page with room for so many words more. Called under words().
Result<Page*> page_of(Home home, size_t n_words) {
  static auto* const pages = new std::map<Home, Page>;
  Page& page = (*pages)[home];
  if (page.memory.data() == nullptr || page.used + n_words * kStride > kPage) {
    MOECCL_ASSIGN_OR_RETURN(cuda::Memory memory, cuda::Memory::pinned(home.first, kPage));
    // The streams of a full page keep using it.
    if (page.memory.data() != nullptr) (void)new cuda::Memory(std::move(page.memory));
    page.memory = std::move(memory);
    page.used = 0;
  }
  return &page;
}

// Returns kStride bytes.
Result<uint64_t*> make_words(Home home) {
  const std::lock_guard lock(words());
  MOECCL_ASSIGN_OR_RETURN(Page * page, page_of(home, 1));
  auto* made = reinterpret_cast<uint64_t*>(page->memory.data() + page->used);
  page->used += kStride;
  return made;
}

// The streams of each context that may still wait on the device, and how much of their work has run when they do not.
struct AllWaiting {
  std::mutex mutex;
  std::map<Home, std::map<CudaStream*, uint64_t>> of;
};
AllWaiting& all_waiting() {
  static auto* const all = new AllWaiting;
  return *all;
}

using Streams = std::multimap<Home, std::unique_ptr<CudaStream>>;

// The objects that threads had for CU_STREAM_PER_THREAD when they ended. Their proxies may still work, so they wait
// here for another thread. Their number is at most the number of such streams that were in use at once.
struct Left {
  std::mutex mutex;
  Streams streams;
};
Left& left() {
  static auto* const all = new Left;
  return *all;
}

// A thread's objects for CU_STREAM_PER_THREAD, one for each context.
struct OfThread {
  ~OfThread() {
    if (!birth.here()) {  // another thread of the parent may have held the lock
      for (auto& [home, stream] : streams) (void)stream.release();
      return;
    }
    const std::lock_guard lock(left().mutex);
    left().streams.merge(streams);
  }
  const driver::Birth birth;
  Streams streams;
};

}  // namespace

Result<CudaStream*> CudaStream::of(cuda::Stream stream, cuda::Context wanted) {
  static std::mutex mutex;
  static auto* const streams = new std::map<std::pair<Home, cuda::Stream>, std::unique_ptr<CudaStream>>;
  cuda::Context context = wanted != nullptr ? wanted : cuda::current_context();
  const bool named = reinterpret_cast<uintptr_t>(stream) > 2;  // 1 and 2 are the default streams of every context
  if (named) MOECCL_TRY(cuda::check(cuda::driver()->cuStreamGetCtx(stream, &context), "the given CUDA stream"));
  if (context == nullptr) {
    return error(moecclInvalidUsage,
                 "a CUDA stream was given, but no CUDA context is current on this thread: call cudaSetDevice first");
  }
  if (wanted != nullptr && context != wanted) {
    return error(moecclInvalidUsage,
                 "stream belongs to another CUDA context than the communicator's: give a stream that was made on the "
                 "device that was current when the communicator was initialised");
  }
  const Home home = home_of(context);
  if (exec::is_per_thread(stream)) return of_this_thread(home);
  const std::lock_guard lock(mutex);
  std::unique_ptr<CudaStream>& slot = (*streams)[{home, stream}];
  if (slot == nullptr) slot.reset(new CudaStream(home, stream));
  return slot.get();
}

CudaStream* CudaStream::of_this_thread(Home home) {
  Streams& own = PerThread<OfThread, OfThread>::get().streams;
  if (const auto known = own.find(home); known != own.end()) return known->second.get();
  {
    const std::lock_guard lock(left().mutex);
    const auto [begin, end] = left().streams.equal_range(home);
    const auto idle =
        std::find_if(begin, end, [](const auto& s) { return s.second->ended(s.second->proxy_.count().put); });
    if (idle != end) {
      CudaStream* const found = own.insert(left().streams.extract(idle))->second.get();
      (void)found->proxy_.synchronize();  // takes a failure that no one has asked for
      return found;
    }
  }
  const cuda::Stream name = reinterpret_cast<cuda::Stream>(exec::kPerThread);
  return own.emplace(home, std::unique_ptr<CudaStream>(new CudaStream(home, name)))->second.get();
}

// Returns whether so much of the proxy's work has run. The stream then waits for none of it.
bool CudaStream::ended(uint64_t n_run) const { return proxy_.count().run >= n_run; }

void CudaStream::prepare(cuda::Context context) {
  constexpr size_t kStreams = 64;
  const std::lock_guard lock(words());
  (void)contained([&] { return page_of(home_of(context), kStreams).status(); });
}

Result<bool> CudaStream::capturing() const {
  const cuda::Current current(context());
  int capturing = 0;
  MOECCL_TRY(cuda::check(cuda::driver()->cuStreamIsCapturing(stream_, &capturing), "the given CUDA stream"));
  return capturing != 0;
}

Status CudaStream::ready() {
  MOECCL_ASSIGN_OR_RETURN(const bool captured, capturing());
  if (!captured) return {};
  return error(moecclUnsupported,
               "the CUDA stream is being captured into a graph, and this operation is driven by a proxy thread on the "
               "host, which a graph cannot replay: call it outside the capture (docs/cuda.md says what can be "
               "captured)");
}

Result<cuda::Event> CudaStream::take_event() {
  const std::lock_guard lock(mutex_);
  if (!free_events_.empty()) {
    cuda::Event e = free_events_.back();
    free_events_.pop_back();
    return e;
  }
  MOECCL_ASSIGN_OR_RETURN(cuda::EventOwner made, cuda::make_event());
  return made.release();  // kept for the stream's later work, as long as the process lives
}

Result<uint64_t*> CudaStream::take_word() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_words_.empty()) {
      uint64_t* const word = free_words_.back();
      free_words_.pop_back();
      return word;
    }
  }
  // Page-locking waits for the device, and so for work whose end the proxy tells under the lock.
  MOECCL_ASSIGN_OR_RETURN(uint64_t* const made, make_words(home_));
  const std::lock_guard lock(mutex_);
  for (size_t i = 1; i < kStride / sizeof(*made); ++i) free_words_.push_back(made + i);
  return made;
}

Stream::Work CudaStream::hold(std::function<Status()> work) {
  auto put = std::make_shared<CudaPut>();
  put->in_flight.emplace();
  Work held = proxy_.hold([this, put, work = std::move(work)] {
    Status status = run(*put, work);
    put->in_flight.reset();
    return status;
  });
  held.on_cuda = std::move(put);
  return held;
}

Status CudaStream::note(CudaPut& put) {
  MOECCL_ASSIGN_OR_RETURN(put.word, take_word());
  MOECCL_ASSIGN_OR_RETURN(put.ready, take_event());
  return cuda::check(cuda::driver()->cuEventRecord(put.ready, stream_), "the given CUDA stream");
}

void CudaStream::note_earlier(Work& work) {
  const std::lock_guard in_order(enqueue_mutex_);
  const cuda::Current current(context());
  CudaPut& put = *work.on_cuda;
  put.status = contained([&] { return note(put); });
}

Status CudaStream::enqueue(Work work) {
  // Threads of several communicators may share the stream. Work must reach the proxy in the order in which the stream
  // waits for it.
  const std::lock_guard in_order(enqueue_mutex_);
  const cuda::Current current(context());
  CudaPut& put = *work.on_cuda;
  if (put.status.ok()) {
    put.status = contained([&]() -> Status {
      if (put.ready == nullptr) MOECCL_TRY(note(put));
      {
        const std::lock_guard lock(mutex_);
        put.number = ++put_;
      }
      return wait_on_device(put);
    });
  }
  // The work runs in any case, because it holds a turn of its communicators. After a failure it starts nothing and
  // tells the peers.
  Status status = put.status;
  (void)proxy_.enqueue(std::move(work));
  return status;
}

bool CudaStream::may_wait() {
  // Half of the queues remain for streams that wait for these, such as the one that uses the results.
  const size_t limit = exec::streams_that_may_wait(context()), most = limit == SIZE_MAX ? limit : limit / 2;
  AllWaiting& all = all_waiting();
  const std::lock_guard lock(all.mutex);
  std::map<CudaStream*, uint64_t>& waiting = all.of[home_];
  std::erase_if(waiting, [](const auto& w) { return w.first->ended(w.second); });
  if (!waiting.contains(this) && waiting.size() >= most) return false;
  waiting[this] = proxy_.count().put + 1;
  return true;
}

// Returns whether work that a thread still has to drive may keep the stream waiting on the device. The first launch of
// a kernel that is loaded lazily waits for all streams of the context and keeps the driving thread's calls from
// returning (decision 123), what waits in the legacy default stream holds up the program's other streams, and any
// stream that waits may hold up what another rank on the device has to do for the same work (decision 156).
bool CudaStream::bears_waits() const {
  return reinterpret_cast<uintptr_t>(stream_) != exec::kLegacyDefault && !cuda::loads_lazily() &&
         !exec::is_shared(context());
}

// Lets the stream wait on the device until the work has run. Where it must not, or too many streams wait, settle() will
// wait instead.
Status CudaStream::wait_on_device(const CudaPut& put) {
  if (!bears_waits() || !may_wait()) {
    const std::lock_guard lock(mutex_);
    unwaited_word_ = put.word;
    unwaited_ = put.number;
    return {};
  }
  constexpr unsigned kGreaterOrEqual = 0;
  return cuda::check(cuda::driver()->cuStreamWaitValue64_v2(stream_, reinterpret_cast<cuda::Pointer>(put.word),
                                                            put.number, kGreaterOrEqual),
                     "the given CUDA stream");
}

// The word is stored whatever happens. It may belong to later work by then, whose number is higher.
void CudaStream::settle() {
  const uint64_t* word = nullptr;
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    word = unwaited_word_;  // it stays, because threads that share the stream may be here together
    number = unwaited_;
  }
  if (word == nullptr) return;
  while (load_from_device(std::atomic_ref(const_cast<uint64_t&>(*word))) < number) driver::sleep_ns(20'000);
}

// When this returns, the stream waits for the work no more. Its turn has ended only then: a failure that keeps the
// device from the end of the work is found by the thread that waits here.
Status CudaStream::run(const CudaPut& put, const std::function<Status()>& work) {
  const cuda::Current current(context());
  exec::StreamWork now;
  now.ready = put.ready;
  now.put = put.status;
  bool comes_late = false;  // a store to the word
  const auto let_go = [&] { store_to_device(std::atomic_ref(*put.word), put.number); };
  if (put.number > 0) now.let_stream_go = let_go;
  now.tell = [&](Status& status) {
    // A single engine's stream stores the number itself, behind its work.
    const bool stores = put.number > 0 && status.ok() && now.engines.size() == 1;
    if (stores) now.engines[0]->write_word(put.word, put.number);
    for (exec::StreamEngine* e : now.engines) {
      Status s = e->synchronize();
      comes_late |= stores && !s.ok();
      if (status.ok()) status = std::move(s);
    }
    if (put.number > 0) let_go();
  };
  Status status = contained([&] {
    const exec::StreamWork::Scope scope(now);
    return work();
  });
  now.end(status);
  const std::lock_guard lock(mutex_);
  if (put.ready != nullptr) free_events_.push_back(put.ready);
  if (put.word != nullptr && !comes_late) free_words_.push_back(put.word);
  return status;
}

Status CudaStream::synchronize() {
  Status status = proxy_.synchronize();
  const cuda::Current current(context());
  MOECCL_TRY(std::move(status));
  return cuda::check(cuda::driver()->cuStreamSynchronize(stream_), "the given CUDA stream");
}

}  // namespace moeccl::comm
