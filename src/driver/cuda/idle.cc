// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/idle.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "src/driver/fork_page.h"

namespace moeccl::driver::cuda {

namespace {

struct Later {
  Context context;
  std::function<void()> call;
};
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  size_t in_flight = 0, replays = 0;
  bool calling = false;     // a thread runs `later`
  bool stays_busy = false;  // soon_idle() has waited in vain since it was idle last
  std::vector<Later> later;
};
State& state() {
  static constinit PerProcess<State> own;
  return own.get();
}

void run(const Later& l) {
  const Current current(l.context);
  l.call();
}

// Runs the calls that wait, if nothing is in flight. `lock` is held when it is called and when it returns.
void run_later(State& s, std::unique_lock<std::mutex>& lock) {
  if (s.calling || s.in_flight > 0 || s.replays > 0 || s.later.empty()) return;
  s.calling = true;
  while (!s.later.empty()) {
    std::vector<Later> calls = std::exchange(s.later, {});
    lock.unlock();
    for (const Later& l : calls) run(l);
    calls.clear();  // what they hold may come here again
    lock.lock();
  }
  s.calling = false;
  s.changed.notify_all();
}

// Counts what begins when no calls run.
void begin(size_t State::*count) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  s.changed.wait(lock, [&] { return !s.calling; });
  ++(s.*count);
}
void end(size_t State::*count) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (s.*count == 0) return;  // it began in the parent process
  if (--(s.*count) == 0) {
    if (s.in_flight == 0) s.stays_busy = false;
    s.changed.notify_all();
  }
  run_later(s, lock);
}

}  // namespace

InFlight::InFlight() { begin(&State::in_flight); }
InFlight::~InFlight() { end(&State::in_flight); }
Replays::Replays() { begin(&State::replays); }
Replays::~Replays() { end(&State::replays); }

void when_idle(Context context, std::function<void()> call) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  s.later.push_back({context, std::move(call)});
  run_later(s, lock);
}

void soon_idle(Context context, std::function<void()> call) {
  constexpr std::chrono::seconds kMost{1};
  State& s = state();
  std::unique_lock lock(s.mutex);
  // A graph may be replayed at any time.
  if (s.replays == 0 && !s.stays_busy && !s.changed.wait_for(lock, kMost, [&] { return s.in_flight == 0; }))
    s.stays_busy = true;
  s.later.push_back({context, std::move(call)});
  run_later(s, lock);
}

}  // namespace moeccl::driver::cuda
