// SPDX-License-Identifier: Apache-2.0
#include "src/driver/nccl_plugin.h"

#include <gtest/gtest.h>

namespace moeccl::tests {
namespace {

using Names = std::vector<std::string>;
constexpr driver::NcclPluginKind kNet = {"net plugin", "libnccl-net", "ncclNetPlugin_v", 6, 12};
constexpr driver::NcclPluginKind kProfiler = {"profiler plugin", "libnccl-profiler", "ncclProfiler_v", 2, 6};

TEST(NcclPluginFiles, FollowNcclsRules) {
  EXPECT_EQ(plugin_files(kNet, "ucx"), (Names{"ucx", "libnccl-net-ucx.so"}));
  EXPECT_EQ(plugin_files(kProfiler, "inspector"), (Names{"inspector", "libnccl-profiler-inspector.so"}));
  EXPECT_EQ(plugin_files(kNet, "libx.so"), Names{"libx.so"});
  EXPECT_EQ(plugin_files(kNet, "./ucx"), Names{"./ucx"});
  EXPECT_EQ(plugin_files(kNet, "libucx"), (Names{"libucx", "libnccl-net-libucx.so"}));
}

TEST(NcclPluginFiles, ThatCannotServeSayWhy) {
  const auto missing = driver::open_plugin(kProfiler, "surely-not-there");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), moecclUnsupported);
  EXPECT_NE(missing.status().message().find("libnccl-profiler-surely-not-there.so"), std::string::npos)
      << missing.status().message();
  const auto other = driver::open_plugin(kProfiler, "libm.so.6");
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.status().message().find("ncclProfiler_v2 to ncclProfiler_v6: it is no profiler plugin"),
            std::string::npos)
      << other.status().message();
}

}  // namespace
}  // namespace moeccl::tests
