// SPDX-License-Identifier: Apache-2.0
#include "perf/common/options.h"

#include <gtest/gtest.h>

namespace perf {
namespace {

Options parsed(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "all_reduce_perf");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return parse_options(static_cast<int>(argv.size()), argv.data(), "all_reduce_perf", false);
}

using OptionsDeathTest = ::testing::Test;

TEST_F(OptionsDeathTest, AValueThatCannotBeMeantEndsTheProgramWithASentence) {
  const auto refuses = [](const std::vector<std::string>& arguments, const char* sentence) {
    EXPECT_EXIT((void)parsed(arguments), ::testing::ExitedWithCode(1), sentence) << arguments[1];
  };
  refuses({"-r", "two"}, "--root: .*\"two\" is not a whole number from -1 to");
  refuses({"-r", "-7"}, "--root: .*\"-7\" is not a whole number");
  refuses({"-u", "-3"}, "--unalign: .*\"-3\" is not a whole number from 0 to");
  refuses({"-n", "0"}, "--iters: .*\"0\" is not a whole number from 1 to 2147483647");
  refuses({"-T", "3000000"}, "--timeout: .*\"3000000\" is not a whole number from 0 to 2147483");
  refuses({"-b", "inf"}, "\"inf\" is not a size");
  refuses({"-e", "1e30"}, "\"1e30\" is not a size");
  refuses({"-w", "-3"}, "--warmup_iters: .*\"-3\" is not a whole number from 0 to");
  refuses({"-o", "plus"}, "\"plus\" is not one of sum, prod");
  refuses({"-d", "half8"}, "\"half8\" is not one of int8/");
  refuses({"--mem", "gpu"}, "--mem: \"gpu\" is not one of heap, malloc, cuda");
}

TEST_F(OptionsDeathTest, AnUnknownOptionIsNamedBeforeItsValue) {
  EXPECT_EXIT((void)parsed({"--warmup", "7"}), ::testing::ExitedWithCode(1),
              "^all_reduce_perf: there is no option --warmup: all_reduce_perf --help lists them");
  EXPECT_EXIT((void)parsed({"-b", "8", "--min-bytes=7"}), ::testing::ExitedWithCode(1),
              "no option --min-bytes \\(did you mean --minbytes\\?\\)");
}

TEST(Options, ARootIsARankOrAll) {
  EXPECT_EQ(parsed({"-r", "3"}).root, 3);
  EXPECT_EQ(parsed({"-r", "all"}).root, -1);
  EXPECT_EQ(parsed({"-r", "-1"}).root, -1);
}

// A replayed graph has no times of single iterations; reading the first of none ended the program.
TEST(Options, AGraphHasNoTimesOfIterations) {
  const Options o = parsed({"--mem", "cuda", "-G", "2", "-I", "1", "--median"});
  EXPECT_EQ(o.cuda_graph, 2);
  EXPECT_FALSE(o.samples());
  ASSERT_EQ(o.notes.size(), 1u);
  EXPECT_NE(o.notes[0].find("--per_iter_timing"), std::string::npos);
}

}  // namespace
}  // namespace perf
