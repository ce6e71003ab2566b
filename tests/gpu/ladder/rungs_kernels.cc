// SPDX-License-Identifier: Apache-2.0
// Kernels that wait, and the durations of steps that the persistent kernel repeats all the time.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "src/base/clock.h"
#include "tests/gpu/ladder/ladder.h"

namespace moeccl::ladder {
namespace {

const uint64_t most_ns = 1'000'000'000 * static_cast<uint64_t>(patience());

Status synchronize(const Device& device, cu::Stream s, const char* what) {
  return cu::check(device.d().cuStreamSynchronize(s), what);
}

// Returns the ns of one exchange between two launches, through words in device or in host memory.
Result<double> shake(const Device& device, const cu::Memory& through) {
  constexpr uint64_t kRounds = 1000;
  const uint64_t rounds = cu::emulated() ? 20 : kRounds;
  MOECCL_ASSIGN_OR_RETURN(const cu::Function f, device.kernel("moeccl_ladder_shake"));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory done, device.pinned(64));
  cu::Stream s[2];
  for (cu::Stream& stream : s) {
    MOECCL_ASSIGN_OR_RETURN(stream, device.stream());
  }
  uint64_t* const w = words(through);
  for (const int i : {0, 1})
    MOECCL_TRY(device.launch(f, s[i], ShakeArgs{w + 16 * i, w + 16 * (1 - i), rounds, most_ns, words(done) + 2 * i}));
  for (const cu::Stream stream : s) MOECCL_TRY(synchronize(device, stream, "two kernels that wait for each other"));
  for (const int i : {0, 2}) {
    if (read_word(words(done) + i) != rounds)
      return error(moecclInternalError, "kernel {} has met the other one {} times of {}", i / 2,
                   read_word(words(done) + i), rounds);
  }
  return static_cast<double>(read_word(words(done) + 1)) / static_cast<double>(rounds - 1);
}

// Returns the ns of one of `n` touches.
Result<double> touch(const Device& device, const char* kernel, const cu::Memory& memory, uint64_t n) {
  MOECCL_ASSIGN_OR_RETURN(const cu::Function f, device.kernel(kernel));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory ns, device.pinned(64));
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream s, device.stream());
  MOECCL_TRY(device.launch(f, s, TouchArgs{words(memory), n, words(ns)}));
  MOECCL_TRY(synchronize(device, s, kernel));
  return static_cast<double>(read_word(words(ns))) / static_cast<double>(n);
}

Result<double> meet(const Device& device, unsigned blocks, uint64_t rounds) {
  MOECCL_ASSIGN_OR_RETURN(const cu::Function f, device.kernel("moeccl_ladder_meet"));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory counter, device.memory(64));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory done, device.pinned(64));
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream s, device.stream());
  MOECCL_TRY(device.launch(f, s, MeetArgs{reinterpret_cast<uint32_t*>(counter.data()), rounds, most_ns, words(done)},
                           blocks, 256));
  MOECCL_TRY(synchronize(device, s, "blocks that meet"));
  if (read_word(words(done)) != rounds)
    return error(moecclInternalError, "{} blocks have met {} times of {}", blocks, read_word(words(done)), rounds);
  return static_cast<double>(read_word(words(done) + 1)) / static_cast<double>(rounds - 1);
}

Result<std::string> plant(const char* kernel, uint64_t n, unsigned threads) {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  MOECCL_ASSIGN_OR_RETURN(const cu::Function f, device.kernel(kernel));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory memory, device.memory(n * 4));
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream s, device.stream());
  MOECCL_TRY(device.launch(f, s, PlantArgs{reinterpret_cast<uint32_t*>(memory.data()), n}, 1, threads));
  MOECCL_TRY(synchronize(device, s, kernel));
  return std::string("planted");
}

}  // namespace

Result<std::string> handshake() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory near, device.memory(512));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory far, device.pinned(512));
  MOECCL_ASSIGN_OR_RETURN(const double on_device, shake(device, near));
  MOECCL_ASSIGN_OR_RETURN(const double on_host, shake(device, far));
  return format("an exchange takes {:.2f} us through device memory, {:.2f} us through host memory", on_device / 1e3,
                on_host / 1e3);
}

Result<std::string> clock_ticks() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  constexpr uint64_t kValues = 200;
  MOECCL_ASSIGN_OR_RETURN(const cu::Function f, device.kernel("moeccl_ladder_ticks"));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory values, device.pinned(kValues * 8));
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream s, device.stream());
  MOECCL_TRY(device.launch(f, s, TicksArgs{words(values), kValues, most_ns}));
  MOECCL_TRY(synchronize(device, s, "the device's clock"));
  std::vector<uint64_t> steps;
  for (uint64_t i = 1; i < kValues; ++i) {
    const uint64_t a = read_word(words(values) + i - 1), b = read_word(words(values) + i);
    if (b <= a) return error(moecclInternalError, "the clock shows {} after {}", b, a);
    steps.push_back(b - a);
  }
  std::sort(steps.begin(), steps.end());
  return format("steps of {} ns, {} at most", steps[steps.size() / 2], steps.back());
}

Result<std::string> latencies() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  const uint64_t n = cu::emulated() ? 100 : 2000, rounds = cu::emulated() ? 5 : 1000;
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory far, device.pinned(64));
  MOECCL_ASSIGN_OR_RETURN(const cu::Memory near, device.memory(64));
  MOECCL_ASSIGN_OR_RETURN(const double read_far, touch(device, "moeccl_ladder_loads", far, n));
  MOECCL_ASSIGN_OR_RETURN(const double read_near, touch(device, "moeccl_ladder_loads", near, n));
  MOECCL_ASSIGN_OR_RETURN(const double store_far, touch(device, "moeccl_ladder_stores", far, n));
  MOECCL_ASSIGN_OR_RETURN(const double store_near, touch(device, "moeccl_ladder_stores", near, n));
  MOECCL_ASSIGN_OR_RETURN(const double few, meet(device, 2, rounds));
  MOECCL_ASSIGN_OR_RETURN(const double many, meet(device, 16, rounds));
  return format(
      "ns: load from the host {:.0f}, from the device {:.0f}; release store to the host {:.0f}, to the device {:.0f}; "
      "meet of 2 blocks {:.0f}, of 16 {:.0f}",
      read_far, read_near, store_far, store_near, few, many);
}

// Forks as the tests do for their ranks: a sanitizer that does not see this child does not see the ranks either.
Result<std::string> plant_write() {
  const pid_t child = fork();
  if (child == 0) {
    const Result<std::string> planted = plant("moeccl_ladder_plant_write", 256, 32);
    if (!planted.ok()) std::fprintf(stderr, "%s\n", planted.status().message().c_str());
    std::exit(planted.ok() ? 0 : 1);
  }
  int status = 0;
  (void)waitpid(child, &status, 0);
  if (status != 0) return error(moecclInternalError, "the child ended with {:#x}", status);
  return std::string("planted");
}
Result<std::string> plant_race() { return plant("moeccl_ladder_plant_race", 256, 256); }

}  // namespace moeccl::ladder
