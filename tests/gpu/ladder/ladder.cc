// SPDX-License-Identifier: Apache-2.0
// gpu_ladder checks in less than 30 seconds whether this GPU, with this driver, is what the library takes it for.
//   gpu_ladder              runs every rung, each in its own process and under 5 seconds; no earlier rung,
//                           even one that hangs, keeps a later one from running
//   gpu_ladder RUNG...      runs only these
//   gpu_ladder --list       prints their names
//   gpu_ladder --images     prints the images that the library carries
//   --logs DIR              writes each rung's stderr to DIR/ladder-RUNG.log
// It prints a line for each rung: name | ok, FAILED or HUNG | seconds | what was found. The exit code is 1 when a rung
// is not ok. For tests: MOECCL_TEST_LADDER_FAIL=RUNG and MOECCL_TEST_LADDER_HANG=RUNG plant a failure and a hang,
// MOECCL_TEST_LADDER_NO_IMAGES a library without kernels, and MOECCL_TEST_PATIENCE multiplies the limits.
#include "tests/gpu/ladder/ladder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/image.h"
#include "src/base/clock.h"
#include "src/base/fd.h"

namespace moeccl::ladder {

const std::vector<Rung>& rungs() {
  static const std::vector<Rung> all = {
      {"device", "what the device and its driver are", attributes},
      {"images", "each image loads; the driver's log if not", load_images},
      {"functions", "registers, local memory and occupancy of each function", function_needs},
      {"kernels-bytes", "copies and reductions against the host reference", contract_bytes},
      {"kernels-rows", "row kernels against the host reference", contract_rows},
      {"kernels-sparse", "codecs against the host reference", contract_sparse},
      {"kernels-routes", "routing against the host reference", contract_routes},
      {"kernels-records", "routing records against the host reference", contract_records},
      {"kernels-tables", "routing tables against the host reference", contract_tables},
      {"memfd", "a stream and a kernel store into a registered memfd", write_to_memfd},
      {"waits-8", "64 waiting streams and one that stores, 8 connections", waits_default, 8},
      {"waits-8-high", "the same, and it has the highest priority", waits_high, 8},
      {"waits-32", "64 waiting streams and one that stores, 32 connections", waits_default, 32},
      {"waits-32-high", "the same, and it has the highest priority", waits_high, 32},
      {"handshake", "two kernels wait for each other", handshake},
      {"calls", "which calls wait while a kernel spins", calls_beside_a_kernel},
      {"calls-stream", "which calls wait while a stream waits for a word", calls_beside_a_stream},
      {"queue", "how many launches return behind a stream that waits", launch_queue},
      {"captures", "which calls a capture forbids", calls_in_captures},
      {"share-fd", "device memory for another process by descriptor", share_by_descriptor},
      {"share-ipc", "device memory for another process by IPC handle", share_by_ipc},
      {"ticks", "steps of the device's clock", clock_ticks},
      {"latencies", "a PCIe read, a release store, a meet", latencies},
      {"plant-write", "a store past the end, in a forked child", plant_write, 0, true},
      {"plant-race", "a race in shared memory", plant_race, 0, true},
  };
  return all;
}

namespace {

bool is(const char* variable, const char* name) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, name) == 0;
}

// Runs in the rung's process and writes the rung's line to `answer`.
int climb(const Rung& rung, int answer) {
  if (is("MOECCL_TEST_LADDER_HANG", rung.name)) {
    signal(SIGTERM, SIG_IGN);
    while (true) ::pause();
  }
  if (rung.connections > 0) setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(rung.connections).c_str(), 1);
  Result<std::string> found = is("MOECCL_TEST_LADDER_FAIL", rung.name)
                                  ? Result<std::string>(error(moecclInternalError, "planted by the test"))
                                  : rung.climb();
  const std::string line = found.ok() ? *found : found.status().message();
  (void)!write(answer, line.data(), line.size());
  return found.ok() ? 0 : 1;
}

std::string seconds_text(int64_t since) { return format("{:.1f}", static_cast<double>(now_ns() - since) / 1e9); }

