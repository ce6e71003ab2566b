// SPDX-License-Identifier: Apache-2.0
// Measures the cost of creating a communicator of many processes on one host: the time until the last rank has it and
// until a first AllReduce is done, and the memory, threads and file descriptors of a rank.
#include <moeccl/moeccl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "perf/common/fail.h"
#include "perf/common/progress.h"
#include "perf/common/shared_options.h"
#include "perf/common/text.h"

namespace perf {
namespace {

constexpr int kMostRanks = 4096;

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

// The kernel's figures of this process, in KiB. Pss divides a shared page by the number of processes that map it.
struct Memory {
  int64_t own_kib = 0, pss_kib = 0;
};

Memory memory_now() {
  std::ifstream in("/proc/self/smaps_rollup");
  Memory memory;
  for (std::string word; in >> word;) {
    int64_t kib = 0;
    if (word == "Pss:" && in >> kib) memory.pss_kib = kib;
    if (word == "Anonymous:" && in >> kib) memory.own_kib = kib;
  }
  if (memory.pss_kib == 0) fail("/proc/self/smaps_rollup cannot be read: Linux 4.14 or later is needed");
  return memory;
}

int entries(const char* folder) {
  const auto all = std::filesystem::directory_iterator(folder);
  return static_cast<int>(std::distance(begin(all), end(all)));
}

struct OfRank {
  double init_ms = 0, first_ms = 0;  // from when all processes were there
  Memory memory;                     // growth since before
  int threads = 0, descriptors = 0;  // in all
};

// Lies in memory that the forked ranks share. Counters are released after the data that they count is written, and
// acquired before it is read.
struct Table {
  std::atomic<int> ready, made, measured;
  std::atomic<int64_t> began_ns;
  std::atomic<bool> has_id;
  moecclUniqueId id;
  OfRank ranks[kMostRanks];
};

template <class Until>
void wait(Until&& until) {
  while (!until()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

[[noreturn]] void be_rank(Table& t, int rank, int n) {
  const Memory before = memory_now();
  ++t.ready;
  wait([&] { return t.began_ns != 0; });
  if (rank == 0) {
    check(moecclGetUniqueId(&t.id), "moecclGetUniqueId", rank);
    t.has_id = true;
  }
  wait([&] { return t.has_id.load(); });
  OfRank& mine = t.ranks[rank];
  const auto since_ms = [&] { return static_cast<double>(now_ns() - t.began_ns) * 1e-6; };
  moecclComm_t comm = nullptr;
  check(moecclCommInitRank(&comm, n, t.id, rank), "moecclCommInitRank", rank);
  mine.init_ms = since_ms();
  double sum = 1;
  check(moecclAllReduce(&sum, &sum, 1, moecclFloat64, moecclSum, comm, nullptr), "moecclAllReduce", rank, comm);
  if (sum != n) fail("the sum over " + std::to_string(n) + " ranks is " + std::to_string(sum));
  mine.first_ms = since_ms();
  ++t.made;
  wait([&] { return t.made == n; });
  const Memory after = memory_now();
  mine.memory = {after.own_kib - before.own_kib, after.pss_kib - before.pss_kib};
  mine.threads = entries("/proc/self/task");
  mine.descriptors = entries("/proc/self/fd") - 1;  // without the one that reads the directory
  ++t.measured;
  wait([&] { return t.measured == n; });
  check(moecclCommDestroy(comm), "moecclCommDestroy", rank);
  _exit(0);
}

nlohmann::json run(int n) {
  void* shared = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) fail("mmap of " + std::to_string(sizeof(Table)) + " bytes failed");
  Table& t = *new (shared) Table{};
  std::fflush(stdout);
  const pid_t parent = getpid();
  std::vector<pid_t> children;
  for (int r = 0; r < n; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      be_rank(t, r, n);
    }
    if (child < 0) fail("fork of rank " + std::to_string(r) + " failed: raise the limit of processes (ulimit -u)");
    children.push_back(child);
  }
  Progress progress(true);
  const auto ended_badly = [&] {
    for (const pid_t child : children) kill(child, SIGKILL);
    fail("a rank of " + std::to_string(n) + " failed");
  };
  wait([&] {
    if (waitpid(-1, nullptr, WNOHANG) != 0) ended_badly();  // a rank ends so early only when it fails
    return t.ready == n;
  });
  t.began_ns = now_ns();
  for (int left = n; left > 0; --left) {
    progress.show(std::to_string(n) + " ranks", n - left, n);
    int status = 0;
    if (waitpid(-1, &status, 0) < 0 || status != 0) ended_badly();
  }
  OfRank worst;
  int64_t own_kib = 0, pss_kib = 0;
  for (int r = 0; r < n; ++r) {
    const OfRank& of = t.ranks[r];
    worst.init_ms = std::max(worst.init_ms, of.init_ms);
    worst.first_ms = std::max(worst.first_ms, of.first_ms);
    worst.threads = std::max(worst.threads, of.threads);
    worst.descriptors = std::max(worst.descriptors, of.descriptors);
    own_kib += of.memory.own_kib;
    pss_kib += of.memory.pss_kib;
  }
  munmap(shared, sizeof(Table));
  return {{"ranks", n},
          {"init_ms", worst.init_ms},
          {"first_allreduce_ms", worst.first_ms - worst.init_ms},
          {"own_kib_per_rank", own_kib / n},
          {"kib_per_rank", pss_kib / n},
          {"threads", worst.threads},
          {"descriptors", worst.descriptors}};
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) {
  std::vector<int> sizes = {8, 64, 128, 256, 512};
  std::string output;
  perf::App app("Makes communicators of many processes on this host; prints their time and memory", "init_perf");
  app.add_option("--ranks", sizes, "comma list of sizes")->delimiter(',')->check(perf::range(2, perf::kMostRanks));
  perf::add_output(app, "-J,--output_file", output, "write the table as JSON");
  perf::parse_or_exit(app, argc, argv);
  nlohmann::json all = nlohmann::json::array();
  std::printf("# %6s %12s %18s %18s %14s %8s %12s\n", "ranks", "init(ms)", "first sum(ms)", "own(KiB/rank)",
              "all(KiB/rank)", "threads", "descriptors");
  for (const int n : sizes) {
    const nlohmann::json row = perf::run(n);
    std::printf("  %6d %12.1f %18.1f %18ld %14ld %8d %12d\n", n, row["init_ms"].get<double>(),
                row["first_allreduce_ms"].get<double>(), row["own_kib_per_rank"].get<long>(),
                row["kib_per_rank"].get<long>(), row["threads"].get<int>(), row["descriptors"].get<int>());
    std::fflush(stdout);
    all.push_back(row);
  }
  std::printf(
      "# own: the process's own memory; all: this and its part of what processes share. Both: more than before init\n");
  perf::write_or_fail({{output, all.dump(1) + "\n"}});
  return 0;
}
