// SPDX-License-Identifier: Apache-2.0
#include "src/calibrate/simulate.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <vector>

namespace moeccl::comm {
namespace {

std::string page(const moecclSimulateConfig_t& c) {
  auto text = simulate(c);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text.ok() ? *text : std::string();
}

std::string file_with(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

// HierMoE's testbed, Fig. 9. The tree of four levels is that of Fig. 1(b).
constexpr const char* kFig9 = R"({"moeccl_profile": 1, "alltoall": {
  "standard": {"alpha_ns": 722000, "bytes_per_ns": 1.754385965},
  "inter": [{"alpha_ns": 497000, "bytes_per_ns": 1.890359168}, {"alpha_ns": 301000, "bytes_per_ns": 8.547008547},
            {"alpha_ns": 149000, "bytes_per_ns": 48.54368932}],
  "intra": [{"alpha_ns": 571000, "bytes_per_ns": 7.874015748}, {"alpha_ns": 114000, "bytes_per_ns": 38.02281369},
            {"alpha_ns": 204000, "bytes_per_ns": 60.97560976}]}})";

// Returns the total times by algorithm from a page in JSON.
std::map<std::string, double> times(const moecclSimulateConfig_t& config) {
  moecclSimulateConfig_t c = config;
  c.json = 1;
  const std::string text = page(c);
  std::map<std::string, double> all;
  const std::string key = "\"algorithm\": \"", ns = "\"ns\": ";
  for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + 1)) {
    const size_t name = at + key.size();
    all[text.substr(name, text.find('"', name) - name)] = std::atof(text.c_str() + text.find(ns, name) + ns.size());
  }
  return all;
}

TEST(Simulate, RanksOfExpertsComeWithTheirNumber) {
  const std::vector<int32_t> ranks(8, 1);
  for (const moecclOp_t op : {moecclOpDispatch, moecclOpExpertGather}) {
    moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
    const int32_t domain[] = {2, 1};
    c.topology = "node:2 gpu:2";
    c.op = op;
    c.count = 1000;
    c.domain = domain;
    c.n_levels = 2;
    c.expert_rank = ranks.data();
    const auto refused = simulate(c);
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.status().message().find("n_experts is 0 with expert_rank"), std::string::npos);
    c.n_experts = 8;
    EXPECT_NE(page(c), "");
  }
}

moecclSimulateConfig_t paper(const std::string& profile) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "node:4 qpi:2 nvl:2 gpu:2";
  c.profile = profile.c_str();
  c.tokens_per_rank = 1024;
  c.hidden_bytes = 4096;  // Qwen3-30B-A3B
  c.n_experts = 128;
  c.top_k = 8;
  return c;
}

// Fig. 13 and Table IV: HD-MoE (the best dimension) over HD2-MoE over Megatron-LM (flat), for uniform and zipf routing.
TEST(Simulate, OrdersHierMoeAsTheirFigure13) {
  const std::string profile = file_with("fig9.json", kFig9);
  for (const char* routing : {"uniform", "zipf:0.5"}) {
    for (const int experts : {128, 256}) {
      moecclSimulateConfig_t c = paper(profile);
      c.routing = routing;
      c.n_experts = experts;
      c.hidden_bytes = experts == 256 ? 7168 : 4096;  // DeepSeek-V3 with half its hidden size, as in the paper
      std::map<std::string, double> t = times(c);
      const double best = std::min({t["hier:2"], t["hier:3"], t["hier:4"]});
      EXPECT_LT(best, t["hier:2"]) << routing;
      EXPECT_LT(t["hier:2"], t["flat"]) << routing;
      EXPECT_EQ(best, t["hier:3"]) << routing;
    }
  }
}

