// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ranks.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "tests/support/hosts.h"
#include "tests/support/report.h"

// Present only under LeakSanitizer.
extern "C" __attribute__((weak)) int __lsan_do_recoverable_leak_check();

namespace moeccl::testing {
namespace {

constexpr int kMaxTestRanks = 512;
constexpr size_t kNoteBytes = 200;

// One rank's words in the memory that the test and all ranks share.
struct RankSlot {
  std::atomic<uint32_t> state;  // RankPhase
  std::atomic<uint32_t> note_length;
  char note[kNoteBytes];  // a torn note is possible and harmless: it is only shown
};
enum RankPhase : uint32_t { kStarting, kJoining, kReady, kRunning, kDestroying, kDone };
const char* phase_name(uint32_t phase) {
  static const char* const names[] = {"starting",        "in init",    "before its function",
                                      "in its function", "in destroy", "done"};
  return phase < 6 ? names[phase] : "?";
}

struct Arena {
  std::atomic<uint32_t> id_ready;  // 1: id is valid, 2: making it failed
  moecclUniqueId id;
  std::atomic<uint32_t> second_ready;  // the same for `second`
  moecclUniqueId second;               // the id of a communicator that grows
  std::atomic<uint32_t> n_ready;
  std::atomic<uint32_t> go;
  RankSlot slots[kMaxTestRanks];
};

thread_local Arena* current_arena = nullptr;
thread_local int current_rank = -1;

void nap() {
  timespec t{0, 500'000};
  nanosleep(&t, nullptr);
}

struct Run {
  int n;
  const RankFunction& fn;
  const RankOptions& options;
  Arena& arena;
  const TestHosts* hosts;
  int number;  // of the call of run_ranks

  bool is_here(int process, int n_processes) const { return hosts == nullptr || hosts->is_here(process, n_processes); }
};

int process_count(int n, RankMode mode) {
  if (mode == RankMode::kThreads) return 1;
  return mode == RankMode::kProcesses ? n : (n + 1) / 2;
}

// Waits for an id that another rank makes.
bool await_id(const std::atomic<uint32_t>& ready) {
  while (ready.load(std::memory_order_acquire) == 0) nap();
  return ready.load() == 1;
}

// The child that holds rank 0 makes the id, and the others wait for it.
bool obtain_id(const Run& run, bool mine) {
  Arena& arena = run.arena;
  if (mine) {
    bool ok = moecclGetUniqueId(&arena.id) == moecclSuccess;
    if (!ok) ADD_FAILURE() << "moecclGetUniqueId: " << moecclGetLastError(nullptr);
    if (ok && run.hosts != nullptr && run.hosts->on_machines() && !run.hosts->publish(run.number, arena.id)) {
      ADD_FAILURE() << "the other machines cannot be given the id: " << strerror(errno);
      ok = false;
    }
    arena.id_ready.store(ok ? 1 : 2, std::memory_order_release);  // read below
  }
  return await_id(arena.id_ready);
}

moecclConfig_t config_of(const RankOptions& options) {
  moecclConfig_t config = options.config;
  if (config.timeout_ms == 0) config.timeout_ms = static_cast<int32_t>(patient_ms(20'000));
  if (config.init_timeout_ms == 0) config.init_timeout_ms = static_cast<int32_t>(patient_ms(20'000));
  return config;
}

// MOECCL_TEST_COMM: how the test's communicator is made before the test gets it, "shrunk" or "grown".
enum class Made { kPlain, kShrunk, kGrown };
Made how_made(int n) {
  const char* text = getenv("MOECCL_TEST_COMM");
  const std::string how = text != nullptr ? text : "";
  if (how == "shrunk") return Made::kShrunk;
  return how == "grown" && n > 1 ? Made::kGrown : Made::kPlain;
}

// An additional rank, number 1, runs on a thread beside rank 0 and is then left out: by name where the number of ranks
// is odd, otherwise because it has gone.
moecclComm_t shrunk(const Run& run, int rank, const moecclConfig_t& config) {
  moecclConfig_t before = config;
  before.topology = nullptr;
  before.pace = 0;
  std::thread extra;
  if (rank == 0) {
    extra = std::thread([&] {
      moecclComm_t comm = nullptr;
      EXPECT_EQ(moecclCommInitRankConfig(&comm, run.n + 1, run.arena.id, 1, &before), moecclSuccess)
          << moecclGetLastError(nullptr);
      EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
    });
  }
  moecclComm_t parent = nullptr, comm = nullptr;
  EXPECT_EQ(moecclCommInitRankConfig(&parent, run.n + 1, run.arena.id, rank == 0 ? 0 : rank + 1, &before),
            moecclSuccess)
      << moecclGetLastError(nullptr);
  const int one = 1;
  EXPECT_EQ(moecclCommShrink(parent, &one, run.n % 2, &comm, &config, MOECCL_SHRINK_DEFAULT), moecclSuccess)
      << moecclGetLastError(nullptr);
  EXPECT_EQ(moecclCommDestroy(parent), moecclSuccess);
  if (extra.joinable()) extra.join();
  return comm;
}

// The last rank joins later.
moecclComm_t grown(const Run& run, int rank, const moecclConfig_t& config) {
  moecclComm_t parent = nullptr, comm = nullptr;
  if (rank == run.n - 1) {
    if (!await_id(run.arena.second_ready)) return nullptr;
    EXPECT_EQ(moecclCommGrow(nullptr, run.n, &run.arena.second, rank, &comm, &config), moecclSuccess)
        << moecclGetLastError(nullptr);
    return comm;
  }
  moecclConfig_t before = config;
  before.topology = nullptr;
  before.pace = 0;
  EXPECT_EQ(moecclCommInitRankConfig(&parent, run.n - 1, run.arena.id, rank, &before), moecclSuccess)
      << moecclGetLastError(nullptr);
  if (rank == 0) {
    const bool ok = moecclCommGetUniqueId(parent, &run.arena.second) == moecclSuccess;
    EXPECT_TRUE(ok) << moecclGetLastError(nullptr);
    run.arena.second_ready.store(ok ? 1 : 2, std::memory_order_release);  // read in await_id()
  }
  EXPECT_EQ(moecclCommGrow(parent, run.n, rank == 0 ? &run.arena.second : nullptr, -1, &comm, &config), moecclSuccess)
      << moecclGetLastError(nullptr);
  EXPECT_EQ(moecclCommDestroy(parent), moecclSuccess);
  return comm;
}

moecclComm_t make_comm(const Run& run, int rank, const moecclConfig_t& config) {
  const Made made = how_made(run.n);
  if (made == Made::kShrunk) return shrunk(run, rank, config);
  if (made == Made::kGrown) return grown(run, rank, config);
  moecclComm_t comm = nullptr;
  const moecclResult_t r = moecclCommInitRankConfig(&comm, run.n, run.arena.id, rank, &config);
  EXPECT_EQ(r, moecclSuccess) << moecclGetErrorString(r) << ": " << moecclGetLastError(nullptr);
  return comm;
}

void run_rank(const Run& run, int rank) {
  RankSlot& slot = run.arena.slots[rank];
  slot.state = kJoining;
  if (!obtain_id(run, rank == 0)) return;
  moecclComm_t comm = nullptr;
  if (run.options.init) {
    comm = make_comm(run, rank, config_of(run.options));
    ASSERT_NE(comm, nullptr);
  }
  slot.state = kReady;
  run.arena.n_ready.fetch_add(1);
  while (run.arena.go.load(std::memory_order_acquire) == 0) nap();
  slot.state = kRunning;
  run.fn(rank, comm);
  slot.state = kDestroying;
  if (comm != nullptr && run.options.destroy) {
    EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess) << moecclGetLastError(nullptr);
  }
}

// Runs one rank on this thread and sends its findings to the test.
void run_and_report(const Run& run, int rank, int report_fd) {
  current_arena = &run.arena;
  current_rank = rank;
  ::testing::TestPartResultArray found;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
    run_rank(run, rank);
  }
  run.arena.slots[rank].state = kDone;
  send_report(report_fd, rank, found);
}

[[noreturn]] void child_main(const Run& run, int process, int n_processes, int report_fd) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (run.hosts != nullptr && !run.hosts->enter(run.hosts->host_of(process, n_processes))) {
    fprintf(stderr, "process %d cannot enter its host: %s\n", process, strerror(errno));
    _exit(1);
  }
  std::vector<std::thread> threads;
  for (int rank = process + n_processes; rank < run.n; rank += n_processes) {
    threads.emplace_back(run_and_report, std::cref(run), rank, report_fd);
  }
  run_and_report(run, process, report_fd);
  for (std::thread& t : threads) t.join();
  int leaked = 0;
  if (run.options.check_leaks && __lsan_do_recoverable_leak_check != nullptr)
    leaked = __lsan_do_recoverable_leak_check();
  fflush(nullptr);
  _exit(leaked ? 23 : 0);  // not exit(): the test's own atexit handlers and statics are not this child's
}

std::string describe(const Run& run, int rank) {
  const RankSlot& slot = run.arena.slots[rank];
  std::string text =
      "rank " + std::to_string(rank) + " (" + mode_name(run.options.mode) + ", " + phase_name(slot.state) + ")";
  const uint32_t length = slot.note_length.load(std::memory_order_acquire);
  if (length > 0) text += " [" + std::string(slot.note, std::min<size_t>(length, kNoteBytes)) + "]";
  return text;
}

// The test's side: collects reports until all ranks have reported or died, or the deadline passes.
class Collector {
 public:
  Collector(const Run& run, std::vector<pid_t> pids, int report_fd)
      : run_(run),
        pids_(std::move(pids)),
        report_fd_(report_fd),
        deadline_ms_(fair_now_ms() + patient_ms(run.options.deadline_ms)) {
    for (int r = 0; r < run.n; ++r) pid_of_rank_.push_back(pids_[static_cast<size_t>(r) % pids_.size()]);
    const int n_processes = static_cast<int>(pids_.size());
    for (int p = 0; p < n_processes; ++p) exited_.push_back(pids_[static_cast<size_t>(p)] == 0);
    for (int r = 0; r < run.n; ++r) reported_.push_back(pid_of_rank_[static_cast<size_t>(r)] == 0);
    elsewhere_ = static_cast<int>(std::count(reported_.begin(), reported_.end(), true));
    exited_elsewhere_ = std::count(exited_.begin(), exited_.end(), true);
  }

  bool collect() {
    bool released = false;
    while (!finished() && fair_now_ms() < deadline_ms_) {
      if (!released && static_cast<int>(run_.arena.n_ready.load()) == run_.n - elsewhere_) {
        released = true;
        if (run_.options.on_ready) run_.options.on_ready(pid_of_rank_);
        run_.arena.go.store(1, std::memory_order_release);  // read in run_rank
        if (run_.options.on_running) run_.options.on_running(pid_of_rank_);
      }
      receive(released ? 20 : 1);
      reap();
      // A rank that could not join will never be ready. Let the others go; their failure to join is reported too.
      if (!released && some_ended()) run_.arena.go.store(1, std::memory_order_release);
    }
    receive(0);
    end();
    return ok_;
  }

 private:
  bool finished() const {
    for (bool e : exited_) {
      if (!e) return false;
    }
    return true;
  }
  bool some_ended() const {
    return std::count(reported_.begin(), reported_.end(), true) > elsewhere_ ||
           std::count(exited_.begin(), exited_.end(), true) > exited_elsewhere_;
  }

  void receive(int wait_ms) {
    pollfd p{report_fd_, POLLIN, 0};
    while (poll(&p, 1, wait_ms) > 0 && (p.revents & POLLIN) != 0) {
      Report report;
      if (!receive_report(report_fd_, &report)) return nap();  // all ranks have closed their ends and are about to exit
      if (report.rank < 0 || report.rank >= run_.n) continue;
      reported_[static_cast<size_t>(report.rank)] = true;
      for (const Finding& f : report.findings) {
        ok_ = false;
        ADD_FAILURE_AT(f.file.c_str(), f.line) << describe(run_, report.rank) << "\n" << f.message;
      }
      wait_ms = 0;
    }
  }

  void reap() {
    for (size_t i = 0; i < pids_.size(); ++i) {
      int status = 0;
      if (exited_[i] || waitpid(pids_[i], &status, WNOHANG) != pids_[i]) continue;
      exited_[i] = true;
      receive(0);  // the messages that it wrote before its end
      judge_exit(i, status);
    }
  }

  void judge_exit(size_t process, int status) {
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    bool allowed = WIFSIGNALED(status);
    std::string who;
    for (size_t r = process; r < static_cast<size_t>(run_.n); r += pids_.size()) {
      allowed = allowed && run_.options.may_die.contains(static_cast<int>(r));
      who += (who.empty() ? "" : ", ") + describe(run_, static_cast<int>(r));
    }
    if (allowed) return;
    ok_ = false;
    if (WIFSIGNALED(status)) {
      ADD_FAILURE() << who << " died of signal " << WTERMSIG(status) << " (" << strsignal(WTERMSIG(status)) << ")";
    } else if (WEXITSTATUS(status) == 23) {
      ADD_FAILURE() << who << ": memory leaked, see LeakSanitizer's report above";
    } else {
      ADD_FAILURE() << who << " exited with " << WEXITSTATUS(status) << " (a sanitizer's report is above)";
    }
  }

  // Kills the remaining processes and reports what they were doing.
  void end() {
    for (size_t i = 0; i < pids_.size(); ++i) {
      if (exited_[i]) continue;
      ok_ = false;
      for (size_t r = i; r < static_cast<size_t>(run_.n); r += pids_.size()) {
        if (!reported_[r])
          ADD_FAILURE() << describe(run_, static_cast<int>(r)) << " still hangs after "
                        << patient_ms(run_.options.deadline_ms) << " ms: killed";
      }
      kill(pids_[i], SIGKILL);
      waitpid(pids_[i], nullptr, 0);
      receive(0);
    }
    for (size_t r = 0; r < reported_.size(); ++r) {
      if (reported_[r] || run_.options.may_die.contains(static_cast<int>(r)) || !ok_) continue;
      ok_ = false;
      ADD_FAILURE() << describe(run_, static_cast<int>(r)) << " ended without a report";
    }
  }

  const Run& run_;
  std::vector<pid_t> pids_;  // one per process; 0 for those of other machines
  std::vector<pid_t> pid_of_rank_;
  int report_fd_;
  int64_t deadline_ms_;
  std::vector<bool> reported_, exited_;  // true from the start for what other machines report
  int elsewhere_ = 0;
  int64_t exited_elsewhere_ = 0;
  bool ok_ = true;
};

// Finds the hosts of MOECCL_TEST_HOSTS, made at the first call; null without it. Returns false when they cannot be
// made.
bool hosts_from_environment(const TestHosts** hosts, std::string* why) {
  static const std::string text = getenv("MOECCL_TEST_HOSTS") != nullptr ? getenv("MOECCL_TEST_HOSTS") : "";
  static const bool named = text.starts_with("named:");
  static const std::vector<int> weights = parse_weights(text.c_str() + (named ? 6 : 0));
  static std::string reason;
  static const std::unique_ptr<TestHosts> made =
      weights.empty() ? nullptr : TestHosts::create({.weights = weights, .named = named}, &reason);
  *hosts = made.get();
  *why = reason;
  return weights.empty() || made != nullptr;
}

}  // namespace

const char* mode_name(RankMode mode) {
  return mode == RankMode::kThreads ? "threads" : mode == RankMode::kProcesses ? "processes" : "mixed";
}

bool run_ranks(int n, const RankFunction& fn, const RankOptions& options) {
  if (n < 1 || n > kMaxTestRanks) {
    ADD_FAILURE() << "run_ranks takes 1.." << kMaxTestRanks << " ranks, not " << n;
    return false;
  }
  const TestHosts* hosts = options.hosts;
  if (std::string why; hosts == nullptr && !hosts_from_environment(&hosts, &why)) {
    [&] { GTEST_SKIP() << "no hosts for MOECCL_TEST_HOSTS: " << why; }();
    return true;
  }
  Shared<Arena> arena;
  static int calls = 0;
  const Run run{n, fn, options, *arena, hosts, ++calls};
  int report[2];
  if (!make_report_pipe(report)) {
    ADD_FAILURE() << "no pipe for the ranks' reports: " << strerror(errno);
    return false;
  }
  fflush(nullptr);
  std::vector<pid_t> pids;
  const int n_processes = process_count(n, options.mode);
  if (!run.is_here(0, n_processes)) {
    const Stopwatch watch;
    while (!hosts->take(run.number, &arena->id) && watch.fair_ms() < patient_ms(options.deadline_ms)) nap();
    arena->id_ready.store(1, std::memory_order_release);  // read in await_id(); without an id the ranks report it
  }
  for (int p = 0; p < n_processes; ++p) {
    if (!run.is_here(p, n_processes)) {
      pids.push_back(0);
      continue;
    }
    const pid_t pid = fork();
    if (pid == 0) {
      close(report[0]);
      child_main(run, p, n_processes, report[1]);
    }
    if (pid < 0) {
      ADD_FAILURE() << "fork: " << strerror(errno);
      for (pid_t started : pids) {
        if (started > 0) kill(started, SIGKILL), waitpid(started, nullptr, 0);
      }
      close(report[0]), close(report[1]);
      return false;
    }
    pids.push_back(pid);
  }
  close(report[1]);
  const bool ok = Collector(run, std::move(pids), report[0]).collect();
  close(report[0]);
  return ok;
}

moecclUniqueId unique_id() { return current_arena->id; }

void set_note(const std::string& note) {
  if (current_arena == nullptr) return;
  RankSlot& slot = current_arena->slots[current_rank];
  const size_t length = std::min(note.size(), kNoteBytes);
  memcpy(slot.note, note.data(), length);
  slot.note_length.store(static_cast<uint32_t>(length), std::memory_order_release);  // read in describe
}

bool Meeting::wait_for(int n) const {
  const Stopwatch watch;
  while (here_->load() < n) {
    if (watch.fair_ms() > patient_ms(15'000)) return false;
    nap();
  }
  return true;
}

double test_scale() {
  const char* text = getenv("MOECCL_TEST_SCALE");
  if (text != nullptr) return atof(text);
  return sanitized() ? 0.1 : 1.0;
}

int scaled(int n) { return std::max(1, static_cast<int>(n * test_scale())); }

uint64_t test_seed() {
  static const uint64_t seed = [] {
    const char* text = getenv("MOECCL_TEST_SEED");
    const bool fresh = text != nullptr && strcmp(text, "random") == 0;
    const uint64_t s = fresh ? static_cast<uint64_t>(time(nullptr)) : text != nullptr ? strtoull(text, nullptr, 0) : 1;
    printf("MOECCL_TEST_SEED=%llu\n", static_cast<unsigned long long>(s));
    return s;
  }();
  return seed;
}

}  // namespace moeccl::testing
