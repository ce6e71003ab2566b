// SPDX-License-Identifier: Apache-2.0
// Profiles through the C interface: measuring, files, MOECCL_PROFILE and MOECCL_CALIBRATE, and that all ranks agree or
// all fail in the same way.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "tests/support/ranks.h"
#include "tests/support/variables.h"

namespace moeccl::testing {
namespace {

constexpr double kBudgetMs = 1500;
constexpr size_t kMaxBytes = 64 << 10;

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/moeccl_profile_XXXXXX";
    path_ = mkdtemp(name) == nullptr ? "/nonexistent" : name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read_all(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_all(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::string minimal(double step_ns) {
  return "{\"moeccl_profile\": 1, \"machine\": {\"step_ns\": " + std::to_string(step_ns) + "}}";
}

// Checks that sums are right, whatever the profile.
void check_works(int rank, int n, moecclComm_t comm) {
  for (const size_t count : {size_t{3}, size_t{5000}}) {
    std::vector<int32_t> in(count, rank + 1), out(count);
    MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), count, moecclInt32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(out[count - 1], n * (n + 1) / 2);
  }
}

TEST(Profile, MeasuredOneIsInUseOnAllRanksAndComesBackFromItsFile) {
  const Folder folder;
  for (const RankMode mode : {RankMode::kThreads, RankMode::kProcesses}) {
    const std::string path = folder.file(mode_name(mode));
    std::string text;
    // A loaded machine measures less within a budget, which is not a failure: try again with a larger one.
    const auto complete = [&] {
      return text.find("\"op\": \"AllReduce\"") != std::string::npos && text.find("\"standard\"") != std::string::npos;
    };
    for (double budget_ms = kBudgetMs; !complete() && budget_ms < 10 * kBudgetMs; budget_ms *= 3) {
      run_ranks(3,
                [&](int rank, moecclComm_t comm) {
                  const moecclResult_t calibrated = moecclCalibrate(comm, budget_ms, kMaxBytes);
                  if (std::string(moecclGetLastError(comm)).find("the budget of") != std::string::npos) return;
                  ASSERT_EQ(calibrated, moecclSuccess) << moecclGetLastError(comm);
                  check_works(rank, 3, comm);
                  moecclPlanInfo_t info{};
                  info.size = sizeof(info);
                  MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpAllReduce, 4096, moecclFloat32, &info), comm);
                  EXPECT_GT(info.predicted_us, 0);
                  if (rank == 0) {
                    MOECCL_ASSERT_COMM_OK(moecclProfileSave(comm, path.c_str()), comm);
                  }
                  check_works(rank, 3, comm);  // the other ranks read the file after rank 0 has written it
                  MOECCL_ASSERT_COMM_OK(moecclProfileLoad(comm, path.c_str()), comm);
                  moecclPlanInfo_t again = info;
                  MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpAllReduce, 4096, moecclFloat32, &again), comm);
                  EXPECT_STREQ(again.algorithm, info.algorithm);
                  EXPECT_DOUBLE_EQ(again.predicted_us, info.predicted_us);
                  check_works(rank, 3, comm);
                },
                {.mode = mode});
      text = read_all(path);
    }
    // The codec was timed: its rates are not the constants.
    if (complete()) {
      for (const char* constant : {"\"encode_bytes_per_ns\": 5.4,", "\"decode_bytes_per_ns\": 10,"})
        EXPECT_EQ(text.find(constant), std::string::npos) << text.substr(0, 2000);
      EXPECT_NE(text.find("\"encode_bytes_per_ns\": "), std::string::npos);
    }
    // The checks above hold however little was measured and used.
    if (!complete()) GTEST_SKIP() << "the machine was too busy to measure all plans in " << 9 * kBudgetMs << " ms";
  }
}

