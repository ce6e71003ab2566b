// SPDX-License-Identifier: Apache-2.0
// Measures the bound of an exchange between two processes whose buffers come from malloc: the bare copies of an
// AllToAll and an AllGather with two barriers and nothing else, by each way that a library has. "cma" is
// process_vm_readv of the peer's block; "staged" copies pieces through shared memory; "views" reads the peer's block in
// place, which malloc's memory does not allow. No library is faster than the faster one of the first two.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "perf/common/fail.h"
#include "perf/common/shared_options.h"

namespace perf {
namespace {

constexpr size_t kMost = 64 << 20;
constexpr size_t kPieces[] = {64 << 10, 256 << 10, 512 << 10};
constexpr int kReadings = 9;

struct Shared {
  struct alignas(64) Word {
    std::atomic<int64_t> value{0};
  };
  Word arrived[2];
  pid_t pid[2] = {};
  char* send[2] = {};  // address of a rank's buffer in its own memory
};

class Rank {
 public:
  Rank(Shared& shared, char* staging, int me)
      : shared_(shared), staging_(staging), me_(me), send_(kMost, static_cast<char>(me + 1)), recv_(kMost) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    shared_.pid[me] = getpid();
    shared_.send[me] = send_.data();
    meet();
  }

  // Returns the microseconds of one exchange of `bytes` per rank, the median of the readings. piece: 0 for
  // process_vm_readv, 1 to read in place.
  double exchange(size_t bytes, size_t piece, bool gather) {
    const int n = bytes < 1 << 20 ? 400 : bytes < 8 << 20 ? 60 : 10;
    std::array<double, kReadings> us;
    for (double& reading : us) {
      meet();
      const auto began = std::chrono::steady_clock::now();
      for (int i = 0; i < n; ++i) once(bytes / 2, piece, gather);
      reading = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count() / n;
    }
    std::nth_element(us.begin(), us.begin() + kReadings / 2, us.end());
    return us[kReadings / 2];
  }

 private:
  // Each rank has its own core, so spinning is the fastest way to wait.
  void meet() {
    shared_.arrived[me_].value.store(++meetings_, std::memory_order_release);  // acquired by the other rank, below
    while (shared_.arrived[1 - me_].value.load(std::memory_order_acquire) < meetings_) {
    }
  }

  void once(size_t block, size_t piece, bool gather) {
    const auto me = static_cast<size_t>(me_);
    const size_t peer = 1 - me;
    const char* own = send_.data() + (gather ? 0 : me * block);
    const char* for_peer = send_.data() + (gather ? 0 : peer * block);
    char* from_peer = recv_.data() + peer * block;
    meet();
    if (piece == 0) {
      const iovec to{from_peer, block}, from{shared_.send[peer] + (gather ? 0 : me * block), block};
      if (process_vm_readv(shared_.pid[peer], &to, 1, &from, 1, 0) != static_cast<ssize_t>(block)) {
        fail("process_vm_readv of the other process is refused: allow it with sysctl kernel.yama.ptrace_scope=0");
      }
    } else if (piece == 1) {
      std::memcpy(from_peer, staging_ + peer * kMost + (gather ? 0 : me * block), block);
    } else {
      piece = std::min(piece, block);
      const size_t n = block / piece;
      for (size_t p = 0; p <= n; ++p) {
        if (p < n) std::memcpy(staging_ + me * kMost + p % 2 * piece, for_peer + p * piece, piece);
        if (p > 0) {
          std::memcpy(from_peer + (p - 1) * piece, staging_ + peer * kMost + (p - 1) % 2 * piece, piece);
        }
        meet();
      }
    }
    std::memcpy(recv_.data() + me * block, own, block);
    meet();
  }

  Shared& shared_;
  char* staging_;
  int me_;
  std::vector<char> send_, recv_;
  int64_t meetings_ = 0;
};

void* shared_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("no shared memory of " + std::to_string(bytes) + " bytes");
  return memory;
}

int run(int argc, char** argv) {
  App app("The least time of an AllToAll and an AllGather between two processes with malloc's memory");
  parse_or_exit(app, argc, argv);
  auto* shared = new (shared_memory(sizeof(Shared))) Shared;
  auto* staging = static_cast<char*>(shared_memory(2 * kMost));
  std::memset(staging, 1, 2 * kMost);
  const pid_t child = fork();
  if (child < 0) fail("fork failed");
  if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  Rank rank(*shared, staging, child == 0 ? 1 : 0);
  if (child != 0) {
    std::printf("# microseconds; K: staged in pieces of so many KiB\n# %-9s %10s %9s", "operation", "bytes", "cma");
    for (const size_t piece : kPieces) std::printf(" %6zuK", piece >> 10);
    std::printf(" %9s %9s\n", "least", "views");
  }
  for (const bool gather : {false, true}) {
    for (size_t bytes = 32 << 10; bytes <= kMost; bytes *= 4) {
      double least = rank.exchange(bytes, 0, gather);
      if (child != 0) std::printf("  %-9s %10zu %9.2f", gather ? "allgather" : "alltoall", bytes, least);
      for (const size_t piece : kPieces) {
        const double us = rank.exchange(bytes, piece, gather);
        least = std::min(least, us);
        if (child != 0) std::printf(" %7.1f", us);
      }
      const double views = rank.exchange(bytes, 1, gather);
      if (child != 0) std::printf(" %9.2f %9.2f\n", least, views), std::fflush(stdout);
    }
  }
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  return 0;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::run(argc, argv); }
