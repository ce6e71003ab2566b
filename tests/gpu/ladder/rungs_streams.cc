// SPDX-License-Identifier: Apache-2.0
// What streams and calls wait for.
#include <algorithm>
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

using WithPriority = int(cu::Stream*, unsigned, int);
using Priorities = int(int*, int*);

// 64 user streams each wait for a word that the engine's stream stores. Counts the streams that never see it because
// both streams share a hardware queue, and how many may wait at once until no queue is left for the store.
Result<std::string> waits(bool high) {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  constexpr size_t kStreams = 64;
  const int comes_ms = 20 * patience();
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory flags, device.pinned(kStreams * 8));
  cu::Stream engine = nullptr;
  if (high) {
    auto* const create = symbol<WithPriority>("cuStreamCreateWithPriority");
    auto* const range = symbol<Priorities>("cuCtxGetStreamPriorityRange");
    if (create == nullptr || range == nullptr) return error(moecclUnsupported, "the driver has no stream priorities");
    int least = 0, greatest = 0;
    MOECCL_TRY(cu::check(range(&least, &greatest), "the priorities of streams"));
    MOECCL_TRY(cu::check(create(&engine, 1, greatest), "a stream of the highest priority"));
  } else {
    MOECCL_ASSIGN_OR_RETURN(engine, device.stream());
  }
  std::vector<cu::Stream> users(kStreams);
  for (cu::Stream& s : users) {
    MOECCL_ASSIGN_OR_RETURN(s, device.stream());
  }
  const auto store = [&](size_t i, uint64_t value) {
    return cu::check(
        device.d().cuStreamWriteValue64_v2(engine, reinterpret_cast<cu::Pointer>(words(flags) + i), value, 0),
        "a store by the engine's stream");
  };
  const auto wait = [&](size_t i, uint64_t value) {
    return cu::check(
        device.d().cuStreamWaitValue64_v2(users[i], reinterpret_cast<cu::Pointer>(words(flags) + i), value, 0),
        "a wait of a user's stream");
  };
  const auto free_all = [&](uint64_t value) {
    for (size_t i = 0; i < kStreams; ++i) write_word(words(flags) + i, value);
    (void)device.d().cuStreamSynchronize(engine);
    for (const cu::Stream s : users) (void)device.d().cuStreamSynchronize(s);
  };
  // On a busy machine a stream can be late without being held up, so the first late ones get more time.
  int grace_ms = 1500 * patience();
  const auto comes = [&](size_t i, int ms) {
    if (ends_within(device, users[i], ms)) return true;
    const int64_t since = now_ns();
    const bool late = ends_within(device, users[i], std::min(grace_ms, 400 * patience()));
    grace_ms -= static_cast<int>((now_ns() - since) / 1'000'000);
    grace_ms = std::max(grace_ms, 0);
    return late;
  };
  size_t alone = 0, most = 0;
  for (size_t i = 0; i < kStreams; ++i) {
    MOECCL_TRY(wait(i, 1));
    MOECCL_TRY(store(i, 1));
    if (comes(i, comes_ms)) continue;
    ++alone;
    std::fprintf(stderr, "stream %zu alone: its wait holds up the store\n", i);
    write_word(words(flags) + i, 1);
    (void)device.d().cuStreamSynchronize(users[i]);
    (void)device.d().cuStreamSynchronize(engine);
  }
  free_all(1);
  // One stream more waits, for the end, and a store into another word must come.
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory stored, device.pinned(8));
  const auto store_comes = [&](uint64_t value) {
    for (const int64_t until = now_ns() + int64_t{10} * comes_ms * 1'000'000; now_ns() < until;) {
      if (read_word(words(stored)) == value) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return false;
  };
  for (; most < kStreams; ++most) {
    MOECCL_TRY(wait(most, 2));
    MOECCL_TRY(
        cu::check(device.d().cuStreamWriteValue64_v2(engine, reinterpret_cast<cu::Pointer>(words(stored)), most + 1, 0),
                  "a store by the engine's stream"));
    if (!store_comes(most + 1)) break;
  }
  free_all(2);
  const std::string line = format("{} of {} waits hold up their store one at a time, {} may wait at once", alone,
                                  kStreams, most == kStreams ? "all" : std::to_string(most));
  // The library lets as many wait as it finds, and needs at least one for calls that do not block.
  if (high && most == 0) return error(moecclInternalError, "{}", line);
  return line;
}