// Messages over a pace also take the time of their copies, and long ones wait for their slots: over these links, 2 MiB
// take eight round trips. None of that is the link's.
TEST(Profile, APaceIsWhatTheTopologyStates) {
  const Folder folder;
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.topology = "node:2(bw=4GB/s,lat=715us) gpu:2(bw=8GB/s,lat=325us)";
  options.config.pace = 1;
  bool measured = false;
  for (double budget_ms = kBudgetMs; !measured && budget_ms < 30 * kBudgetMs; budget_ms *= 3) {
    run_ranks(
        4,
        [&](int rank, moecclComm_t comm) {
          const moecclResult_t calibrated = moecclCalibrate(comm, budget_ms, 1024);
          if (std::string(moecclGetLastError(comm)).find("the budget of") != std::string::npos) return;
          ASSERT_EQ(calibrated, moecclSuccess) << moecclGetLastError(comm);
          if (rank == 0) {
            MOECCL_ASSERT_COMM_OK(moecclProfileSave(comm, folder.file("p").c_str()), comm);
          }
        },
        options);
    const std::string text = read_all(folder.file("p"));
    measured = !text.empty();
    if (!measured) continue;
    for (const char* line : {R"({"name": "node", "alpha_ns": 715000, "bytes_per_ns": 4, "r2": )",
                             R"({"name": "gpu", "alpha_ns": 325000, "bytes_per_ns": 8, "r2": )"})
      EXPECT_NE(text.find(line), std::string::npos) << text.substr(text.find("\"levels\""), 600);
  }
  if (!measured) GTEST_SKIP() << "the machine was too busy to measure links";
}

// A profile claims that two plans are a thousand times faster than any machine, and one of them by far the faster one.
// Its time shows that the profile is wrong, and trials let the other one run too, at the same operations on all ranks,
// however each of them makes its calls.
TEST(Profile, PlansThatTakeLongerThanItSaysAreTriedAgainstOthers) {
  constexpr int kRanks = 4;
  const Folder folder;
  // In mixed mode, what orders two ranks of one process may have passed through another, where the sanitizer sees
  // nothing.
#if defined(__SANITIZE_THREAD__)
  constexpr RankMode kMode = RankMode::kThreads;
#else
  constexpr RankMode kMode = RankMode::kMixed;
#endif
  Shared<std::array<moecclPlanInfo_t, kRanks>> plans;
  const std::string measured = folder.file("measured"), wrong = folder.file("wrong");
  run_ranks(kRanks,
            [&](int rank, moecclComm_t comm) {
              // Plans that were not timed do not count as zero: the error says how much time is needed.
              ASSERT_EQ(moecclCalibrate(comm, 0.001, 1024), moecclInvalidArgument);
              EXPECT_NE(std::string(moecclGetLastError(comm)).find("give at least"), std::string::npos)
                  << moecclGetLastError(comm);
              MOECCL_ASSERT_COMM_OK(moecclCalibrate(comm, 10'000, 1024), comm);  // for the file's topology
              if (rank == 0) {
                MOECCL_ASSERT_COMM_OK(moecclProfileSave(comm, measured.c_str()), comm);
                std::string text = read_all(measured);
                text.resize(text.find("\"plans\""));
                for (const char* name : {"ring", "staged", "flat", "rd", "tree", "direct", "oneshot", "eager"}) {
                  const bool fast = std::strcmp(name, "ring") == 0 || std::strcmp(name, "staged") == 0;
                  for (const int reach : {1, 3, 5, 7}) {
                    text +=
                        std::string(text.back() == '}' ? ", " : "\"plans\": [") +
                        "{\"op\": \"AllReduce\", \"algorithm\": \"" + name + "\", \"reach\": " + std::to_string(reach) +
                        ", \"points\": [[64, " +
                        (fast ? (std::strcmp(name, "ring") == 0 ? "1], [1e6, 2" : "3], [1e6, 6") : "1e6], [1e6, 1e6") +
                        "]]}";
                  }
                }
                write_all(wrong, text + "]}");
              }
              check_works(rank, kRanks, comm);
              MOECCL_ASSERT_COMM_OK(moecclProfileLoad(comm, wrong.c_str()), comm);
              moecclStream_t stream = nullptr;
              MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
              constexpr size_t kCount = 8192;
              std::vector<int32_t> in(kCount, rank + 1), out(kCount);
              for (int i = 0; i < 340; ++i) {
                const bool group = (i + rank) % 3 == 0;
                moecclStream_t where = (i + rank) % 2 == 0 ? stream : nullptr;
                if (group) {
                  MOECCL_ASSERT_OK(moecclGroupStart());
                }
                MOECCL_ASSERT_COMM_OK(
                    moecclAllReduce(in.data(), out.data(), kCount, moecclInt32, moecclSum, comm, where), comm);
                if (group) {
                  MOECCL_ASSERT_COMM_OK(moecclGroupEnd(), comm);
                }
                if (i % 50 == 0) {
                  MOECCL_ASSERT_OK(moecclStreamSynchronize(stream));
                  ASSERT_EQ(out[kCount - 1], kRanks * (kRanks + 1) / 2) << i;
                }
              }
              MOECCL_ASSERT_OK(moecclStreamSynchronize(stream));
              MOECCL_ASSERT_OK(moecclStreamDestroy(stream));
              check_works(rank, kRanks, comm);
              char text[8192];
              MOECCL_ASSERT_COMM_OK(
                  moecclPlanExplain(comm, moecclOpAllReduce, kCount, moecclInt32, text, sizeof(text), nullptr), comm);
              const std::string page = text;
              EXPECT_NE(page.find("tried: ring "), std::string::npos) << page;
              EXPECT_NE(page.find(" us staged "), std::string::npos) << page;
              moecclPlanInfo_t info{};
              info.size = sizeof(info);
              MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpAllReduce, kCount, moecclInt32, &info), comm);
              (*plans)[static_cast<size_t>(rank)] = info;
            },
            {.mode = kMode});
  for (const moecclPlanInfo_t& info : *plans) EXPECT_STREQ(info.algorithm, plans->front().algorithm);
}

