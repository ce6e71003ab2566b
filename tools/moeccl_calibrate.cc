// SPDX-License-Identifier: Apache-2.0
#include "tools/moeccl_calibrate.h"

#include <moeccl/moeccl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "perf/common/children.h"
#include "tools/option_names.h"
#include "tools/waiting.h"

namespace {

// As calibration itself has it (src/calibrate/measure.cc).
constexpr double kGoodFit = 0.99;

struct Options {
  int ranks = 0;
  bool threads = false, pace = false, cache = false;
  double budget_ms = 20'000;
  size_t max_bytes = 16 << 20;
  std::string topology, output;
};
Options options;

const tools::OptionNames kNames = {
    {"topology", "--topology"}, {"pace", "--pace"}, {"budget_ms", "--budget"}, {"max_bytes", "--max-bytes"}};

int fail(const char* what, moecclComm_t comm = nullptr) {
  std::fprintf(stderr, "%s: %s\n", what, tools::in_options(moecclGetLastError(comm), kNames).c_str());
  return 1;
}

moecclConfig_t config() {
  moecclConfig_t c = MOECCL_CONFIG_INIT;
  c.topology = options.topology.empty() ? nullptr : options.topology.c_str();
  c.pace = options.pace ? 1 : 0;
  return c;
}

// Returns whether the file can be written, and says so before anything is measured if not. The library writes a file
// beside it and renames that.
bool can_write(const std::string& path) {
  std::error_code none;
  std::string beside = std::filesystem::weakly_canonical(path, none).string();
  struct stat old = {};
  if (stat(path.c_str(), &old) == 0 && !S_ISREG(old.st_mode)) {
    std::fprintf(stderr, "--output %s is not a file\n", path.c_str());
    return false;
  }
  beside += ".XXXXXX";
  const int file = mkstemp(beside.data());
  if (file < 0) {
    std::fprintf(stderr, "--output %s cannot be written: %s\n", path.c_str(), std::strerror(errno));
    return false;
  }
  close(file);
  unlink(beside.c_str());
  return true;
}

int measure(moecclComm_t comm, bool writes) {
  if (moecclCalibrate(comm, options.budget_ms, options.max_bytes) != moecclSuccess) return fail("calibrate", comm);
  if (writes && options.cache && moecclProfileSave(comm, nullptr) != moecclSuccess) return fail("cache", comm);
  if (writes && moecclProfileSave(comm, options.output.c_str()) != moecclSuccess) return fail("profile", comm);
  return 0;
}

int as_threads() {
  std::vector<moecclComm_t> comms(static_cast<size_t>(options.ranks));
  const moecclConfig_t c = config();
  if (moecclCommInitAll(comms.data(), options.ranks, &c) != moecclSuccess) return fail("cannot make the ranks");
  std::vector<int> results(comms.size());
  tools::watched("calibrate", [&] {
    std::vector<std::thread> threads;
    for (size_t r = 0; r < comms.size(); ++r) threads.emplace_back([&, r] { results[r] = measure(comms[r], r == 0); });
    for (std::thread& t : threads) t.join();
  });
  int bad = 0;
  for (size_t r = 0; r < comms.size(); ++r) {
    bad |= results[r];
    if (moecclCommDestroy(comms[r]) != moecclSuccess) bad = fail("cannot destroy a communicator");
  }
  return bad;
}

struct Meeting {
  moecclUniqueId id;
  int ready;  // 1: id is there; 2: there will be none
};

int one_process(Meeting* meeting, int rank) {
  if (rank == 0) {
    const bool made = moecclGetUniqueId(&meeting->id) == moecclSuccess;
    __atomic_store_n(&meeting->ready, made ? 1 : 2, __ATOMIC_RELEASE);
    if (!made) return fail("id");
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  int ready = 0;
  while ((ready = __atomic_load_n(&meeting->ready, __ATOMIC_ACQUIRE)) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      std::fprintf(stderr, "rank %d: rank 0 gave no unique id in 60 s\n", rank);
      return 1;
    }
    usleep(1000);
  }
  if (ready == 2) return 1;
  moecclComm_t comm = nullptr;
  const moecclConfig_t c = config();
  if (moecclCommInitRankConfig(&comm, options.ranks, meeting->id, rank, &c) != moecclSuccess) return fail("init");
  const int bad = measure(comm, rank == 0);
  return moecclCommDestroy(comm) == moecclSuccess ? bad : fail("cannot destroy the communicator");
}

// Forks before this process has touched the library.
int as_processes() {
  void* page = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    std::perror("memory for the ranks to meet");
    return 1;
  }
  perf::Children children;
  const int rank = perf::fork_children(options.ranks, children);
  if (rank >= 0) std::_Exit(one_process(static_cast<Meeting*>(page), rank));
  const bool good = tools::watched("calibrate", [&] { return perf::wait_for(children); });
  if (!children.failure.empty()) std::fprintf(stderr, "%s\n", children.failure.c_str());
  return good ? 0 : 1;
}

// Runs as one rank of a launcher's job; *rank says which.
int as_launched(int* rank) {
  moecclComm_t comm = nullptr;
  const moecclConfig_t c = config();
  if (moecclCommInitEnv(&comm, &c) != moecclSuccess) {
    const std::string why = moecclGetLastError(nullptr);
    std::fprintf(stderr, "init: %s%s\n", why.c_str(),
                 why.starts_with("no launcher") ? "; or give --ranks to measure ranks of this host" : "");
    return 1;
  }
  if (moecclCommUserRank(comm, rank) != moecclSuccess) return fail("rank", comm);
  // The other ranks' calls fail when this one's process ends.
  if (*rank == 0 && !can_write(options.output)) return 1;
  const int bad = measure(comm, *rank == 0);
  return moecclCommDestroy(comm) == moecclSuccess ? bad : fail("cannot destroy the communicator");
}

