// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/idle.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "src/driver/fork_page.h"

namespace moeccl::driver::cuda {

namespace {

struct State {
  size_t in_flight = 0;
  bool calling = false;  // a thread runs `later`
  std::vector<std::function<void()>> later;
};
struct States {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Context, State> of;  // never erased, because contexts are few
};
States& states() {
  static constinit PerProcess<States> all;
  return all.get();
}

// Runs the calls that wait, as long as no operation is in flight. `lock` is held when it is called and when it returns.
void run_later(Context context, State& state, std::unique_lock<std::mutex>& lock) {
  if (state.calling || state.in_flight > 0 || state.later.empty()) return;
  const Current current(context);
  state.calling = true;
  while (!state.later.empty()) {
    std::vector<std::function<void()>> calls = std::exchange(state.later, {});
    lock.unlock();
    for (const auto& call : calls) call();
    calls.clear();  // what they hold may come here again
    lock.lock();
  }
  state.calling = false;
  states().changed.notify_all();
}

}  // namespace

InFlight::InFlight(Context context) : context_(context) {
  States& all = states();
  std::unique_lock lock(all.mutex);
  State& state = all.of[context];
  all.changed.wait(lock, [&] { return !state.calling; });
  ++state.in_flight;
}

InFlight::~InFlight() {
  States& all = states();
  std::unique_lock lock(all.mutex);
  State& state = all.of[context_];
  if (state.in_flight == 0) return;  // it began in the parent process
  if (--state.in_flight > 0) return;
  all.changed.notify_all();
  run_later(context_, state, lock);
}

void when_idle(Context context, std::function<void()> call) {
  States& all = states();
  std::unique_lock lock(all.mutex);
  State& state = all.of[context];
  state.later.push_back(std::move(call));
  run_later(context, state, lock);
}

void wait_until_idle(Context context, const std::function<void()>& call) {
  States& all = states();
  std::unique_lock lock(all.mutex);
  State& state = all.of[context];
  all.changed.wait(lock, [&] { return !state.calling && state.in_flight == 0; });
  state.later.push_back(call);
  run_later(context, state, lock);  // here and now, because nothing is in flight
}

}  // namespace moeccl::driver::cuda
