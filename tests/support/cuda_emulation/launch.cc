// SPDX-License-Identifier: Apache-2.0
// Blocks, warps, barriers and the order of threads.
#include <time.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "tests/support/cuda_emulation/cuda_emulation.h"
#include "tests/support/cuda_emulation/fiber.h"
#include "tests/support/cuda_emulation/thread_sanitizer.h"

namespace moeccl::emulation {

constinit thread_local Place place;
std::atomic<int> releases{0}, acquires{0};

namespace {

constexpr uint32_t kWarp = 32;

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

}  // namespace

Registration::Registration(const char* name, size_t bytes, void (*run)(const void*)) {
  kernels().push_back({name, bytes, run});
}
const Kernel* find_kernel(const std::string& name) {
  for (const Kernel& k : kernels()) {
    if (name == k.name) return &k;
  }
  return nullptr;
}
size_t n_kernels() { return kernels().size(); }
const Kernel& kernel_at(size_t i) { return kernels()[i]; }

// A barrier of the threads that have not ended. Two alternating sets of values suffice, because no thread can be two
// rounds ahead.
struct Meeting {
  uint32_t arrived = 0, round = 0, members = 0;
  std::source_location place;  // of the block's barriers: the source location of the round's first thread
  uint64_t value[2][kWarp] = {};
};

struct Block {
  const Kernel* kernel = nullptr;
  const void* args = nullptr;
  struct Thread {
    Fiber fiber;
    std::optional<tsan::Thread> apart;  // the sanitizer's thread for this one; else Block::together
    Place place;
    const uint32_t* waits_for = nullptr;  // the thread continues when this is no longer `round`
    uint32_t round = 0;
    bool paused = false;
    const char* what = "";
  };
  std::vector<std::unique_ptr<Thread>> threads;  // kept between launches
  std::optional<tsan::Thread> together;          // for all threads, where the thread sanitizer does not tell them apart
  Meeting all;
  std::vector<Meeting> warps;
  uint32_t n_threads = 0;
  bool abandoned = false;  // by a thread that does not return
  bool apart = false;
  char began = 0, ended = 0;  // addresses by which the thread sanitizer orders the work before and after the block

