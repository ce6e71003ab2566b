// SPDX-License-Identifier: Apache-2.0
// The C interface of topology.h, and communicators whose topology comes from a file.
#include <gtest/gtest.h>
#include <moeccl/moeccl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "tests/support/ranks.h"

namespace {

std::string describe(const char* source, moecclTopologyFormat_t format) {
  size_t needed = 0;
  EXPECT_EQ(moecclTopologyDescribe(source, format, nullptr, 0, &needed), moecclSuccess) << moecclGetLastError(nullptr);
  std::string text(needed, '\0');
  EXPECT_EQ(moecclTopologyDescribe(source, format, text.data(), text.size(), nullptr), moecclSuccess);
  if (!text.empty()) text.pop_back();
  return text;
}

class File {
 public:
  explicit File(const std::string& text) {
    const int fd = mkstemps(path_, 5);
    EXPECT_GE(fd, 0);
    close(fd);
    write(text);
  }
  ~File() { unlink(path_); }
  void write(const std::string& text) const { std::ofstream(path_) << text; }
  const char* path() const { return path_; }

 private:
  char path_[32] = "/tmp/moeccl_topo_XXXXXX.json";
};

std::string two_sockets(int gpus_of_first) {
  std::string nodes = R"({"id": "host", "kind": "host"}, {"id": "socket:0", "kind": "socket", "parent": "host"},
    {"id": "socket:1", "kind": "socket", "parent": "host"})";
  for (int g = 0; g < 4; ++g)
    nodes += R"(, {"id": "pci:0000:0)" + std::to_string(g) + R"(:00.0", "kind": "gpu", "number": )" +
             std::to_string(g) + R"(, "parent": "socket:)" + (g < gpus_of_first ? "0\"}" : "1\"}");
  return R"({"moeccl_topology": 1, "hosts": [{"nodes": [)" + nodes + "]}]}";
}

TEST(Topology, DescribesThisHostInEveryFormat) {
  EXPECT_EQ(describe(nullptr, moecclTopologyText).substr(0, 4), "host");
  EXPECT_EQ(describe("", moecclTopologyJson).substr(0, 1), "{");
  EXPECT_EQ(describe(nullptr, moecclTopologySvg).substr(0, 4), "<svg");
  EXPECT_NE(describe(nullptr, moecclTopologyLevels).find("rank:"), std::string::npos);
}

TEST(Topology, AutoIsThisHost) {
  EXPECT_EQ(describe("auto", moecclTopologyText), describe(nullptr, moecclTopologyText));
}

TEST(Topology, ADumpIsASource) {
  const File file(describe(nullptr, moecclTopologyJson));
  EXPECT_EQ(describe(file.path(), moecclTopologyText), describe(nullptr, moecclTopologyText));
  EXPECT_EQ(describe(file.path(), moecclTopologyJson), describe(nullptr, moecclTopologyJson));
}

TEST(Topology, ErrorsNameFileAndLine) {
  const File file("{\"moeccl_topology\": 1,\n \"hosts\": [\n {\"nodes\": [{\"id\": \"host\", \"kind\": \"hots\"}]}]}");
  EXPECT_EQ(moecclTopologyDescribe(file.path(), moecclTopologyText, nullptr, 0, nullptr), moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(std::string(file.path()) + ":3: hosts[0].nodes[0]"),
            std::string::npos)
      << moecclGetLastError(nullptr);
  EXPECT_NE(moecclTopologyDescribe("/nonexistent.xml", moecclTopologyText, nullptr, 0, nullptr), moecclSuccess);
  EXPECT_EQ(moecclTopologyDescribe("node:2 gpu", moecclTopologyText, nullptr, 0, nullptr), moecclInvalidArgument);
  EXPECT_EQ(moecclTopologyDescribe("node:2 gpu:2", moecclTopologySvg, nullptr, 0, nullptr), moecclInvalidArgument);
  const int number = 9;  // as a C caller may pass it
  moecclTopologyFormat_t format;
  static_assert(sizeof(format) == sizeof(number));
  std::memcpy(&format, &number, sizeof(format));
  EXPECT_EQ(moecclTopologyDescribe(nullptr, format, nullptr, 0, nullptr), moecclInvalidArgument);
}

TEST(Topology, DoctorWritesAPage) {
  std::string page(size_t{1} << 16, '\0');
  size_t needed = 0;
  int n_bad = -1;
  ASSERT_EQ(moecclDoctor(4, page.data(), page.size(), &needed, &n_bad), moecclSuccess) << moecclGetLastError(nullptr);
  EXPECT_NE(page.find("transports of 4 ranks"), std::string::npos);
  EXPECT_GE(n_bad, 0);
  EXPECT_EQ(moecclDoctor(-1, nullptr, 0, nullptr, nullptr), moecclInvalidArgument);
  EXPECT_EQ(moecclDoctor(65536, nullptr, 0, nullptr, nullptr), moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("1 to 65535"), std::string::npos);
}

TEST(Topology, CommunicatorsTakeAFile) {
  const File file(two_sockets(2));
  EXPECT_EQ(describe(file.path(), moecclTopologyLevels), "socket:2 rank:2\n");
  moeccl::testing::RankOptions options;
  options.config.topology = file.path();
  moeccl::testing::run_ranks(
      4,
      [](int, moecclComm_t comm) {
        std::string text(size_t{1} << 16, '\0');
        ASSERT_EQ(moecclPlanExplain(comm, moecclOpAllToAll, 1024, moecclFloat32, text.data(), text.size(), nullptr),
                  moecclSuccess);
        EXPECT_NE(text.find("socket"), std::string::npos) << text;
      },
      options);
}

// The path is the same text on all ranks, but in rank 1's working directory it is another file. All ranks get the same
// error.
TEST(Topology, RanksThatReadDifferentFilesGetOneError) {
  char folders[2][32] = {"/tmp/moeccl_topo_a_XXXXXX", "/tmp/moeccl_topo_b_XXXXXX"};
  for (int i = 0; i < 2; ++i) {
    ASSERT_NE(mkdtemp(folders[i]), nullptr);
    std::ofstream(std::string(folders[i]) + "/machine.json") << two_sockets(2 + i);
  }
  moeccl::testing::RankOptions options;
  options.mode = moeccl::testing::RankMode::kProcesses;
  options.init = false;
  moeccl::testing::run_ranks(
      4,
      [&](int rank, moecclComm_t) {
        ASSERT_EQ(chdir(folders[rank == 1]), 0);
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.topology = "./machine.json";
        config.init_timeout_ms = 20'000;
        moecclComm_t comm = nullptr;
        ASSERT_EQ(moecclCommInitRankConfig(&comm, 4, moeccl::testing::unique_id(), rank, &config), moecclMismatch);
        EXPECT_NE(std::string(moecclGetLastError(nullptr))
                      .find("rank 0 and rank 1 read different topologies from \"./machine"),
                  std::string::npos)
            << moecclGetLastError(nullptr);
      },
      options);
  for (const char* folder : folders) {
    unlink((std::string(folder) + "/machine.json").c_str());
    rmdir(folder);
  }
}

}  // namespace