TEST(Profile, DifferentFilesAreTheSameErrorOnAllRanks) {
  const Folder folder;
  write_all(folder.file("0"), minimal(40));
  write_all(folder.file("1"), minimal(41));
  run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        const std::string path = folder.file(rank == 2 ? "1" : "0");
        EXPECT_EQ(moecclProfileLoad(comm, path.c_str()), moecclMismatch);
        EXPECT_NE(std::strstr(moecclGetLastError(comm), "rank 0 and rank 2 were given different profiles"), nullptr)
            << moecclGetLastError(comm);
        check_works(rank, 4, comm);  // with the previous profile
      },
      {.mode = RankMode::kMixed});
}

TEST(Profile, AFileThatOneRankCannotReadFailsOnAllRanks) {
  const Folder folder;
  write_all(folder.file("good"), minimal(40));
  write_all(folder.file("bad"), "{\"moeccl_profile\": 1,\n \"machine\": {\"step_ns\": -4}}");
  run_ranks(3,
            [&](int rank, moecclComm_t comm) {
              const std::string path = folder.file(rank == 1 ? "bad" : "good");
              const moecclResult_t result = moecclProfileLoad(comm, path.c_str());
              const std::string said = moecclGetLastError(comm);
              EXPECT_EQ(result, rank == 1 ? moecclInvalidArgument : moecclRemoteError) << said;
              EXPECT_NE(said.find(rank == 1 ? "bad:2:25: step_ns is -4" : "rank 1 has no profile"), std::string::npos)
                  << said;
              check_works(rank, 3, comm);
            },
            {.mode = RankMode::kProcesses});
}

