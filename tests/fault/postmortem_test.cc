// SPDX-License-Identifier: Apache-2.0
// Planted hangs: what each process leaves behind (MOECCL_DUMP), put together by `moeccl postmortem`, names the culprit;
// and `moeccl status` does while they hang. MOECCL_TEST_PLANTED sets how many (default 16; the full run is 50).
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kTimeoutMs = 700;

std::string tool() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "tools" / "moeccl").string();
}

std::string output_of(const std::string& command, int* code) {
  std::string text;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, n);
  *code = WEXITSTATUS(pclose(pipe));
  return text;
}

enum class Hang { kMissing, kOrder, kCount, kKilled, kReceive, kCircle, kLate, kStopped };
constexpr const char* kNames[] = {"missing", "order", "count", "killed", "receive", "circle", "late", "stopped"};

struct Plan {
  Hang hang;
  int n, victim, before;  // before: collectives that all make
};

Plan draw(int i, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int n = 2 + static_cast<int>(random() % 3);
  return {static_cast<Hang>(i % 8), n, static_cast<int>(random() % static_cast<uint64_t>(n)),
          static_cast<int>(random() % 80)};
}

moecclResult_t reduce(moecclComm_t comm, size_t count = 100) {
  std::vector<float> x(count, 1.f);
  return moecclAllReduce(x.data(), x.data(), count, moecclFloat32, moecclSum, comm, nullptr);
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// One rank's part; every call may fail.
void hang(const Plan& p, int rank, moecclComm_t comm) {
  const bool victim = rank == p.victim;
  moecclComm_t second = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &second, nullptr), comm);
  for (int i = 0; i < p.before; ++i) MOECCL_ASSERT_COMM_OK(reduce(comm), comm);
  const int next = (rank + 1) % p.n;
  float word = 0;
  switch (p.hang) {
    case Hang::kMissing:
    case Hang::kKilled:
    case Hang::kStopped:
      if (!victim) (void)reduce(comm);
      if (victim) sleep_ms(3 * kTimeoutMs);
      break;
    case Hang::kLate:
      if (victim) sleep_ms(2 * kTimeoutMs);
      (void)reduce(comm);
      break;
    case Hang::kOrder:
      (void)reduce(victim ? second : comm);
      (void)reduce(victim ? comm : second);
      break;
    case Hang::kCount:
      (void)reduce(comm, victim ? 104 : 100);
      break;
    case Hang::kReceive:
      if (!victim) (void)moecclRecv(&word, 1, moecclFloat32, p.victim, comm, nullptr);
      if (victim) sleep_ms(3 * kTimeoutMs);
      break;
    case Hang::kCircle:
      (void)moecclRecv(&word, 1, moecclFloat32, next, comm, nullptr);
      break;
  }
  (void)moecclCommDestroy(second);
}

// What the report must say of it.
std::string expected(const Plan& p) {
  const std::string victim = "rank " + std::to_string(p.victim);
  switch (p.hang) {
    case Hang::kOrder:
    case Hang::kCircle:
      return "each of these waits for the next one";
    case Hang::kCount:
      return "Calls differ";
    default:
      return "Culprit: " + victim + " of communicator";
  }
}

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/moeccl-postmortem-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_; }
  std::string files() const {
    std::string all;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) all += " " + entry.path().string();
    return all;
  }

 private:
  std::string path_;
};

TEST(PostMortem, NamesTheCulpritOfPlantedHangs) {
  const char* asked = getenv("MOECCL_TEST_PLANTED");
  const int planted = asked != nullptr ? atoi(asked) : scaled(16);
  int named = 0;
  for (int i = 0; i < planted; ++i) {
    const Plan p = draw(i, test_seed() + static_cast<uint64_t>(i));
    const Folder folder;
    ASSERT_EQ(setenv("MOECCL_DUMP", (folder.path() + "/job").c_str(), 1), 0);
    RankOptions options;
    options.mode = RankMode::kProcesses;
    options.config.timeout_ms = kTimeoutMs;
    options.check_leaks = false;
    if (p.hang == Hang::kKilled || p.hang == Hang::kStopped) {
      options.may_die = {p.victim};
      options.on_running = [&](const std::vector<pid_t>& pids) {
        sleep_ms(kTimeoutMs / 3);
        kill(pids[static_cast<size_t>(p.victim)], p.hang == Hang::kKilled ? SIGKILL : SIGSTOP);
        sleep_ms(2 * kTimeoutMs);
        kill(pids[static_cast<size_t>(p.victim)], SIGKILL);
      };
    }
    ASSERT_TRUE(run_ranks(
        p.n, [&](int rank, moecclComm_t comm) { hang(p, rank, comm); }, options));
    int code = 0;
    const std::string text = output_of(tool() + " postmortem" + folder.files() + " 2>&1", &code);
    const bool right =
        code == 0 && text.find(expected(p)) != std::string::npos &&
        (p.hang != Hang::kCount || text.find("rank " + std::to_string(p.victim) + " calls") != std::string::npos);
    named += right ? 1 : 0;
    EXPECT_TRUE(right) << kNames[static_cast<int>(p.hang)] << ", " << p.n << " ranks, victim " << p.victim << ", after "
                       << p.before << " calls; exit code " << code << "\n"
                       << text;
  }
  printf("%d of %d planted hangs: the culprit is named\n", named, planted);
  unsetenv("MOECCL_DUMP");
}

TEST(PostMortem, StatusOfProcessesThatHangNamesTheRankThatHasNotCalled) {
  RankOptions options;
  options.mode = RankMode::kProcesses;
  Shared<std::atomic<int>> go;
  std::string text, alone;
  int code = 0, code_alone = 0;
  options.on_running = [&](const std::vector<pid_t>& pids) {
    sleep_ms(300);
    std::string all = tool() + " status";
    for (const pid_t pid : pids) all += " " + std::to_string(pid);
    text = output_of(all + " 2>&1", &code);
    alone = output_of(tool() + " status --json " + std::to_string(pids[0]) + " 2>&1", &code_alone);
    go->store(1);
  };
  ASSERT_TRUE(run_ranks(
      3,
      [&](int rank, moecclComm_t comm) {
        MOECCL_ASSERT_COMM_OK(reduce(comm), comm);
        while (rank == 2 && go->load() == 0) sleep_ms(1);
        MOECCL_ASSERT_COMM_OK(reduce(comm), comm);
      },
      options));
  EXPECT_EQ(code, 0) << text;
  EXPECT_NE(text.find("Culprit: rank 2 of communicator"), std::string::npos) << text;
  EXPECT_NE(text.find("has not made call #2: its last call, allreduce #1"), std::string::npos) << text;
  EXPECT_EQ(code_alone, 0) << alone;
  EXPECT_NE(alone.find("\"format\": \"moeccl-status\""), std::string::npos) << alone;
}

TEST(PostMortem, StatusRefusesWhatHasNoCommunicator) {
  int code = 0;
  const std::string none = output_of(tool() + " status 1 2>&1", &code);
  EXPECT_EQ(code, 1) << none;
  EXPECT_NE(none.find("pid 1: "), std::string::npos) << none;
  const std::string gone = output_of(tool() + " status 4194303 2>&1", &code);
  EXPECT_EQ(code, 1);
  EXPECT_NE(gone.find("there is no such process on this host"), std::string::npos) << gone;
}

}  // namespace
}  // namespace moeccl::testing
