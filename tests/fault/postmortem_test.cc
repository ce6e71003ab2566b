// SPDX-License-Identifier: Apache-2.0
// `moeccl status` of processes that hang, and `moeccl postmortem` of jobs too large to run here, whose files are made
// by hand. planted_hangs_test has hangs of real processes.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/postmortem.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

moecclResult_t reduce(moecclComm_t comm) {
  std::vector<float> x(100, 1.f);
  return moecclAllReduce(x.data(), x.data(), x.size(), moecclFloat32, moecclSum, comm, nullptr);
}

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

TEST(PostMortem, StatusOfProcessesThatHangNamesTheRankThatHasNotCalled) {
  RankOptions options;
  options.mode = RankMode::kProcesses;
  Shared<std::atomic<int>> go;
  std::string text, alone, one;
  int code = 0, code_alone = 0, code_one = 0;
  options.on_running = [&](const std::vector<pid_t>& pids) {
    sleep_ms(patient_ms(300));
    std::string all = tool() + " status";
    for (const pid_t pid : pids) all += " " + std::to_string(pid);
    text = output_of(all, &code);
    alone = output_of(tool() + " status --json " + std::to_string(pids[0]), &code_alone);
    one = output_of(tool() + " status " + std::to_string(pids[0]), &code_one);
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
  // Nothing is known of the ranks of processes that it was not asked about.
  EXPECT_EQ(code_one, 0) << one;
  EXPECT_NE(one.find("Not asked: rank 2 of communicator"), std::string::npos) << one;
  EXPECT_NE(one.find("; give its pid too."), std::string::npos) << one;
  EXPECT_EQ(one.find("Culprit"), std::string::npos) << one;
  EXPECT_EQ(one.find("have made the same calls"), std::string::npos) << one;
}

TEST(PostMortem, StatusSaysWhichHostsItWasNotAskedOf) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {1, 1}, .named = true}, &why);
  ASSERT_NE(hosts, nullptr) << why;
  RankOptions options;
  options.mode = RankMode::kProcesses;
  options.hosts = hosts.get();
  Shared<std::atomic<int>> go;
  std::string text;
  int code = 0;
  options.on_running = [&](const std::vector<pid_t>& pids) {
    sleep_ms(patient_ms(300));
    text = output_of(tool() + " status " + std::to_string(pids[0]) + " " + std::to_string(pids[1]), &code);
    go->store(1);
  };
  ASSERT_TRUE(run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        while (rank == 3 && go->load() == 0) sleep_ms(1);
        MOECCL_ASSERT_COMM_OK(reduce(comm), comm);
      },
      options));
  EXPECT_EQ(code, 0) << text;
  EXPECT_NE(text.find("Not asked: host test host 1, with ranks 2, 3 of communicator"), std::string::npos) << text;
  EXPECT_EQ(text.find("Culprit"), std::string::npos) << text;
}