void join(int n, const std::function<void(int rank, moecclResult_t result, moecclComm_t comm)>& then,
          const std::function<void(int rank)>& before = {}, const char* topology = nullptr) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.init = false;
  run_ranks(
      n,
      [&](int rank, moecclComm_t) {
        if (before) before(rank);
        moecclComm_t comm = nullptr;
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.init_timeout_ms = 30'000;
        config.timeout_ms = 30'000;
        config.topology = topology;
        const moecclResult_t result = moecclCommInitRankConfig(&comm, n, unique_id(), rank, &config);
        then(rank, result, comm);
        if (result == moecclSuccess) {
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        }
      },
      options);
}

TEST(Profile, TheVariableGivesItAtInit) {
  const Folder folder;
  write_all(folder.file("p"), minimal(12345));
  const Variables profile = {{"MOECCL_PROFILE", folder.file("p")}};
  join(2, [&](int rank, moecclResult_t result, moecclComm_t comm) {
    ASSERT_EQ(result, moecclSuccess) << moecclGetLastError(nullptr);
    check_works(rank, 2, comm);
    const std::string copy = folder.file("copy" + std::to_string(rank));
    MOECCL_ASSERT_COMM_OK(moecclProfileSave(comm, copy.c_str()), comm);
    EXPECT_NE(read_all(copy).find("\"step_ns\": 12345"), std::string::npos);
  });
}

TEST(Profile, AFileAtInitThatCannotBeReadIsNamedWithItsVariable) {
  const Variables profile = {{"MOECCL_PROFILE", "/nonexistent/profile"}};
  join(2, [&](int, moecclResult_t result, moecclComm_t) {
    EXPECT_NE(result, moecclSuccess);
    const std::string said = moecclGetLastError(nullptr);
    EXPECT_EQ(said, "MOECCL_PROFILE: /nonexistent/profile: cannot be opened: No such file or directory");
  });
}

TEST(Profile, DifferentFilesAtInitFailAllRanksAlike) {
  const Folder folder;
  for (const char* name : {"0", "1"}) {
    std::filesystem::create_directory(folder.file(name));
    write_all(folder.file(std::string(name) + "/p"), minimal(name[0] == '0' ? 40 : 41));
  }
  const Variables profile = {{"MOECCL_PROFILE", "p"}};
  join(
      3,
      [&](int, moecclResult_t result, moecclComm_t) {
        EXPECT_EQ(result, moecclMismatch);
        EXPECT_NE(std::strstr(moecclGetLastError(nullptr), "rank 0 and rank 1 were given different profiles"), nullptr)
            << moecclGetLastError(nullptr);
      },
      [&](int rank) { ASSERT_EQ(chdir(folder.file(rank == 1 ? "1" : "0").c_str()), 0); });
}

TEST(Profile, AVariableThatOneRankLacksIsNamedOnAllRanks) {
  join(
      3,
      [&](int, moecclResult_t result, moecclComm_t) {
        EXPECT_EQ(result, moecclMismatch);
        EXPECT_NE(std::strstr(moecclGetLastError(nullptr), "rank 0 and rank 2 disagree on MOECCL_PROFILE"), nullptr)
            << moecclGetLastError(nullptr);
      },
      [&](int rank) {
        if (rank == 2) setenv("MOECCL_PROFILE", "/nonexistent", 1);
      });
}

TEST(Profile, DifferentTopologiesFailAllRanksAlike) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.init = false;
  run_ranks(
      4,
      [&](int rank, moecclComm_t) {
        moecclComm_t comm = nullptr;
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.init_timeout_ms = 30'000;
        config.topology = rank == 3 ? "node:4 gpu:1" : "node:2 gpu:2";
        EXPECT_EQ(moecclCommInitRankConfig(&comm, 4, unique_id(), rank, &config), moecclMismatch);
        EXPECT_NE(std::strstr(moecclGetLastError(nullptr), "rank 0 and rank 3 disagree"), nullptr)
            << moecclGetLastError(nullptr);
      },
      options);
}