// Table IV, HD-MoE over Megatron-LM at the paper's default K = 8, E = 128, G = 32 and G = 16: within 20 % under uniform
// routing. docs/performance-papers.md lists all columns, including those that are not within 20 %, and the reasons.
TEST(Simulate, GivesTableIVsSpeedupOfHdMoe) {
  const std::string profile = file_with("fig9.json", kFig9);
  moecclSimulateConfig_t c = paper(profile);
  std::map<std::string, double> t = times(c);
  EXPECT_NEAR(t["flat"] / t["hier:3"] / 1.72, 1.0, 0.2);
  c.topology = "node:2 qpi:2 nvl:2 gpu:2";
  t = times(c);
  EXPECT_NEAR(t["flat"] / t["hier:3"] / 2.50, 1.0, 0.2);
}

// Levels named gpu are not priced with a CPU's copies. The bottleneck is between nodes, so fewer bytes there reduce the
// time in proportion.
TEST(Simulate, GpusAreBoundByTheLinksBetweenTheirNodes) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "node:8(bw=50GB/s,lat=5us) gpu:8(bw=450GB/s,lat=2us)";
  c.tokens_per_rank = 1024;
  c.json = 1;
  const std::string text = page(c);
  const auto bytes_between_nodes = [&](const char* algorithm) {
    const size_t at = text.find(std::string("\"") + algorithm + "\""), bytes = text.find("\"level_bytes\": [", at);
    return std::atof(text.c_str() + bytes + 16);
  };
  std::map<std::string, double> t = times(c);
  EXPECT_NEAR(t["flat"] / t["hier:2"], bytes_between_nodes("flat") / bytes_between_nodes("hier:2"), 0.05);
  EXPECT_GT(t["flat"] / t["hier:2"], 1.3);
  c.json = 0;
  EXPECT_NE(page(c).find("constants: GPU of the H100 class (persistent kernel)\n"), std::string::npos);
}

TEST(Simulate, AProfilesFiguresOverrideTheConstants) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "node:2(bw=50GB/s,lat=5us) gpu:2(bw=450GB/s,lat=2us)";
  c.tokens_per_rank = 256;
  const double fast = times(c)["flat"];
  const std::string slow = file_with("slow.json", "{\"moeccl_profile\": 1, \"machine\": {\"copy_bytes_per_ns\": 1}}");
  c.profile = slow.c_str();
  EXPECT_GT(times(c)["flat"], 2 * fast);
  const std::string text = page(c);
  EXPECT_NE(text.find("constants: GPU of the H100 class (persistent kernel), overridden by " + slow), std::string::npos)
      << text;
  EXPECT_NE(text.find("copy_bytes_per_ns                 1  " + slow), std::string::npos) << text;
  EXPECT_NE(text.find("reduce_bytes_per_ns             721  "), std::string::npos) << text;
}

TEST(Simulate, SaysNoGainPlainly) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "node:2(bw=100GB/s,lat=1us) gpu:2(bw=100GB/s,lat=1us)";
  c.n_experts = 64;
  c.top_k = 1;  // nothing to deduplicate
  c.tokens_per_rank = 64;
  EXPECT_NE(page(c).find("no gain"), std::string::npos);
  c.topology = "node:4(bw=1GB/s,lat=5us) gpu:8(bw=200GB/s,lat=1us)";
  c.n_experts = 256;
  c.top_k = 8;
  EXPECT_NE(page(c).find("x faster than flat"), std::string::npos);
}

TEST(Simulate, NamesTheCandidatesThatItDidNotPrice) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "node:128(bw=50GB/s,lat=5us) gpu:8(bw=150GB/s,lat=1us)";
  c.op = moecclOpAllReduce;
  c.count = 1024;
  const std::string text = page(c);
  EXPECT_NE(text.find("of the candidates that were simulated: fastest: "), std::string::npos) << text;
  const size_t at = text.find("Not simulated, because they have too many steps: ");
  ASSERT_NE(at, std::string::npos) << text;
  const std::string names = text.substr(at, text.find('\n', at) - at);
  for (const char* name : {"flat", "ring", "halving", "hier"}) EXPECT_NE(names.find(name), std::string::npos) << names;
  EXPECT_EQ(names.find("direct"), std::string::npos) << "it cannot run at all: " << names;
}