// Writes files of 128 ranks on 16 hosts that all wait in call #9. The ranks for which `left_file` is true have left a
// file. A wait names only the first 32 ranks, because the recorder keeps no more.
void write_large_job(const Folder& folder, const std::vector<std::string>& names,
                     const std::function<bool(int rank)>& left_file) {
  constexpr int kRanks = 128, kOnHost = 8;
  nlohmann::json hosts = nlohmann::json::array();
  for (int first = 0; first < kRanks; first += kOnHost) {
    const std::string number = std::to_string(first / kOnHost);
    hosts.push_back({{"name", names[static_cast<size_t>(first / kOnHost)]},
                     {"host_id", "id-" + number},
                     {"ranks", {{first, first + kOnHost - 1}}}});
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (!left_file(rank)) continue;
    std::vector<int> peers;
    for (int p = 0; p < 33; ++p) {
      if (p != rank && peers.size() < 32) peers.push_back(p);
    }
    const nlohmann::json call = {{"sequence", 9},          {"op", "allreduce"}, {"count", 100},   {"type", "float32"},
                                 {"reduce", "sum"},        {"root", 0},         {"plan", "ring"}, {"state", "failed"},
                                 {"began_ms_ago", 1000.0}, {"took_ms", 1000.0}};
    const nlohmann::json wait = {{"what", "allreduce #9"}, {"sequence", 9}, {"thread", rank},
                                 {"blocked_ms", 1000.0},   {"for", peers},  {"for_total", kRanks - 1}};
    const nlohmann::json comm = {{"group", "00000000000000aa"},
                                 {"name", ""},
                                 {"memory", "host"},
                                 {"rank", rank},
                                 {"n_ranks", kRanks},
                                 {"hosts", hosts},
                                 {"state", "failed"},
                                 {"code", "moecclTimeout"},
                                 {"failure", "allreduce #9 did not finish"},
                                 {"failed_unix_ms", 1'000'000},
                                 {"operations", {call}},
                                 {"waits", {wait}}};
    const size_t host = static_cast<size_t>(rank / kOnHost);
    const nlohmann::json all = {{"format", "moeccl-status"}, {"version", 1},
                                {"host", names[host]},       {"host_id", "id-" + std::to_string(host)},
                                {"pid", 1000 + rank},        {"written_unix_ms", 1'000'000},
                                {"communicators", {comm}}};
    std::ofstream(folder.path() + "/job." + std::to_string(rank) + ".json") << all;
  }
}

std::vector<std::string> node_names() {
  std::vector<std::string> names;
  for (int h = 0; h < 16; ++h) names.push_back("node" + std::to_string(h));
  return names;
}

TEST(PostMortem, ADeadHostIsNamedThoughTheWaitsOfALargeJobDoNotListIt) {
  const Folder folder;
  write_large_job(folder, node_names(), [](int rank) { return rank / 8 != 12; });
  int code = 0;
  const std::string text = folder.report(&code);
  EXPECT_EQ(code, 0);
  const size_t at = text.find("Culprit: host node12 is gone, with ranks 96, 97, 98, 99, 100, 101, 102, 103 of");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_EQ(text.find("Culprit", at + 1), std::string::npos) << text;
}

TEST(PostMortem, AHostOfWhichOneRankHasLeftAFileIsNotCalledGone) {
  const Folder folder;
  write_large_job(folder, node_names(), [](int rank) { return rank / 8 != 12 || rank == 103; });
  int code = 0;
  const std::string text = folder.report(&code);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(text.find("is gone, with"), std::string::npos) << text;
  EXPECT_NE(text.find("Culprit: rank 96 of communicator 00000000 has left nothing"), std::string::npos) << text;
  EXPECT_EQ(text.find("Culprit: rank 103"), std::string::npos) << text;
}

// Containers of one host may have its name, and processes of equal numbers.
TEST(PostMortem, ADumpReplacesNoOtherProcesssFile) {
  const Folder folder;
  ASSERT_EQ(setenv("MOECCL_DUMP", (folder.path() + "/job.%h.json").c_str(), 1), 0);
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.timeout_ms = 300;
  Meeting late;
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        char host[256] = {};
        gethostname(host, sizeof(host) - 1);
        const std::string mine = folder.path() + "/job." + host + "." + std::to_string(getpid());
        std::ofstream(mine + ".json") << "of another process";
        if (rank == 1) {
          EXPECT_TRUE(late.wait_for(1));
          return;
        }
        for (int i = 0; i < 2; ++i) {  // the second one replaces the first
          float x = 0;
          EXPECT_NE(moecclAllReduce(&x, &x, 1, moecclFloat32, moecclSum, comm, nullptr), moecclSuccess);
        }
        late.arrive();
        EXPECT_EQ(std::filesystem::file_size(mine + ".json"), 18u);
        EXPECT_GT(std::filesystem::file_size(mine + "-2.json"), 100u);
        EXPECT_FALSE(std::filesystem::exists(mine + "-3.json"));
      },
      options);
  unsetenv("MOECCL_DUMP");
}