// Runs this program again for one rung, in a process group that it ends afterwards.
bool run(const Rung& rung, const std::string& logs) {
  constexpr int64_t kLimitMs = 5000, kEndMs = 1000;
  const int64_t limit_ms = kLimitMs * patience();
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  Fd from(ends[0]), to(ends[1]);
  const int64_t since = now_ns();
  const pid_t child = fork();
  if (child == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // when the ladder ends, its rung ends too
    if (!logs.empty()) {
      const int log =
          open((logs + "/ladder-" + rung.name + ".log").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
      if (log >= 0) dup2(log, 2);
    }
    // Only the rungs' lines may go to stdout.
    dup2(2, 1);
    fcntl(to.get(), F_SETFD, 0);
    const std::string answer = std::to_string(to.get());
    execl("/proc/self/exe", "gpu_ladder", "--answer", answer.c_str(), rung.name, static_cast<char*>(nullptr));
    _exit(127);
  }
  to.reset();
  int status = 0;
  pid_t ended = 0;
  const auto wait_ms = [&](int64_t ms) {
    for (const int64_t until = now_ns() + ms * 1'000'000; ended == 0 && now_ns() < until; usleep(5000))
      ended = waitpid(child, &status, WNOHANG);
  };
  wait_ms(limit_ms);
  const bool hung = ended == 0;
  // Also ends what the rung has left behind. A process that hangs in the kernel cannot be ended; the next rung does not
  // wait for it.
  kill(-child, SIGKILL);
  if (hung) wait_ms(kEndMs);
  fcntl(from.get(), F_SETFL, O_NONBLOCK);
  std::string line;
  char piece[4096];
  for (ssize_t n; (n = read(from.get(), piece, sizeof(piece))) > 0;) line.append(piece, static_cast<size_t>(n));
  for (char& c : line) c = c == '\n' || c == '|' ? ';' : c;
  bool ok = false;
  std::string result = "FAILED";
  if (hung) {
    result = "HUNG";
    line = format("not over after {} s: {}{}", limit_ms / 1000, rung.about, ended == 0 ? "; cannot be ended" : "");
  } else if (WIFSIGNALED(status)) {
    line = format("ended by signal {} ({}): {}", WTERMSIG(status), strsignal(WTERMSIG(status)), rung.about);
  } else {
    ok = WEXITSTATUS(status) == 0;
    if (ok) result = "ok";
    if (line.empty()) line = format("exit code {}: {}", WEXITSTATUS(status), rung.about);
  }
  std::printf("%-15s | %-6s | %4s | %s\n", rung.name, result.c_str(), seconds_text(since).c_str(), line.c_str());
  std::fflush(stdout);
  return ok;
}

int main_of(int argc, char** argv) {
  std::string logs;
  int answer = -1;
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--images") {
      if (std::getenv("MOECCL_TEST_LADDER_NO_IMAGES") != nullptr) return 0;
      for (const auto& image : cuda::images()) std::printf("%s\n", image.name);
      return 0;
    }
    if (arg == "--list") {
      for (const Rung& r : rungs()) {
        if (!r.planted) std::printf("%-15s %s\n", r.name, r.about);
      }
      return 0;
    }
    if ((arg == "--logs" || arg == "--answer") && i + 1 < argc) {
      ++i;
      if (arg == "--logs") logs = argv[i];
      if (arg == "--answer") answer = std::atoi(argv[i]);
    } else if (arg[0] != '-') {
      wanted.push_back(arg);
    } else {
      std::fprintf(stderr, "usage: gpu_ladder [--list] [--images] [--logs DIR] [RUNG...]\n");
      return 2;
    }
  }
  int bad = 0, n = 0;
  for (const Rung& rung : rungs()) {
    bool chosen = wanted.empty() && !rung.planted;
    for (const std::string& name : wanted) chosen = chosen || name == rung.name;
    if (!chosen) continue;
    ++n;
    if (answer >= 0) return climb(rung, answer);
    bad += run(rung, logs) ? 0 : 1;
  }
  if (n < static_cast<int>(wanted.size()) || n == 0) {
    std::fprintf(stderr, "no such rung: see gpu_ladder --list\n");
    return 2;
  }
  return bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace moeccl::ladder

int main(int argc, char** argv) { return moeccl::ladder::main_of(argc, argv); }