TEST(Simulate, PricesCollectivesWithSharedUplinks) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "node:4(bw=10GB/s,lat=5us) gpu:8(bw=100GB/s,lat=1us)";
  c.op = moecclOpAllReduce;
  c.count = 1 << 20;
  const std::string text = page(c);
  EXPECT_NE(text.find("SIMULATED"), std::string::npos);
  EXPECT_NE(text.find("critical path"), std::string::npos);
  std::map<std::string, double> t = times(c);
  EXPECT_LT(t["hier"], t["flat"]);
}

TEST(Simulate, DomainsOverDataCentresKeepTokensOffTheSlowLinks) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "dc:2(bw=100MB/s,lat=50us) gpu:4(bw=10GB/s,lat=1us)";
  c.tokens_per_rank = 64;
  c.n_experts = 16;
  c.top_k = 2;
  const double plain = times(c)["hier:2"];
  const int32_t domain[2] = {2, 1};
  c.domain = domain;
  c.n_levels = 2;
  std::map<std::string, double> t = times(c);
  EXPECT_LT(10 * t["hier:2"], plain);
  EXPECT_EQ(t.count("2dh"), 0u);
  c.algorithm = "2dh";
  EXPECT_NE(simulate(c).status().message().find("2dh, which has no plan with domains"), std::string::npos);
  c.algorithm = nullptr;
  c.n_levels = 1;
  EXPECT_NE(simulate(c).status().message().find("n_levels is 1: the topology has 2 levels"), std::string::npos);
}

// Dispatch is the same in both layouts. What returns is not: in Rows, a rank of flat and 2dh returns one row for all
// its experts.
TEST(Simulate, RowsReturnFewerThanExpertMajorWithoutDeduplication) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "node:2(bw=1GB/s,lat=5us) gpu:4(bw=10GB/s,lat=1us)";
  c.tokens_per_rank = 256;
  c.n_experts = 64;
  std::map<std::string, double> rows = times(c);
  EXPECT_NE(page(c).find(", layout Rows, uniform"), std::string::npos) << page(c);
  c.layout = moecclLayoutExpertMajor;
  std::map<std::string, double> expert_major = times(c);
  EXPECT_NE(page(c).find(", layout ExpertMajor, uniform"), std::string::npos) << page(c);
  for (const char* plan : {"flat", "2dh"}) EXPECT_GT(expert_major[plan], 1.15 * rows[plan]) << plan;
  EXPECT_NEAR(expert_major["hier:2"] / rows["hier:2"], 1, 0.05);
  c.layout = static_cast<moecclMoeLayout_t>(7);
  EXPECT_NE(simulate(c).status().message().find("layout is 7"), std::string::npos);
}

TEST(Simulate, PagesSayWhatWasAsked) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  const int32_t domain[] = {2, 1};
  c.topology = "dc:2(bw=1GB/s,lat=50us) gpu:2(bw=10GB/s,lat=1us)";
  c.tokens_per_rank = 64;
  c.n_experts = 16;
  c.top_k = 2;
  c.seed = 7;
  c.routing = "zipf:1.2";
  c.domain = domain;
  c.n_levels = 2;
  EXPECT_NE(page(c).find("layout Rows, zipf:1.2, experts in domains of 2 dc, 1 gpu\n"), std::string::npos) << page(c);
  c.json = 1;
  const auto has = [&](std::initializer_list<const char*> fields) {
    const std::string text = page(c);
    for (const char* field : fields) EXPECT_NE(text.find(field), std::string::npos) << field << "\n" << text;
  };
  has({"\"algorithms\": \"auto\"", "\"tokens\": 256", "\"row_bytes\": 14336", "\"topk\": 2", "\"experts\": 16",
       "\"layout\": \"Rows\"", "\"routing\": \"zipf:1.2\"", "\"seed\": 7", "\"domain\": [2, 1]"});
  c.op = moecclOpExpertGather;
  c.count = 1000;
  has({"\"count\": 1000", "\"type\": \"float32\"", "\"one_host\": 0", "\"experts\": 16", "\"domain\": [2, 1]"});
  c.op = moecclOpAllReduce;
  c.algorithm = "ring";
  has({"\"algorithms\": \"ring\"", "\"count\": 1000", "\"type\": \"float32\"", "\"one_host\": 0"});
}

