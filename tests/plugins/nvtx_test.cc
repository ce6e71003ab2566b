// SPDX-License-Identifier: Apache-2.0
// The NVTX plugin as MoECCL loads it, and the ranges that a tool sees.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/variables.h"

namespace moeccl::testing {
namespace {

class Nvtx : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(log_); }
  std::vector<std::string> lines() const {
    std::ifstream in(log_);
    std::vector<std::string> all;
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  }

  const std::string log_ = "/tmp/moeccl_nvtx_" + std::to_string(getpid());
  const Variables set_ = {{"MOECCL_PROFILER_PLUGIN", std::getenv("MOECCL_TEST_NVTX_PLUGIN")},
                          {"MOECCL_TEST_NVTX_LOG", log_}};
};

void work(int rank, moecclComm_t comm) {
  std::vector<float> x(1000, 1);
  for (int i = 0; i < 3; ++i)
    MOECCL_ASSERT_OK(moecclAllReduce(x.data(), x.data(), x.size(), moecclFloat32, moecclSum, comm, nullptr));
  MOECCL_ASSERT_OK(rank == 0 ? moecclSend(x.data(), 10, moecclFloat32, 1, comm, nullptr)
                             : moecclRecv(x.data(), 10, moecclFloat32, 0, comm, nullptr));
}

TEST_F(Nvtx, ShowsEachOperationAsARange) {
  const Variables tool = {{"NVTX_INJECTION64_PATH", std::getenv("MOECCL_TEST_NVTX_TOOL")}};
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.name = "world";
  run_ranks(2, work, options);

  std::multiset<std::string> domains, categories, sums, messages;
  int ends = 0;
  std::smatch part;
  for (const std::string& line : lines()) {
    EXPECT_NE(line, "wrong");
    if (line.starts_with("domain ")) domains.insert(line.substr(7));
    if (line.starts_with("category ")) categories.insert(line.substr(9));
    if (line.starts_with("end ")) ++ends;
    if (std::regex_match(line, part, std::regex(R"(start \d+ category (\d+) bytes (\d+) (.*))"))) {
      EXPECT_EQ(part[1], "1");
      (part[2] == "4000" ? sums : messages).insert(part[3].str());
    }
  }
  EXPECT_EQ(domains, (std::multiset<std::string>{"MoECCL", "MoECCL"}));
  EXPECT_EQ(categories, (std::multiset<std::string>{"1 world, rank 0 of 2", "1 world, rank 1 of 2"}));
  EXPECT_EQ(messages, (std::multiset<std::string>{"Recv", "Send"}));
  ASSERT_EQ(sums.size(), 6u);
  for (const std::string& text : sums)
    EXPECT_TRUE(std::regex_match(text, std::regex(R"(AllReduce \([a-z].*\))"))) << text;
  EXPECT_EQ(ends, 8);
}

TEST_F(Nvtx, DoesNothingWithoutATool) {
  const std::string said = log_ + ".log";
  const Variables loud = {{"MOECCL_DEBUG", "INFO"}, {"MOECCL_DEBUG_FILE", said}};
  run_ranks(2, work, {.mode = RankMode::kProcesses});
  EXPECT_TRUE(lines().empty());
  std::ifstream in(said);
  const std::string all(std::istreambuf_iterator<char>(in), {});
  EXPECT_NE(all.find("profiler plugin MoECCL NVTX"), std::string::npos) << all;
  std::filesystem::remove(said);
}

}  // namespace
}  // namespace moeccl::testing