// A job that fails hours later would leave nothing.
TEST(PostMortem, AFolderThatCannotBeWrittenIsAWarningOfTheFirstCommunicator) {
  namespace fs = std::filesystem;
  const Folder folder;
  fs::permissions(folder.path(), fs::perms::all);
  for (const auto& [name, reason] :
       {std::pair{"missing", "No such file or directory"}, {"locked", "Permission denied"}, {"usable", ""}}) {
    SCOPED_TRACE(name);
    const std::string where = folder.path() + "/" + name, said = folder.path() + "/" + name + ".log";
    if (std::string_view(name) != "missing") fs::create_directory(where);
    if (std::string_view(name) == "locked") fs::permissions(where, fs::perms(0555));
    if (std::string_view(name) == "usable") fs::permissions(where, fs::perms::all);
    ASSERT_EQ(setenv("MOECCL_DUMP", (where + "/job").c_str(), 1), 0);
    ASSERT_EQ(setenv("MOECCL_DEBUG_FILE", said.c_str(), 1), 0);
    run_ranks(1,
              [&, reason = reason](int, moecclComm_t) {
                if (geteuid() == 0) {
                  ASSERT_EQ(seteuid(65534), 0);  // root may write everywhere
                }
                for (int i = 0; i < 2; ++i) {  // the second one says nothing more
                  moecclComm_t comm = nullptr;
                  moecclUniqueId id;
                  MOECCL_ASSERT_OK(moecclGetUniqueId(&id));
                  MOECCL_ASSERT_OK(moecclCommInitRank(&comm, 1, id, 0));
                  MOECCL_EXPECT_OK(moecclCommDestroy(comm));
                }
                std::ifstream file(said);
                const std::string text((std::istreambuf_iterator<char>(file)), {});
                const size_t at = text.find("MOECCL_DUMP=" + where + "/job: folder " + where + "/: ");
                if (*reason == 0) {
                  EXPECT_EQ(text.find("MOECCL_DUMP"), std::string::npos) << text;
                  return;
                }
                ASSERT_NE(at, std::string::npos) << text;
                EXPECT_NE(text.find(reason, at), std::string::npos) << text;
                EXPECT_EQ(text.find("MOECCL_DUMP", at + 1), std::string::npos) << text;
              },
              {.mode = RankMode::kProcesses, .init = false});
  }
  unsetenv("MOECCL_DUMP");
  unsetenv("MOECCL_DEBUG_FILE");
}

TEST(PostMortem, LeavesOutFilesThatItCannotUse) {
  const Folder folder;
  write_large_job(folder, node_names(), [](int rank) { return rank / 8 != 12; });
  std::ifstream whole(folder.path() + "/job.0.json");
  const std::string text((std::istreambuf_iterator<char>(whole)), {});
  std::ofstream(folder.path() + "/job.cut.json") << text.substr(0, text.size() / 2);
  nlohmann::json wrong = nlohmann::json::parse(text);
  wrong["communicators"][0]["rank"] = 128;
  std::ofstream(folder.path() + "/job.wrong.json") << wrong;
  int code = 0;
  const std::string said = folder.report(&code);
  EXPECT_EQ(code, 0) << said;
  EXPECT_NE(said.find("Culprit: host node12 is gone"), std::string::npos) << said;
  EXPECT_NE(said.find("job.cut.json is not what moecclStatus writes: parse error at line 1"), std::string::npos)
      << said;
  EXPECT_NE(said.find("job.wrong.json names rank 128 of 128 ranks"), std::string::npos) << said;
  (void)output_of(tool() + " postmortem " + folder.path() + "/job.cut.json", &code);
  EXPECT_EQ(code, 2);
}

TEST(PostMortem, HostsOfTheSameNameAreToldApart) {
  const Folder folder;
  write_large_job(folder, std::vector<std::string>(16, "node"), [](int rank) { return rank / 8 != 3; });
  int code = 0;
  const std::string text = folder.report(&code);
  EXPECT_NE(text.find("Culprit: host node (id id-3) is gone, with ranks 24, 25,"), std::string::npos) << text;
}