TEST(Simulate, APageWithoutAnyPriceIsAnError) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  const int32_t domain[] = {2, 1};
  c.topology = "dc:2 gpu:2";
  c.op = moecclOpExpertGather;
  c.algorithm = "direct";
  c.domain = domain;
  c.n_levels = 2;
  c.count = 1000;
  const auto text = simulate(c);
  ASSERT_FALSE(text.ok());
  EXPECT_EQ(text.status().code(), moecclUnsupported);
  EXPECT_EQ(text.status().message(),
            "no candidate of expert_gather can be simulated: direct: ranks of several hosts cannot read each other's "
            "buffers");
}

// Experts travel into domains over data centres once per data centre, and their gradients return over the same links.
TEST(Simulate, ExpertsIntoTheirDomainsAndBack) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "dc:2(bw=1GB/s,lat=50us) gpu:4(bw=10GB/s,lat=1us)";
  c.n_experts = 8;
  c.count = 1 << 20;
  const int32_t domain[2] = {2, 4};
  c.domain = domain;
  c.n_levels = 2;
  const double bytes = 4.0 * (1 << 20);
  for (const moecclOp_t op : {moecclOpExpertGather, moecclOpExpertReduce}) {
    c.op = op;
    c.json = 0;
    const std::string text = page(c);
    EXPECT_NE(text.find("SIMULATED"), std::string::npos) << text;
    EXPECT_NE(text.find("domains of 2 dc, 4 gpu"), std::string::npos) << text;
    EXPECT_NE(text.find("not simulated: ranks of several hosts"), std::string::npos) << text;
    EXPECT_NE(text.find("fastest: staged"), std::string::npos) << text;
    // Each data centre sends its four experts over one uplink.
    const double line_ns = 4 * bytes / 1.0;
    EXPECT_GE(times(c)["staged"], line_ns) << text;
    EXPECT_LT(times(c)["staged"], 2.5 * line_ns) << text;
    c.one_host = 1;
    EXPECT_EQ(times(c).size(), 2u);
    c.algorithm = "direct";
    EXPECT_EQ(times(c).size(), 1u);
    c.algorithm = nullptr;
    c.one_host = 0;
  }
  // When experts stay at home, nothing crosses.
  const int32_t home[2] = {1, 1};
  c.domain = home;
  EXPECT_LT(times(c)["staged"], 1e7);
  c.domain = nullptr;
  EXPECT_NE(simulate(c).status().message().find("domain is NULL"), std::string::npos);
  c.op = moecclOpExpertAllReduce;
  EXPECT_NE(simulate(c).status().message().find("moecclExpertExplain"), std::string::npos);
}

TEST(Simulate, OneHostHasTheStagingOfOneHost) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "dc:2(bw=1.25GB/s,lat=20ms) gpu:2";
  c.one_host = 1;
  c.op = moecclOpAllReduce;
  c.count = 1 << 30;
  const std::string text = page(c);
  EXPECT_NE(text.find("the cap is 8388608"), std::string::npos) << text;
}

// Links of 3.6 MB in a round trip would give other chunks and rotations if they joined hosts: a longer latency would
// then make plans faster.
TEST(Simulate, LinksWithinAHostAreNoLongLines) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.op = moecclOpAllReduce;
  c.count = 64 << 20;
  c.topology = "node:2(bw=50GB/s,lat=5us) gpu:8(bw=450GB/s,lat=2us)";
  const std::map<std::string, double> shorter = times(c);
  c.topology = "node:2(bw=50GB/s,lat=5us) gpu:8(bw=450GB/s,lat=4us)";
  for (const auto& [name, ns] : times(c)) EXPECT_GE(ns, shorter.at(name)) << name;
}

