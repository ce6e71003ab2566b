// SPDX-License-Identifier: Apache-2.0
#include "perf/common/routing.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <set>

namespace perf {
namespace {

void expect_distinct(const std::vector<int32_t>& index, const TopkShape& shape) {
  const size_t k = static_cast<size_t>(shape.k);
  ASSERT_EQ(index.size(), shape.n_tokens * k);
  for (size_t t = 0; t < shape.n_tokens; t++) {
    const std::set<int32_t> experts(&index[t * k], &index[t * k] + k);
    ASSERT_EQ(experts.size(), k) << "token " << t;
    ASSERT_GE(*experts.begin(), 0);
    ASSERT_LT(*experts.rbegin(), shape.n_experts);
  }
}

TEST(Routing, TokensChooseDistinctExperts) {
  for (const TopkShape& shape : {TopkShape{300, 8, 256}, TopkShape{300, 4, 4}, TopkShape{300, 1, 7}}) {
    expect_distinct(uniform_topk(shape, 3), shape);
    expect_distinct(zipf_topk(shape, {1.2, 4}, 3), shape);
  }
}

TEST(Routing, UniformRoutingLoadsAllExpertsAlike) {
  const TopkShape shape = {20000, 4, 16};
  std::map<int32_t, int> load;
  for (const int32_t e : uniform_topk(shape, 1)) load[e]++;
  for (const auto& [expert, n] : load) EXPECT_NEAR(n, 5000, 300) << expert;
}

TEST(Routing, ZipfRoutingHasFavourites) {
  const TopkShape shape = {5000, 1, 16};
  std::map<int32_t, int> load;
  for (const int32_t e : zipf_topk(shape, {1.0, 9}, 1)) load[e]++;
  int most = 0;
  for (const auto& [expert, n] : load) most = std::max(most, n);
  EXPECT_NEAR(most, 5000 / 3.38, 150);  // the harmonic number of 16 is 3.38
}

struct File {
  std::string path = "/tmp/perf_trace_test." + std::to_string(getpid());
  ~File() { std::remove(path.c_str()); }
  void write(uint32_t version, std::vector<uint32_t> dimensions, const std::vector<int32_t>& index) const {
    std::ofstream out(path, std::ios::binary);
    out.write("MOETRACE", 8);
    out.write(reinterpret_cast<const char*>(&version), 4);
    out.write(reinterpret_cast<const char*>(dimensions.data()), static_cast<std::streamsize>(4 * dimensions.size()));
    out.write(reinterpret_cast<const char*>(index.data()), static_cast<std::streamsize>(4 * index.size()));
  }
};

TEST(Trace, ReadsWhatItsPageDescribes) {
  const File file;
  file.write(1, {1, 2, 2, 2, 5}, {0, 1, 2, 3, 4, -1, 1, 0});
  Trace trace;
  ASSERT_EQ(read_trace(file.path, trace), "");
  EXPECT_EQ(trace.n_steps, 2);
  EXPECT_EQ(trace.n_experts, 5);
  EXPECT_EQ(trace.step(0, 1)[0], 4);
}

TEST(Trace, SaysWhatIsWrongWithAFile) {
  const File file;
  Trace trace;
  const auto message = [&](uint32_t version, const std::vector<uint32_t>& dimensions,
                           const std::vector<int32_t>& index) {
    file.write(version, dimensions, index);
    return read_trace(file.path, trace);
  };
  EXPECT_NE(message(2, {1, 1, 1, 1, 5}, {0}).find("version 2"), std::string::npos);
  EXPECT_NE(message(1, {1, 1, 1, 1, 5}, {5}).find("expert 5"), std::string::npos);
  EXPECT_NE(message(1, {1, 1, 1, 2, 5}, {3, 3}).find("twice"), std::string::npos);
  EXPECT_NE(message(1, {1, 1, 2, 1, 5}, {3}).find("bytes"), std::string::npos);
  EXPECT_NE(message(1, {0, 1, 2, 1, 5}, {}).find("dimension"), std::string::npos);
  EXPECT_NE(message(1, {60000, 60000, 60000, 60, 64}, {}).find("2^33"), std::string::npos);
  EXPECT_NE(read_trace("/nonexistent", trace).find("cannot be opened"), std::string::npos);
}

}  // namespace
}  // namespace perf