// Two ranks use two communicators in opposite orders, give up, and then still make the other call.
TEST(PostMortem, ARankThatWaitedElsewhereUntilItCameTooLateIsPartOfACircle) {
  const Folder folder;
  for (int rank = 0; rank < 2; ++rank) {
    nlohmann::json comms = nlohmann::json::array();
    for (int c = 0; c < 2; ++c) {
      const bool first = c == rank;
      const nlohmann::json call = {{"sequence", 5},     {"op", "allreduce"}, {"count", 100},
                                   {"type", "float32"}, {"reduce", "sum"},   {"root", 0},
                                   {"plan", "ring"},    {"state", "failed"}, {"began_ms_ago", first ? 2100.0 : 90.0}};
      const nlohmann::json wait = {{"what", "allreduce #5"}, {"sequence", 5},
                                   {"thread", 1000 + rank},  {"blocked_ms", first ? 2000.0 : 1.0},
                                   {"for", {1 - rank}},      {"for_total", 1}};
      comms.push_back({{"group", c == 0 ? "00000000000000aa" : "00000000000000bb"},
                       {"name", ""},
                       {"memory", "host"},
                       {"rank", rank},
                       {"n_ranks", 2},
                       {"state", "failed"},
                       {"code", "moecclTimeout"},
                       {"failure", "allreduce #5 did not finish"},
                       {"failed_unix_ms", first ? 999'900 : 999'911},
                       {"operations", {call}},
                       {"waits", {wait}}});
    }
    const nlohmann::json all = {{"format", "moeccl-status"}, {"version", 1},       {"host", "node0"},
                                {"host_id", "id-0"},         {"pid", 1000 + rank}, {"written_unix_ms", 1'000'000},
                                {"communicators", comms}};
    std::ofstream(folder.path() + "/job." + std::to_string(rank) + ".json") << all;
  }
  int code = 0;
  const std::string text = folder.report(&code);
  EXPECT_EQ(code, 0);
  EXPECT_NE(text.find("Culprit: each of these waits for the next one"), std::string::npos) << text;
  EXPECT_EQ(text.find("came too late"), std::string::npos) << text;
}

constexpr int64_t kHourMs = 3'600'000;

// Two ranks on two hosts time out in call #5; rank 0 began it 2 s before, and rank 1 gave up 100 ms later than rank 0.
// Rank 1's clock is `ahead_ms` ahead, and rank 1 began the call `rank_1_began_ms` before rank 0 gave up.
void write_two_hosts(const Folder& folder, double rank_1_began_ms, int64_t ahead_ms) {
  const nlohmann::json hosts = {
      {{"name", "node"}, {"host_id", "id-0"}, {"ranks", {{0, 0}}}},
      {{"name", "node"}, {"host_id", "id-1"}, {"ranks", {{1, 1}}}, {"clock_ahead_ms", ahead_ms}}};
  for (int rank = 0; rank < 2; ++rank) {
    const int64_t written = 1'000'000'000'000 + rank * (ahead_ms + 100);
    const double began = rank == 0 ? 2000 : 100 + rank_1_began_ms;
    const nlohmann::json call = {{"sequence", 5},     {"op", "allreduce"}, {"count", 100},
                                 {"type", "float32"}, {"reduce", "sum"},   {"root", 0},
                                 {"plan", "ring"},    {"state", "failed"}, {"began_ms_ago", began}};
    const nlohmann::json wait = {{"what", "allreduce #5"}, {"sequence", 5},     {"thread", 7},
                                 {"blocked_ms", began},    {"for", {1 - rank}}, {"for_total", 1}};
    const nlohmann::json comm = {{"group", "00000000000000aa"},
                                 {"name", ""},
                                 {"memory", "host"},
                                 {"rank", rank},
                                 {"n_ranks", 2},
                                 {"hosts", hosts},
                                 {"state", "failed"},
                                 {"code", "moecclTimeout"},
                                 {"failure", "allreduce #5 did not finish"},
                                 {"failed_unix_ms", written},
                                 {"operations", {call}},
                                 {"waits", {wait}}};
    // Machines that were made from one image have one name, and start the same program with the same number.
    const nlohmann::json all = {{"format", "moeccl-status"},
                                {"version", 1},
                                {"host", "node"},
                                {"host_id", "id-" + std::to_string(rank)},
                                {"pid", 77},
                                {"written_unix_ms", written},
                                {"communicators", {comm}}};
    std::ofstream(folder.path() + "/job." + std::to_string(rank) + ".json") << all;
  }
}