TEST(Profile, IsMeasuredOnceAndThenFoundInTheUsersCache) {
  const Folder folder;
  const Variables cache = {{"XDG_CACHE_HOME", folder.path()}};
  const auto joins = [&](int64_t budget_ms, const char* topology = nullptr) {
    const Variables calibrate = {{"MOECCL_CALIBRATE", std::to_string(budget_ms)}};
    join(
        2,
        [&](int rank, moecclResult_t result, moecclComm_t comm) {
          ASSERT_EQ(result, moecclSuccess) << moecclGetLastError(nullptr);
          check_works(rank, 2, comm);
        },
        {}, topology);
  };
  const auto cached = [&] {
    std::map<std::string, std::string> files;  // texts by path
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder.file("moeccl"), ignored))
      files[entry.path()] = read_all(entry.path());
    return files;
  };
  // A busy machine may need a larger budget before it has a result.
  const auto measures = [&](const char* topology = nullptr) {
    const auto before = cached();
    for (int64_t budget_ms = 1200; budget_ms < 100'000 && cached() == before; budget_ms *= 2)
      joins(budget_ms, topology);
    return cached().size();
  };
  ASSERT_EQ(measures(), 1u);
  const auto [path, first] = *cached().begin();
  EXPECT_NE(first.find("\"n_ranks\": 2"), std::string::npos);
  joins(1200);
  EXPECT_EQ(read_all(path), first);  // two measurements never give the same times
  // Another topology has another file, so have other kernels, and a broken file is measured again.
  EXPECT_EQ(measures("node:2 gpu:1"), 2u);
  {
    const Variables kernels = {{"MOECCL_KERNELS", "reference"}};
    EXPECT_EQ(measures(), 3u);
  }
  write_all(path, first.substr(0, first.size() / 2) + "broken");
  EXPECT_EQ(measures(), 3u);
  const std::string again = read_all(path);
  EXPECT_NE(again.find("\"n_ranks\": 2"), std::string::npos) << again;
  EXPECT_EQ(again.find("broken"), std::string::npos) << again;
  EXPECT_NE(again, first);
}

// A budget that usually suffices may be too short on a busy machine.
TEST(Profile, TooLittleTimeAtInitLeavesTheCommunicatorWithoutAProfile) {
  const Folder folder;
  const Variables cache = {{"XDG_CACHE_HOME", folder.path()}};
  const Variables calibrate = {{"MOECCL_CALIBRATE", "1"}};
  join(2, [&](int rank, moecclResult_t result, moecclComm_t comm) {
    ASSERT_EQ(result, moecclSuccess) << moecclGetLastError(nullptr);
    check_works(rank, 2, comm);
  });
  EXPECT_FALSE(std::filesystem::exists(folder.file("moeccl")));
}

// The heap has no room for what calibration would measure there: plans for buffers in it keep their prices.
TEST(Profile, IsMeasuredWithoutAHeapThatIsTooSmall) {
  const Folder folder;
  const Variables calibrate = {{"MOECCL_CALIBRATE", std::to_string(patient_ms(1200))},
                               {"MOECCL_HEAP_BYTES", "16M"},
                               {"XDG_CACHE_HOME", folder.path()}};
  join(2, [&](int rank, moecclResult_t result, moecclComm_t comm) {
    ASSERT_EQ(result, moecclSuccess) << moecclGetLastError(nullptr);
    check_works(rank, 2, comm);
  });
}