struct Call {
  const char* name;
  std::function<int()> make;
};

}  // namespace

Result<std::string> waits_default() { return waits(false); }
Result<std::string> waits_high() { return waits(true); }

Result<std::string> calls_in_captures() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  const cu::Driver& d = device.d();
  auto* const begin = symbol<int(cu::Stream, int)>("cuStreamBeginCapture_v2");
  auto* const end = symbol<int(cu::Stream, void**)>("cuStreamEndCapture");
  auto* const destroy = symbol<int(void*)>("cuGraphDestroy");
  auto* const exchange = symbol<int(int*)>("cuThreadExchangeStreamCaptureMode");
  if (begin == nullptr || end == nullptr || destroy == nullptr)
    return error(moecclUnsupported, "the driver has no captures");
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream other, device.stream());
  cu::Event event = nullptr;
  MOECCL_TRY(cu::check(d.cuEventCreate(&event, 2), "an event"));
  MOECCL_TRY(cu::check(d.cuEventRecord(event, other), "an event"));
  MOECCL_TRY(cu::check(d.cuStreamSynchronize(other), "an event"));
  void* host = nullptr;
  const std::vector<Call> calls = {{"HostAlloc", [&] { return d.cuMemHostAlloc(&host, 4096, 3); }},
                                   {"EventQuery", [&] { return d.cuEventQuery(event); }},
                                   {"StreamSynchronize", [&] { return d.cuStreamSynchronize(other); }}};
  std::string line;
  const char* const modes[] = {"global", "thread", "relaxed"};
  for (int mode = 0; mode < 3; ++mode) {
    std::string said;
    // On the capturing thread, on another thread, and on the capturing thread after it has exchanged its mode for
    // relaxed.
    for (const int where : {0, 1, 2}) {
      if (where == 2 && exchange == nullptr) continue;
      for (const Call& call : calls) {
        MOECCL_ASSIGN_OR_RETURN(const cu::Stream captured, device.stream());
        MOECCL_TRY(cu::check(begin(captured, mode), "the beginning of a capture"));
        int result = 0;
        if (where == 1) {
          std::thread([&] {
            (void)d.cuCtxSetCurrent(device.context());  // cu::Current would allow what captures forbid
            result = call.make();
          }).join();
        } else {
          int as = 2;
          if (where == 2) (void)exchange(&as);
          result = call.make();
          if (where == 2) (void)exchange(&as);
        }
        void* graph = nullptr;
        const int ended = end(captured, &graph);
        if (graph != nullptr) (void)destroy(graph);
        if (result == 0 && host != nullptr) (void)d.cuMemFreeHost(std::exchange(host, nullptr));
        (void)d.cuStreamDestroy_v2(captured);
        const char* const places[] = {"same thread", "other thread", "exchanged"};
        std::fprintf(stderr, "%-8s %-12s %-18s result %d, the capture ends with %d\n", modes[mode], places[where],
                     call.name, result, ended);
        if (result != 0 || ended != 0)
          said += format(" {}{} {}/{}", call.name,
                         where == 0   ? ""
                         : where == 1 ? "(other)"
                                      : "(exchanged)",
                         result, ended);
      }
    }
    line += format("{}{}:{}", line.empty() ? "" : "; ", modes[mode], said.empty() ? " all allowed" : said);
  }
  return line;
}

}  // namespace moeccl::ladder
