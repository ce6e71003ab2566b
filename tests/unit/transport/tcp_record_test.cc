// SPDX-License-Identifier: Apache-2.0
// Records of encrypted connections: the other side opens a sealed record once, in order and unchanged, or not at all.
#include "transport/tcp/record.h"

#include <gtest/gtest.h>
#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "src/base/random.h"
#include "src/bootstrap/handshake.h"

namespace moeccl::transport::tcp {
namespace {

using Bytes = std::vector<std::byte>;

bootstrap::Key key_of(int n) {
  bootstrap::Key key = {};
  key[0] = static_cast<std::byte>(n);
  return key;
}

Bytes text_of(size_t bytes, uint64_t seed = 1) {
  SplitMix64 random(seed);
  Bytes text(bytes);
  for (std::byte& b : text) b = static_cast<std::byte>(random());
  return text;
}

Bytes sealed(RecordSealer& sealer, const Bytes& text) {
  Bytes record(text.size() + kRecordOverhead);
  sealer.seal(text, record.data());
  return record;
}

// Opens a record as a connection does. Returns the text if everything is right.
Result<Bytes> opened(RecordOpener& opener, const Bytes& record, Bytes* left = nullptr) {
  MOECCL_ASSIGN_OR_RETURN(const size_t bytes, opener.announce(std::span<const std::byte, sizeof(RecordHead)>(
                                                  record.data(), sizeof(RecordHead))));
  if (bytes + kRecordOverhead != record.size()) return error(moecclTimeout, "{} bytes would be waited for", bytes);
  Bytes text(bytes, std::byte{0x5a});
  const Status status = opener.open(record, text.data());
  if (left != nullptr) *left = text;
  if (!status.ok()) return status;
  return text;
}

class TcpRecord : public ::testing::TestWithParam<Cipher> {
 protected:
  void SetUp() override {
    if (GetParam() > best_cipher()) GTEST_SKIP() << "this processor has no AES instructions";
  }
  Cipher cipher() const { return GetParam(); }
};

TEST_P(TcpRecord, OpensToItsTextAndHidesIt) {
  RecordSealer sealer(cipher(), key_of(1));
  RecordOpener opener(cipher(), key_of(1));
  for (const size_t bytes : {size_t{1}, size_t{15}, size_t{16}, size_t{1000}, kRecordBytes}) {
    const Bytes text = text_of(bytes, bytes);
    const Bytes record = sealed(sealer, text);
    if (bytes >= 15) {
      EXPECT_EQ(std::search(record.begin(), record.end(), text.begin(), text.begin() + 15), record.end());
    }
    const Result<Bytes> back = opened(opener, record);
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_EQ(*back, text);
  }
}

TEST_P(TcpRecord, WithAnyBitChangedIsRefusedAndNothingOfItIsLeft) {
  const Bytes text = text_of(40);
  for (size_t bit = 0; bit < (text.size() + kRecordOverhead) * 8; ++bit) {
    RecordSealer sealer(cipher(), key_of(1));
    RecordOpener opener(cipher(), key_of(1));
    Bytes record = sealed(sealer, text), left;
    record[bit / 8] ^= std::byte{1} << (bit % 8);
    const Result<Bytes> back = opened(opener, record, &left);
    ASSERT_EQ(back.status().code(), moecclRemoteError) << bit;
    EXPECT_NE(back.status().message().find("record 0"), std::string::npos) << back.status().message();
    EXPECT_NE(back.status().message().find("not authentic"), std::string::npos) << back.status().message();
    for (size_t i = 0; i + 8 <= left.size(); i += 8) EXPECT_NE(std::memcmp(&left[i], &text[i], 8), 0) << bit;
    // The records after it are not believed any more.
    EXPECT_FALSE(opened(opener, sealed(sealer, text)).ok());
  }
}

TEST_P(TcpRecord, ReplayedDroppedOrReorderedSaysWhichCameAndWhichWasDue) {
  RecordSealer sealer(cipher(), key_of(1));
  Bytes records[4];
  for (Bytes& r : records) r = sealed(sealer, text_of(100));
  struct Case {
    std::vector<int> order;
    const char* said;
  };
  const Case cases[] = {{{0, 0}, "record 0 came where 1 was due"},
                        {{0, 1, 0}, "record 0 came where 2 was due"},
                        {{0, 2}, "record 2 came where 1 was due"},
                        {{1}, "record 1 came where 0 was due"}};
  for (const Case& c : cases) {
    RecordOpener opener(cipher(), key_of(1));
    Status last;
    for (const int i : c.order) {
      ASSERT_TRUE(last.ok());
      last = opened(opener, records[i]).status();
    }
    EXPECT_EQ(last.code(), moecclRemoteError);
    EXPECT_NE(last.message().find(c.said), std::string::npos) << last.message();
  }
}

TEST_P(TcpRecord, OfAnotherKeyDirectionOrConnectionIsRefused) {
  RecordSealer sealer(cipher(), key_of(1));
  RecordOpener opener(cipher(), key_of(2));
  EXPECT_FALSE(opened(opener, sealed(sealer, text_of(100))).ok());
  // The head of one record with the text of another record of the same size.
  RecordSealer here(cipher(), key_of(1));
  Bytes record = sealed(here, text_of(100, 1));
  const Bytes other = sealed(here, text_of(100, 2));
  std::copy(other.begin() + sizeof(RecordHead), other.end(), record.begin() + sizeof(RecordHead));
  RecordOpener mine(cipher(), key_of(1));
  EXPECT_FALSE(opened(mine, record).ok());
}

TEST_P(TcpRecord, OfNoSizeThatIsSentIsRefusedThoughItsSealIsRight) {
  for ([[maybe_unused]] const size_t bytes : {kRecordBytes + 1, size_t{0}}) {
    RecordSealer sealer(cipher(), key_of(1));
    RecordOpener opener(cipher(), key_of(1));
    // The peer holds the keys but lies. seal() asserts only in debug builds.
#ifdef NDEBUG
    const Bytes record = sealed(sealer, text_of(bytes));
    const Status status = opened(opener, record).status();
    EXPECT_NE(status.message().find("where 1 to"), std::string::npos) << status.message();
#endif
  }
}

TEST_P(TcpRecord, EqualTextsNeverLookAlikeAndKeysAreReplaced) {
  RecordSealer sealer(cipher(), key_of(1));
  RecordOpener opener(cipher(), key_of(1));
  const Bytes text = text_of(16);
  std::set<Bytes> seen;
  // Checks the format with only the description in record.h and libsodium.
  const bootstrap::Key first = bootstrap::derive_key(key_of(1), "moeccl records");
  const auto raw = [](const std::byte* at) { return reinterpret_cast<const unsigned char*>(at); };
  const auto opens_with_first_key = [&](const Bytes& record, uint64_t number) {
    unsigned char nonce[12] = {}, out[16];
    std::memcpy(nonce + 4, &number, sizeof(number));
    const auto decrypt =
        cipher() == Cipher::kAes256Gcm ? crypto_aead_aes256gcm_decrypt : crypto_aead_chacha20poly1305_ietf_decrypt;
    return decrypt(out, nullptr, nullptr, raw(record.data()) + sizeof(RecordHead), 16 + kTagBytes, raw(record.data()),
                   sizeof(RecordHead), nonce, raw(first.data())) == 0 &&
           std::memcmp(out, text.data(), sizeof(out)) == 0;
  };
  for (uint64_t i = 0; i < 2 * kRecordsPerKey + 10; ++i) {
    Bytes record = sealed(sealer, text);
    const Result<Bytes> back = opened(opener, record);
    ASSERT_TRUE(back.ok()) << i << ": " << back.status().message();
    ASSERT_EQ(*back, text) << i;
    if (i % kRecordsPerKey <= 1 || i == kRecordsPerKey - 1) {
      EXPECT_EQ(opens_with_first_key(record, i), i < kRecordsPerKey) << i;
    }
    record.erase(record.begin(), record.begin() + sizeof(RecordHead));
    if (i % 97 == 0) {
      EXPECT_TRUE(seen.insert(std::move(record)).second) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ciphers, TcpRecord, ::testing::Values(Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm),
                         [](const auto& info) { return info.param == Cipher::kAes256Gcm ? "Aes" : "ChaCha"; });

}  // namespace
}  // namespace moeccl::transport::tcp