TEST(Simulate, RefusesWhatItCannotRead) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  const auto message = [&] { return simulate(c).status().message(); };
  EXPECT_NE(message().find("topology is empty"), std::string::npos);
  c.topology = "node:2(bw=1XB/s) gpu:2";
  EXPECT_NE(message().find("position"), std::string::npos);
  c.topology = "/no/such/file";
  EXPECT_NE(message().find("/no/such/file"), std::string::npos);
  c.topology = "node:2 gpu:2";
  const std::string broken = file_with("broken.json", "{\"moeccl_profile\": 1,\n \"links\": 3}");
  c.profile = broken.c_str();
  EXPECT_NE(message().find("broken.json:2:11"), std::string::npos) << message();
  c.profile = nullptr;
  c.algorithm = "hier:9";
  EXPECT_FALSE(simulate(c).ok());
}

TEST(Simulate, ReadsTheTopologyFromAFile) {
  const std::string path = file_with("topology.txt", "node:2(bw=1GB/s,lat=1us) gpu:2\n");
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = path.c_str();
  c.tokens_per_rank = 8;
  EXPECT_NE(page(c).find("on 4 ranks"), std::string::npos);
  const std::string json =
      file_with("topology.json", R"({"moeccl_topology": 1, "units": {"bandwidth": "GB/s", "latency": "ns"},
    "hosts": [{"count": 3, "nodes": [{"id": "host", "kind": "host", "bandwidth": 25, "latency": 3000},
      {"id": "pci:0000:01:00.0", "kind": "gpu", "parent": "host", "number": 0, "bandwidth": 25},
      {"id": "pci:0000:02:00.0", "kind": "gpu", "parent": "host", "number": 1, "bandwidth": 25}]}]})");
  c.topology = json.c_str();
  EXPECT_NE(page(c).find("on 6 ranks"), std::string::npos) << page(c);
  EXPECT_NE(page(c).find("constants: GPU of the H100 class (persistent kernel)\n"), std::string::npos) << page(c);
  const std::string mixed = file_with("mixed.json", R"({"moeccl_topology": 1, "hosts": [
    {"nodes": [{"id": "host", "kind": "host", "cores": 1}]},
    {"nodes": [{"id": "host", "kind": "host"},
      {"id": "pci:0000:01:00.0", "kind": "gpu", "parent": "host", "number": 0}]}]})");
  c.topology = mixed.c_str();
  EXPECT_NE(page(c).find("on 2 ranks"), std::string::npos) << page(c);
  EXPECT_NE(page(c).find("constants: host core\n"), std::string::npos) << page(c);
}

// Calibration measures a line for each level, also where ranks share memory and copies are what costs. A price that
// counted both would be about twice as high.
TEST(Simulate, WithinAHostAProfilesLineIsNotCountedBesideTheCopies) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = "core:2";
  c.op = moecclOpAllReduce;
  c.type = moecclFloat32;
  c.count = 1 << 18;
  c.one_host = 1;
  const std::string rates = "{\"moeccl_profile\": 1, \"machine\": {\"copy_bytes_per_ns\": 10}";
  const std::string line = R"(, "levels": [{"name": "core", "alpha_ns": 500, "bytes_per_ns": 1, "r2": 1,
    "points": [[1024, 1000], [65536, 66000], [1048576, 1050000]]}]})";
  const std::string without = file_with("rates.json", rates + "}"), with = file_with("line.json", rates + line);
  c.profile = without.c_str();
  const auto copies = times(c);
  c.profile = with.c_str();
  EXPECT_EQ(times(c), copies);
  // Ranks that can only put have a link between them, which a text without figures leaves to the profile.
  c.one_host = 0;
  const auto linked = times(c);
  c.profile = without.c_str();
  EXPECT_GT(linked.at("flat"), times(c).at("flat"));
}

}  // namespace
}  // namespace moeccl::comm