TEST(PostMortem, ClocksThatDifferMakeNoRankLate) {
  const Folder folder;
  write_two_hosts(folder, 2000, 3 * kHourMs);
  int code = 0;
  const std::string text = folder.report(&code);
  EXPECT_EQ(text.find("came too late"), std::string::npos) << text;
  EXPECT_NE(text.find("First failure: rank 0 of"), std::string::npos) << text;
  EXPECT_NE(text.find("The clock of host node (id id-1) was 10800.0 s ahead of that of host node (id id-0)"),
            std::string::npos)
      << text;
}

TEST(PostMortem, ARankThatIsLateIsNamedThoughItsClockDiffers) {
  const Folder folder;
  write_two_hosts(folder, -20, -3 * kHourMs);
  int code = 0;
  const std::string text = folder.report(&code);
  EXPECT_EQ(code, 0);
  EXPECT_NE(text.find("Culprit: rank 1 of communicator 00000000 (pid 77 on node) came too late"), std::string::npos)
      << text;
}

// Pairs of hosts a and b, c and d, b and c, each with the second clock an hour ahead of the first. Nothing came from b.
TEST(PostMortem, ClocksAreComparedThroughOtherCommunicators) {
  const Folder folder;
  const auto pair = [](const char* group, const char* one, const char* other, uint32_t rank) {
    const nlohmann::json hosts = {
        {{"name", one}, {"host_id", one}, {"ranks", {{0, 0}}}},
        {{"name", other}, {"host_id", other}, {"ranks", {{1, 1}}}, {"clock_ahead_ms", kHourMs}}};
    return nlohmann::json{{"group", group},
                          {"name", ""},
                          {"memory", "host"},
                          {"rank", rank},
                          {"n_ranks", 2},
                          {"hosts", hosts},
                          {"state", "running"},
                          {"operations", nlohmann::json::array()},
                          {"waits", nlohmann::json::array()}};
  };
  const auto write = [&folder](const char* host, const nlohmann::json& communicators) {
    std::ofstream(folder.path() + "/job." + host + ".json") << nlohmann::json{{"format", "moeccl-status"},
                                                                              {"version", 1},
                                                                              {"host", host},
                                                                              {"host_id", host},
                                                                              {"pid", 77},
                                                                              {"written_unix_ms", 1'000'000'000'000},
                                                                              {"communicators", communicators}};
  };
  write("a", nlohmann::json::array({pair("00000000000000ab", "a", "b", 0)}));
  write("c", nlohmann::json::array({pair("00000000000000cd", "c", "d", 0), pair("00000000000000bc", "b", "c", 1)}));
  write("d", nlohmann::json::array({pair("00000000000000cd", "c", "d", 1)}));
  int code = 0;
  const std::string text = folder.report(&code);
  for (const char* line : {"The clock of host b was 3600.0 s ahead of that of host a,",
                           "The clock of host c was 7200.0 s ahead of that of host a,",
                           "The clock of host d was 10800.0 s ahead of that of host a,"})
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
}

TEST(PostMortem, StatusRefusesWhatHasNoCommunicator) {
  int code = 0;
  const std::string none = output_of(tool() + " status 1", &code);
  EXPECT_EQ(code, 1) << none;
  EXPECT_NE(none.find("pid 1: "), std::string::npos) << none;
  const std::string gone = output_of(tool() + " status 4194303", &code);
  EXPECT_EQ(code, 1);
  EXPECT_NE(gone.find("there is no such process on this host"), std::string::npos) << gone;
}

}  // namespace
}  // namespace moeccl::testing