  void run(const Kernel& kernel_to_run, const void* its_args, uint32_t block, const Launch& how);
  [[noreturn]] void deadlock() const;
  void check_place(const std::source_location& at);
  void wait(Meeting& meeting, const char* what);
  // Waits, too, and orders what threads did before it before what they do after it.
  void synchronize(Meeting& meeting, const char* what);
  void* sanitizers(Thread& thread) { return apart ? thread.apart->get() : together->get(); }
  void leave(Meeting& meeting) {
    --meeting.members;
    if (meeting.members > 0 && meeting.arrived == meeting.members) {
      meeting.arrived = 0;
      ++meeting.round;
    }
  }
};

void Block::deadlock() const {
  std::fprintf(stderr, "emulated kernel %s: a block waits for ever:", kernel->name);
  for (uint32_t t = 0; t < n_threads && t < 300; ++t) {
    const Thread& th = *threads[t];
    std::fprintf(stderr, " %u:%s", t, th.fiber.running() ? th.what : "ended");
  }
  std::fprintf(stderr, "\n");
  std::abort();
}

// On a GPU, both would count as one barrier, and threads would continue before the others have written their data.
void Block::check_place(const std::source_location& at) {
  if (all.arrived == 0) all.place = at;
  if (all.place.line() == at.line() &&
      (all.place.file_name() == at.file_name() || std::strcmp(all.place.file_name(), at.file_name()) == 0))
    return;
  std::fprintf(stderr, "emulated kernel %s: threads of a block stand at different barriers: %s:%u and %s:%u\n",
               kernel->name, all.place.file_name(), all.place.line(), at.file_name(), at.line());
  std::abort();
}

void Block::wait(Meeting& meeting, const char* what) {
  Thread& self = *threads[place.thread];
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  self.waits_for = &meeting.round;
  self.round = meeting.round;
  self.what = what;
  self.fiber.yield();
  self.waits_for = nullptr;
}

void Block::synchronize(Meeting& meeting, const char* what) {
  // Alternates like the values, because no thread can be two rounds ahead.
  void* const round = meeting.value[meeting.round % 2];
  if (apart) tsan::release(round);
  wait(meeting, what);
  if (apart) tsan::acquire(round);
}

static thread_local Block::Thread* running = nullptr;

bool in_kernel() { return running != nullptr; }

void abandon() {
  place.owner->abandoned = true;
  running->fiber.yield();
}

void Block::run(const Kernel& kernel_to_run, const void* its_args, uint32_t block, const Launch& how) {
  kernel = &kernel_to_run;
  args = its_args;
  n_threads = how.threads;
  apart = tsan::kOn && how.threads_apart;
  while (threads.size() < n_threads) threads.push_back(std::make_unique<Thread>());
  if (!together) together.emplace();
  all = {};
  all.members = n_threads;
  warps.assign((n_threads + kWarp - 1) / kWarp, {});
  for (uint32_t t = 0; t < n_threads; ++t) {
    ++warps[t / kWarp].members;
    Thread& th = *threads[t];
    th.place = {t, block, n_threads, how.blocks, this};
    th.waits_for = nullptr;
    if (apart && !th.apart) th.apart.emplace();
    th.fiber.start(
        [](void* p) {
          auto* b = static_cast<Block*>(p);
          tsan::acquire(&b->began);
          b->kernel->run(b->args);
          tsan::release(&b->ended);
          b->leave(b->all);
          b->leave(b->warps[place.thread / kWarp]);
        },
        this);
  }
  tsan::release(&began);
  // The order of threads changes with the seed and reverses every second round.
  uint64_t turn = how.seed * 0x9e3779b97f4a7c15ull >> 32;
  uint32_t idle = 0;
  for (uint32_t left = n_threads; left > 0; turn = turn * 2862933555777941757ull + 3037000493ull) {
    if (abandoned || (how.failed != nullptr && how.failed->load(std::memory_order_relaxed) != 0)) {
      threads.clear();  // stacks that no thread returns to
      together.reset();
      abandoned = false;
      break;
    }
    bool moved = false, paused = false;
    const auto first = static_cast<uint32_t>((turn >> 33) % n_threads);
    for (uint32_t i = 0; i < n_threads; ++i) {
      const uint32_t t = ((turn & 1) != 0 ? i + first : 2 * n_threads - 1 - i + first) % n_threads;
      Thread& th = *threads[t];
      if (!th.fiber.running() || (th.waits_for != nullptr && *th.waits_for == th.round)) continue;
      th.paused = false;
      place = th.place;
      running = &th;
      th.fiber.resume(sanitizers(th));
      running = nullptr;
      if (abandoned) break;
      if (th.paused) {
        paused = true;
        continue;
      }
      moved = true;
      left -= th.fiber.running() ? 0 : 1;
    }
    if (!moved && !paused && !abandoned) deadlock();
    // The block waits for something outside. Blocks that only yield keep threads off their core for seconds on some
    // kernels (decision 137).
    idle = moved ? 0 : idle + 1;
    if (idle > 16)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    else if (idle > 0)
      std::this_thread::yield();
  }
  tsan::acquire(&ended);
}

void block_sync(const std::source_location& at) {
  place.owner->check_place(at);
  place.owner->synchronize(place.owner->all, "block barrier");
}

void warp_sync() { place.owner->synchronize(place.owner->warps[place.thread / kWarp], "warp barrier"); }

uint64_t exchange(uint64_t value, uint32_t lane) {
  Block& b = *place.owner;
  Meeting& m = b.warps[place.thread / kWarp];
  const uint32_t set = m.round % 2;
  m.value[set][place.thread % kWarp] = value;
  b.wait(m, "warp");
  return m.value[set][lane % kWarp];
}

// Returns the lanes whose value is `wanted`.
static uint32_t lanes_with(uint64_t value, uint64_t wanted) {
  Block& b = *place.owner;
  Meeting& m = b.warps[place.thread / kWarp];
  const uint32_t set = m.round % 2, members = m.members;
  m.value[set][place.thread % kWarp] = value;
  b.wait(m, "warp");
  uint32_t lanes = 0;
  for (uint32_t l = 0; l < members; ++l) lanes |= static_cast<uint32_t>(m.value[set][l] == wanted) << l;
  return lanes;
}
uint32_t vote(bool value) { return lanes_with(value, 1); }
uint32_t match(uint32_t value) { return lanes_with(value, value); }

void pause() {
  Block::Thread& self = *place.owner->threads[place.thread];
  self.paused = true;
  self.what = "pause";
  self.fiber.yield();
}

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

namespace {

// OS threads for concurrent blocks. They are kept, because their fibers are expensive to make, and end only with the
// process.
class Workers {
 public:
  void run(const std::function<void()>& job) {
    std::unique_lock lock(mutex_);
    if (idle_ == 0) {
      std::thread([this] { loop(); }).detach();
    } else {
      --idle_;
    }
    jobs_.push_back(&job);
    lock.unlock();
    wake_.notify_one();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return !jobs_.empty(); });
      const std::function<void()>* job = jobs_.back();
      jobs_.pop_back();
      lock.unlock();
      (*job)();
      lock.lock();
      ++idle_;
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<const std::function<void()>*> jobs_;
  uint32_t idle_ = 0;
};
// Made before there are threads, because the thread sanitizer does not see what orders a function's static variable
// here.
Workers& workers = *new Workers;

Block& own_block() {
  static thread_local Block block;
  return block;
}

}  // namespace

void launch(const Kernel& kernel, const void* args, const Launch& how) {
  if (!how.concurrent || how.blocks == 1) {
    for (uint32_t b = 0; b < how.blocks; ++b) own_block().run(kernel, args, b, how);
    return;
  }
  std::mutex mutex;
  std::condition_variable done;
  uint32_t left = how.blocks;
  std::vector<std::function<void()>> jobs;
  for (uint32_t b = 0; b < how.blocks; ++b) {
    jobs.emplace_back([&, b] {
      {
        const std::shared_ptr<void> held = how.on_thread ? how.on_thread() : nullptr;
        own_block().run(kernel, args, b, how);
      }
      const std::lock_guard lock(mutex);
      if (--left == 0) done.notify_one();
    });
  }
  for (const auto& job : jobs) workers.run(job);
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return left == 0; });
}

}  // namespace moeccl::emulation
