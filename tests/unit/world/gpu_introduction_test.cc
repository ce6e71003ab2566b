// SPDX-License-Identifier: Apache-2.0
#include "src/world/gpu_introduction.h"

#include <gtest/gtest.h>

namespace moeccl::comm {
namespace {

GpuIntroduction of_a_gpu() {
  GpuIntroduction i;
  i.asked = i.mps = true;
  i.staging.way = StagingOffer::kByDescriptor;
  i.staging.device = 5;
  i.staging.address = 0x7f0012340000;
  i.staging.mapped = 32 << 20;
  i.staging.slot = 1 << 16;
  i.uuid = {'a', 'b', 'c'};
  i.pci = "0000:1b:00.0";
  i.answer.able = true;
  i.answer.kernel_staging = 64 << 20;
  return i;
}

TEST(GpuIntroduction, CarriesAllThatItHolds) {
  GpuIntroduction sent = of_a_gpu();
  sent.staging.way = StagingOffer::kByHandle;
  std::as_writable_bytes(std::span(&sent.staging.handle, 1))[63] = std::byte{9};
  sent.answer.why = "no way to device 3";
  const auto got = GpuIntroduction::decode(sent.encode(), 0);
  ASSERT_TRUE(got.ok()) << got.status().message();
  EXPECT_EQ(got->encode(), sent.encode());
  EXPECT_TRUE(got->asked && got->mps && got->answer.able && !got->answer.reaches);
  EXPECT_EQ(got->staging.device, 5);
  EXPECT_EQ(got->staging.slot, 1u << 16);
  EXPECT_EQ(got->uuid, sent.uuid);
  EXPECT_EQ(got->pci, sent.pci);
  EXPECT_EQ(got->answer.kernel_staging, 64u << 20);
  EXPECT_EQ(got->answer.why, sent.answer.why);
}

// Rank 0 sends those of all ranks to all ranks.
TEST(GpuIntroduction, IsShort) {
  EXPECT_EQ(GpuIntroduction().encode().size(), 1u) << "a rank without a context";
  EXPECT_LT(of_a_gpu().encode().size(), 100u);
  EXPECT_LT(of_a_gpu().answer.encode().size(), 20u);
}

TEST(GpuIntroduction, CutsLongReasons) {
  GpuIntroduction sent = of_a_gpu();
  sent.answer.why.assign(5000, 'x');
  const auto got = GpuIntroduction::decode(sent.encode(), 0);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->answer.why, std::string(GpuAnswer::kMaxWhy, 'x'));
}

TEST(GpuIntroduction, IsReadAsItIsWrittenOnly) {
  GpuIntroduction sent = of_a_gpu();
  sent.answer.why = "why";
  std::vector<std::byte> bytes = sent.encode();
  for (size_t n = 0; n < bytes.size(); ++n)
    EXPECT_FALSE(GpuIntroduction::decode(std::span(bytes).first(n), 0).ok()) << n;
  std::vector<std::byte> lying = bytes;
  lying.push_back({});
  EXPECT_FALSE(GpuIntroduction::decode(lying, 0).ok());
  lying = bytes;
  lying[2] = std::byte{3};  // the way to open the staging
  EXPECT_FALSE(GpuIntroduction::decode(lying, 0).ok());
  lying = bytes;
  lying[bytes.size() - 6] = std::byte{2};  // length of the reason, 515
  EXPECT_FALSE(GpuIntroduction::decode(lying, 0).ok());
  bytes = sent.answer.encode();
  for (size_t n = 0; n < bytes.size(); ++n) EXPECT_FALSE(GpuAnswer::decode(std::span(bytes).first(n), 0).ok()) << n;
  bytes.push_back({});
  EXPECT_FALSE(GpuAnswer::decode(bytes, 0).ok());
}

}  // namespace
}  // namespace moeccl::comm
