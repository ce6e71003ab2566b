// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/unique_id.h"

#include <gtest/gtest.h>

#include <cstring>

#include "src/base/random.h"

namespace moeccl::bootstrap {
namespace {

UniqueId sample(const char* ip) {
  UniqueId id;
  if (ip == nullptr) {
    id.address = driver::unix_address("moeccl-0123456789abcdef01234567");
  } else {
    id.address = driver::parse_ip_address(ip).value();
  }
  id.key = random_key().value();
  id.host_hash = 77;
  return id;
}

TEST(UniqueId, EveryKindOfAddressComesBack) {
  for (const char* ip : {static_cast<const char*>(nullptr), "10.1.2.3:4567", "[fd00::2]:80"}) {
    UniqueId id = sample(ip);
    id.derived = ip != nullptr;
    Result<moecclUniqueId> bytes = encode_unique_id(id);
    ASSERT_TRUE(bytes.ok()) << bytes.status().message();
    Result<UniqueId> back = decode_unique_id(*bytes);
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_EQ(back->address.str(), id.address.str());
    EXPECT_EQ(back->address.length, id.address.length);
    EXPECT_EQ(back->key, id.key);
    EXPECT_EQ(back->host_hash, 77u);
    EXPECT_EQ(back->derived, id.derived);
    EXPECT_FALSE(back->at_rank_0);
  }
}

TEST(UniqueId, OtherAddressesComeBackAsFarAsThereIsRoom) {
  UniqueId id = sample("[fd00::2]:80");
  for (const char* ip : {"10.1.2.3:80", "[fd00::3]:80", "[fd00::4]:80", "10.1.2.4:80"})
    id.others.push_back(driver::parse_ip_address(ip).value());
  const Result<UniqueId> back = decode_unique_id(encode_unique_id(id).value());
  ASSERT_TRUE(back.ok()) << back.status().message();
  ASSERT_EQ(back->others.size(), 3u);
  EXPECT_EQ(back->others[0].str(), "10.1.2.3:80");
  EXPECT_EQ(back->others[1].str(), "[fd00::3]:80");
  EXPECT_EQ(back->others[2].str(), "10.1.2.4:80");
  id.others[0].set_port(81);
  EXPECT_EQ(encode_unique_id(id).status().code(), moecclInternalError);
  id = sample(nullptr);
  id.others.push_back(driver::parse_ip_address("10.1.2.3").value());
  EXPECT_EQ(encode_unique_id(id).status().code(), moecclInternalError);
}

TEST(UniqueId, EveryFlippedBitIsFound) {
  for (const char* ip : {static_cast<const char*>(nullptr), "10.1.2.3:4567"}) {
    const moecclUniqueId good = encode_unique_id(sample(ip)).value();
    for (size_t bit = 0; bit < sizeof(good.internal) * 8; ++bit) {
      moecclUniqueId bad = good;
      bad.internal[bit / 8] = static_cast<char>(bad.internal[bit / 8] ^ (1 << (bit % 8)));
      EXPECT_EQ(decode_unique_id(bad).status().code(), moecclInvalidArgument) << "bit " << bit;
    }
  }
}

TEST(UniqueId, TruncatedZeroAndRandomOnesAreRefused) {
  const moecclUniqueId good = encode_unique_id(sample(nullptr)).value();
  for (size_t kept = 0; kept < sizeof(good.internal); ++kept) {
    moecclUniqueId bad = {};
    std::memcpy(bad.internal, good.internal, kept);
    if (std::memcmp(&bad, &good, sizeof(bad)) == 0) continue;  // the last bytes happened to be zero
    EXPECT_FALSE(decode_unique_id(bad).ok()) << kept;
  }
  SplitMix64 random(3);
  for (int i = 0; i < 10'000; ++i) {
    moecclUniqueId bad;
    for (char& c : bad.internal) c = static_cast<char>(random());
    if (i % 2 == 0) std::memcpy(bad.internal, good.internal, 16);
    EXPECT_FALSE(decode_unique_id(bad).ok());
  }
}

TEST(UniqueId, TheKeyIsInNoSentence) {
  moecclUniqueId bad = encode_unique_id(sample(nullptr)).value();
  bad.internal[100] ^= 1;
  const std::string sentence = decode_unique_id(bad).status().message();
  EXPECT_LT(sentence.size(), 200u);
  EXPECT_NE(sentence.find("moecclGetUniqueId"), std::string::npos);
}

}  // namespace
}  // namespace moeccl::bootstrap
