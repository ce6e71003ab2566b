// SPDX-License-Identifier: Apache-2.0
#include "src/plan/hardware.h"

#include <gtest/gtest.h>

#include "topology/synthetic.h"

namespace moeccl::plan {
namespace {

TEST(Hardware, EveryConstantIsThatOfItsProfileAndSaysWhereItIsFrom) {
  for (const Hardware& hardware : {host_hardware(), stream_hardware(), kernel_hardware()}) {
    ASSERT_FALSE(hardware.constants.empty());
    for (const Constant& c : hardware.constants) {
      EXPECT_EQ(hardware.profile.*c.member, c.value) << hardware.name << " " << c.name;
      EXPECT_GT(std::string(c.source).size(), 20u) << hardware.name << " " << c.name;
    }
  }
}

TEST(Hardware, DevicesAreWhatTheTopologyNamesGpu) {
  const auto name_of = [](const char* topology) {
    return std::string(hardware_of(topology::parse_synthetic(topology, 0).value()).name);
  };
  EXPECT_EQ(name_of("node:2 gpu:8"), kernel_hardware().name);
  EXPECT_EQ(name_of("gpu:8 rank:2"), host_hardware().name);
  EXPECT_EQ(name_of("rank:8"), host_hardware().name);
}

// However many ranks a host has, none waits for a core or for memory that another rank uses.
TEST(Hardware, DevicesShareNothing) {
  for (const Hardware& hardware : {stream_hardware(), kernel_hardware()}) {
    const Profile& device = hardware.profile;
    EXPECT_GE(device.host_copy_bytes_per_ns / 1024, device.copy_bytes_per_ns);
    EXPECT_GE(device.cores, 1024u);
    EXPECT_EQ(device.switch_ns, 0);
  }
}

// The selector of an engine's collectives and the prices of dispatch and combine on it start from these profiles.
TEST(Hardware, TheEnginesOfADeviceDifferInWhatTheyLaunchAndSayWhichTheyAre) {
  const Hardware stream = stream_hardware(), kernel = kernel_hardware();
  EXPECT_EQ(stream.profile.source, std::string("the constants of a ") + stream.name);
  EXPECT_EQ(kernel.profile.source, std::string("the constants of a ") + kernel.name);
  EXPECT_NE(stream.profile.source, kernel.profile.source);
  EXPECT_EQ(stream.profile.copy_bytes_per_ns, kernel.profile.copy_bytes_per_ns);
  EXPECT_GT(stream.profile.step_ns, 2 * kernel.profile.step_ns);
}

}  // namespace
}  // namespace moeccl::plan
