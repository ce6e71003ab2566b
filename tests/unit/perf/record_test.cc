// SPDX-License-Identifier: Apache-2.0
#include "perf/common/record.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

namespace perf {
namespace {

Record two_lines() {
  Record record;
  record.arguments = {"all_reduce_perf", "-b", "8"};
  record.start_time = "2026-01-01 00:00:00";
  record.devices = {this_device(0, 0)};
  Line line;
  line.bytes = 1024;
  line.count = 256;
  line.type = "float";
  line.op = "sum";
  Measured m;
  m.time_us = 12.5;
  m.alg_bw = 1;
  m.bus_bw = 1.5;
  m.n_wrong = 0;
  m.iteration_us = {3, 1, 2, 100};
  line.placements[0] = m;
  record.lines = {line, line};
  record.lines[1].placements[0]->n_wrong.reset();
  return record;
}

TEST(RecordJson, HasTheFieldsOfNcclTestsVersion3) {
  Options options;
  options.per_iter_timing = true;
  options.per_iter_skip = 1;
  const auto j = nlohmann::json::parse(record_json(two_lines(), options));
  for (const char* key : {"version", "start_time", "args", "env", "nccl_version", "config", "results", "out_of_bounds",
                          "average_bus_bandwidth", "errors", "end_time"})
    EXPECT_TRUE(j.contains(key)) << key;
  EXPECT_EQ(j["version"], 3);
  EXPECT_EQ(j["out_of_bounds"]["count"], 0);
  EXPECT_EQ(j["out_of_bounds"]["okay"], "true");
  EXPECT_EQ(j["average_bus_bandwidth"]["okay"], "unchecked");
  const auto& result = j["results"][0];
  EXPECT_EQ(result["size"], 1024);
  EXPECT_EQ(result["count"], 256);
  EXPECT_EQ(result["redop"], "sum");
  EXPECT_EQ(result["out_of_place"]["time"], 12.5);
  EXPECT_EQ(result["out_of_place"]["nwrong"], 0);
  EXPECT_TRUE(result["in_place"].is_null());
  EXPECT_EQ(result["out_of_place_per_iter"]["p50_us"], 2);
  EXPECT_EQ(result["out_of_place_per_iter"]["p99_us"], 100);
  EXPECT_EQ(result["out_of_place_per_iter"]["times_us"].size(), 4u);
  EXPECT_TRUE(j["results"][1]["out_of_place"]["nwrong"].is_null());
}

TEST(RecordJson, HasATimeOfEachProcessIfThereAreSeveral) {
  Options options;
  options.per_iter_timing = true;
  Record record = two_lines();
  record.lines[1].placements[0]->process_us = {{3, 1, 1, 100}, {2, 1, 2, 5}};
  const auto results = nlohmann::json::parse(record_json(record, options))["results"];
  EXPECT_FALSE(results[0]["out_of_place_per_iter"].contains("per_process_max_times_us"));
  EXPECT_EQ(results[1]["out_of_place_per_iter"]["per_process_max_times_us"][1][3], 5);
}

TEST(RecordJson, LeavesUnrelatedEnvironmentOut) {
  setenv("SECRET_TOKEN_OF_SOMEONE", "hunter2", 1);
  setenv("MOECCL_TEST_ONLY", "shown", 1);
  const std::string text = record_json(two_lines(), Options());
  EXPECT_EQ(text.find("hunter2"), std::string::npos);
  EXPECT_NE(text.find("MOECCL_TEST_ONLY=shown"), std::string::npos);
  unsetenv("MOECCL_TEST_ONLY");
}

TEST(RecordJson, SaysOnlyThatASecretIsSet) {
  const char* names[] = {"MOECCL_SECRET", "SLURM_JWT_TOKEN", "NCCL_PLUGIN_PASSWORD", "OMPI_COMM_KEY"};
  for (const char* name : names) setenv(name, "hunter2", 1);
  const std::string text = record_json(two_lines(), Options());
  EXPECT_EQ(text.find("hunter2"), std::string::npos);
  for (const char* name : names) {
    EXPECT_NE(text.find(std::string(name) + "=(set)"), std::string::npos) << name;
    unsetenv(name);
  }
}

TEST(RecordPlot, HasASeriesForEachPlacement) {
  Record record = two_lines();
  record.lines[1].bytes = 2048;
  record.lines[1].placements[1] = record.lines[1].placements[0];
  const std::string svg = record_plot(record, "all_reduce_perf", "note");
  EXPECT_NE(svg.find("float sum, out of place"), std::string::npos);
  EXPECT_NE(svg.find("float sum, in place"), std::string::npos);
}

// With -N, the line ran back to the smallest size after each cycle.
TEST(RecordPlot, CyclesOfASizeHaveTheirMedian) {
  Record record = two_lines();
  record.lines.resize(1);
  for (const double us : {20.0, 90.0}) {
    record.lines.push_back(record.lines[0]);
    record.lines.back().placements[0]->time_us = us;
  }
  const std::string svg = record_plot(record, "all_reduce_perf", "note");
  EXPECT_NE(svg.find("1K: 20<"), std::string::npos);
  EXPECT_EQ(svg.find("1K: 12.5<"), std::string::npos);
  EXPECT_EQ(svg.find("1K: 90<"), std::string::npos);
  EXPECT_NE(svg.find("all_reduce_perf, 1 rank<"), std::string::npos);
}

}  // namespace
}  // namespace perf