// The file describes the communicator that grows.
TEST(Profile, AFileThatDoesNotFitWhatAGrowMakesIsLeftOut) {
  const Folder folder;
  write_all(folder.file("p"),
            "{\"moeccl_profile\": 1, \"machine\": {\"step_ns\": 12345}, \"levels\": [{\"name\": \"node\", "
            "\"alpha_ns\": 7000, \"bytes_per_ns\": 2}]}");
  const Variables profile = {{"MOECCL_PROFILE", folder.file("p")}};
  Shared<moecclUniqueId> id;
  Meeting made;
  RankOptions options{.mode = RankMode::kProcesses};
  options.init = false;
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        moecclComm_t old = nullptr, grown = nullptr;
        if (rank < 2) {
          config.topology = "node:2(bw=2GB/s,lat=7us)";
          MOECCL_ASSERT_OK(moecclCommInitRankConfig(&old, 2, unique_id(), rank, &config));
          if (rank == 0) {
            MOECCL_ASSERT_COMM_OK(moecclCommGetUniqueId(old, &*id), old);
            made.arrive();
          }
        }
        EXPECT_TRUE(made.wait_for(1));
        config.topology = "host:3";
        MOECCL_ASSERT_COMM_OK(moecclCommGrow(old, 3, rank == 1 ? nullptr : &*id, rank < 2 ? -1 : rank, &grown, &config),
                              old);
        check_works(rank, 3, grown);
        MOECCL_EXPECT_OK(moecclCommDestroy(grown));
        if (old != nullptr) {
          MOECCL_EXPECT_OK(moecclCommDestroy(old));
        }
      },
      options);
}

// A part of the ranks has other levels than the profile's file, and takes the entries that apply.
TEST(Profile, APartOfTheRanksTakesTheLevelsThatItHas) {
  const Folder folder;
  write_all(folder.file("p"),
            "{\"moeccl_profile\": 1, \"machine\": {\"step_ns\": 12345}, \"levels\": [{\"name\": \"node\", "
            "\"alpha_ns\": 7000, "
            "\"bytes_per_ns\": 2}, {\"name\": \"gpu\", \"alpha_ns\": 3000, \"bytes_per_ns\": 4}]}");
  const Variables profile = {{"MOECCL_PROFILE", folder.file("p")}};
  join(
      4,
      [&](int rank, moecclResult_t result, moecclComm_t comm) {
        ASSERT_EQ(result, moecclSuccess) << moecclGetLastError(nullptr);
        moecclComm_t part = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, rank / 2, rank, &part, nullptr), comm);
        check_works(rank % 2, 2, part);
        const std::string copy = folder.file("part" + std::to_string(rank));
        MOECCL_ASSERT_COMM_OK(moecclProfileSave(part, copy.c_str()), part);
        EXPECT_NE(read_all(copy).find("\"step_ns\": 12345"), std::string::npos);
        char page[4096];
        MOECCL_ASSERT_COMM_OK(
            moecclPlanExplain(part, moecclOpAllReduce, 1000, moecclFloat32, page, sizeof(page), nullptr), part);
        EXPECT_NE(std::strstr(page, "of the communicator that this one comes from"), nullptr) << page;
        MOECCL_EXPECT_OK(moecclCommDestroy(part));
      },
      {}, "node:2(bw=2GB/s,lat=7us) gpu:2(bw=4GB/s,lat=3us)");
}

// As a communicator of these ranks does, by default.
TEST(Profile, ALayersCheckGoesByItsLongLines) {
  const Folder folder;
  write_all(folder.file("far.json"),
            R"({"moeccl_profile": 1, "levels": [{"name": "node", "alpha_ns": 20e6, "bytes_per_ns": 1.25},
                                               {"name": "gpu"}]})");
  const auto check = [] {
    moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
    c.hidden_bytes = 1 << 20, c.top_k = 1, c.n_experts = 16, c.max_tokens = 4, c.algorithm = "flat";
    return moecclMoeCheck(&c, 16, "node:4 gpu:4", nullptr, 0);
  };
  const RankOptions only_calls{.init = false};
  run_ranks(
      1, [&](int, moecclComm_t) { EXPECT_EQ(check(), moecclOutOfMemory); }, only_calls);
  const Variables profile{{"MOECCL_PROFILE", folder.file("far.json")}};
  run_ranks(
      1, [&](int, moecclComm_t) { EXPECT_EQ(check(), moecclSuccess); }, only_calls);
}

}  // namespace
}  // namespace moeccl::testing