// Prints the profile that was written as a page: each level's line, and which plan was fastest at each size. `where`
// says where it lies.
void print_page(const std::string& where) {
  std::ifstream in(options.output);
  const nlohmann::json profile = nlohmann::json::parse(in, nullptr, false);
  if (profile.is_discarded()) {
    std::fprintf(stderr, "%s cannot be read again\n", options.output.c_str());
    return;
  }
  const int n_ranks = profile.value("n_ranks", 0);
  std::printf("%d rank%s%s%s: profile in %s\n\nlevel             alpha us      GB/s       r2\n", n_ranks,
              n_ranks == 1 ? "" : "s", profile.contains("note") ? ", " : "",
              profile.value("note", std::string()).c_str(), where.c_str());
  bool disturbed = false;
  const auto line = [&](const std::string& name, const nlohmann::json& fit) {
    const double r2 = fit.value("r2", 0.0);
    disturbed = disturbed || r2 < kGoodFit;
    std::printf("%-16s %9.2f %9.2f %8.4f%s\n", name.c_str(), fit.value("alpha_ns", 0.0) / 1e3,
                fit.value("bytes_per_ns", 0.0), r2, r2 < kGoodFit ? " *" : "");
  };
  for (const auto& level : profile["levels"]) line(level.value("name", std::string()), level);
  if (profile.contains("alltoall")) {
    const auto& costs = profile["alltoall"];
    if (costs.contains("standard")) line("alltoall", costs["standard"]);
    for (const char* kind : {"inter", "intra"})
      for (size_t i = 0; costs.contains(kind) && i < costs[kind].size(); ++i)
        line(std::string(kind) + "-" + std::to_string(i + 1), costs[kind][i]);
  }
  if (disturbed)
    std::printf(
        "* r2 below %.2f: the figures do not describe what was measured, because something else used the machine or "
        "time "
        "was short: measure again, with a larger --budget\n",
        kGoodFit);
  struct Best {
    std::string algorithm;
    double ns = 0;
  };
  std::map<std::string, std::map<double, Best>> best;  // by operation and bytes of a block
  for (const auto& plan : profile["plans"]) {
    for (const auto& point : plan["points"]) {
      Best& b = best[plan.value("op", std::string())][point[0].get<double>()];
      if (b.ns == 0 || point[1].get<double>() < b.ns)
        b = {plan.value("algorithm", std::string()), point[1].get<double>()};
    }
  }
  for (const auto& [op, sizes] : best) {
    std::printf("\n%s: fastest by bytes of a block\n", op.c_str());
    for (const auto& [bytes, b] : sizes)
      std::printf("  %12.0f %-12s %12.1f us\n", bytes, b.algorithm.c_str(), b.ns / 1e3);
  }
}

perf::App* command = nullptr;

}  // namespace

const perf::App* add_calibrate(perf::App& app) {
  command = app.add_subcommand("calibrate", "measures links and plans, and writes the profile for MOECCL_PROFILE");
  perf::Option* const ranks =
      command->add_option("--ranks", options.ranks, "ranks on this host; without it, those of the launcher's job")
          ->check(perf::range(2, 1024))
          ->default_str("");
  command->add_flag("--threads", options.threads, "ranks are threads of one process, instead of processes")
      ->needs(ranks);
  command->add_option("--topology", options.topology, "levels of the ranks, such as 'node:2 gpu:4', or auto");
  command->add_flag("--pace", options.pace, "links keep the topology's figures (EMULATED)");
  command->add_option("--budget", options.budget_ms, "about how many milliseconds it may take")
      ->check(perf::within(1, 3.6e6));
  command->add_option("--max-bytes", options.max_bytes, "bytes of the largest buffer, such as 64M")
      ->transform(perf::size_value());
  command->add_option("--output", options.output,
                      "profile file (default: moeccl-profile.json; with --cache, none unless given)");
  command->add_flag("--cache", options.cache,
                    "put it into the user's cache, where jobs of the same ranks and topology look");
  return command;
}

int run_calibrate() {
  // With --cache alone the page is printed from a file that is written at the end and then deleted.
  const bool keep = !options.cache || !options.output.empty();
  std::error_code none;
  if (!keep) {
    // No other user can guess the name and put a link there.
    std::random_device random;
    char name[64];
    std::snprintf(name, sizeof(name), "moeccl-profile.%08x%08x%08x%08x.json", random(), random(), random(), random());
    options.output = std::filesystem::temp_directory_path(none) / name;
  } else if (options.output.empty())
    options.output = "moeccl-profile.json";
  int rank = 0;
  if (options.ranks != 0 && !can_write(options.output)) return 1;
  // A profile that is in the cache, or that a variable names, must not take the place of the measurement.
  unsetenv("MOECCL_CALIBRATE");
  unsetenv("MOECCL_PROFILE");
  const int bad = options.ranks == 0 ? as_launched(&rank) : options.threads ? as_threads() : as_processes();
  if (bad == 0 && rank == 0) print_page(keep ? options.output : "the user's cache");
  if (!keep) std::filesystem::remove(options.output, none);
  return bad;
}
