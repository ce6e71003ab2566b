// SPDX-License-Identifier: Apache-2.0
#include "src/base/adopt.h"

#include <gtest/gtest.h>

#include <cstring>

namespace moeccl {
namespace {

TEST(Adopt, GivesAnOlderStructItsDefaults) {
  moecclMoeConfig_t given;
  std::memset(&given, 0xFF, sizeof(given));
  given.size = offsetof(moecclMoeConfig_t, staging_bytes);  // as in version 0.1
  given.hidden_bytes = 64;
  const Result<moecclMoeConfig_t> full = adopt(&given, "config");
  ASSERT_TRUE(full.ok());
  EXPECT_EQ(full->size, sizeof(moecclMoeConfig_t));
  EXPECT_EQ(full->hidden_bytes, 64u);
  EXPECT_EQ(full->staging_bytes, 0u);
  EXPECT_EQ(full->deterministic, 0);
}

TEST(Adopt, RefusesWhatIsNoVersionsSizeAndSaysWhichOnesAre) {
  moecclMoeConfig_t given = MOECCL_MOE_CONFIG_INIT;
  for (const size_t size : {size_t{0}, size_t{8}, size_t{88}, sizeof(given) - 4, size_t{1} << 20}) {
    given.size = size;
    const Status refused = adopt(&given, "config").status();
    EXPECT_EQ(refused.code(), moecclInvalidArgument);
    EXPECT_NE(refused.message().find("config.size is " + std::to_string(size)), std::string::npos) << refused.message();
    EXPECT_NE(refused.message().find("sizeof(moecclMoeConfig_t)"), std::string::npos) << refused.message();
    EXPECT_FALSE(check_out(&given, "info").ok());
  }
  EXPECT_FALSE(adopt<moecclMoeConfig_t>(nullptr, "config").ok());
  EXPECT_FALSE(check_out<moecclMoeConfig_t>(nullptr, "info").ok());
}

TEST(Adopt, TakesANewerStructWhoseUnknownFieldsAreZeroAlone) {
  struct {
    moecclCodec_t known = MOECCL_CODEC_INIT;
    uint64_t later[2] = {};
  } given;
  given.known.size = sizeof(given);
  EXPECT_TRUE(adopt(&given.known, "codec").ok());
  given.later[1] = 1;
  const Status refused = adopt(&given.known, "codec").status();
  EXPECT_EQ(refused.code(), moecclInvalidArgument);
  EXPECT_NE(refused.message().find("beyond the 32 bytes"), std::string::npos) << refused.message();
}

TEST(Give, WritesNoMoreThanTheCallersStructHas) {
  moecclPlanInfo_t made{};
  made.n_chunks = 7;
  std::memset(made.forced, 'x', sizeof(made.forced));
  moecclPlanInfo_t out;
  std::memset(&out, 0xAB, sizeof(out));
  out.size = offsetof(moecclPlanInfo_t, forced);  // as in version 0.1
  give(made, &out);
  EXPECT_EQ(out.size, offsetof(moecclPlanInfo_t, forced));
  EXPECT_EQ(out.n_chunks, 7u);
  EXPECT_EQ(static_cast<unsigned char>(out.forced[0]), 0xAB);
}

TEST(Give, PutsZeroIntoFieldsThatItDoesNotKnow) {
  struct {
    moecclTensorGroups_t known;
    uint64_t later;
    uint64_t behind;
  } out = {{sizeof(moecclTensorGroups_t) + sizeof(uint64_t), 0, 0, 0, 0}, 5, 6};
  give(moecclTensorGroups_t{0, 1, 2, 3, 4}, &out.known);
  EXPECT_EQ(out.known.n_ranks, 4);
  EXPECT_EQ(out.known.size, sizeof(moecclTensorGroups_t) + sizeof(uint64_t));
  EXPECT_EQ(out.later, 0u);
  EXPECT_EQ(out.behind, 6u);
  give<moecclTensorGroups_t>({}, nullptr);
}

}  // namespace
}  // namespace moeccl
