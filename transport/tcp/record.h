// SPDX-License-Identifier: Apache-2.0
// Records: what an encrypted connection carries instead of plain frames. Each consists of
//
//   head   its number u64, bytes of the text u32, 0 u32, SipHash-2-4 of these u64
//   text   encrypted, 1 to kRecordBytes bytes
//   tag    of head and text, 16 bytes
//
// The text is a piece of the stream of frames (wire.h). A head authenticates itself, so that a changed length is found
// at once and not when bytes fail to come. Each connection and direction has its own key, and the number, which is the
// nonce, counts its records, so no nonce comes twice. After kRecordsPerKey records, a key is replaced by one derived
// from it, which bounds what a key encrypts and keeps earlier records secret from a later key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "src/base/status.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::transport::tcp {

enum class Cipher : uint8_t { kNone, kChaCha20Poly1305, kAes256Gcm };
// Returns the best cipher that this processor has instructions for.
Cipher best_cipher();
// Returns the best cipher that both of two processors have.
inline Cipher common_cipher(Cipher a, Cipher b) { return a < b ? a : b; }
const char* cipher_name(Cipher cipher);

// What both ends of a connection agree on. kNone: frames are sent as they are.
struct RecordKeys {
  Cipher cipher = Cipher::kNone;
  bootstrap::Key send = {}, receive = {};
};

struct RecordHead {
  uint64_t number;
  uint32_t bytes, zero;
  uint64_t mac;
};
static_assert(sizeof(RecordHead) == 24);

// Records stay in the processor's cache between encryption and socket (docs/decisions/101-encryption.md).
inline constexpr size_t kRecordBytes = 32 << 10;
inline constexpr size_t kTagBytes = 16;
inline constexpr size_t kRecordOverhead = sizeof(RecordHead) + kTagBytes;
inline constexpr uint64_t kRecordsPerKey = 1 << 16;  // 2 GiB: far below the limit of AES-GCM

// One direction's key and the number of the next record.
class RecordKey {
 public:
  RecordKey(Cipher cipher, const bootstrap::Key& key);
  ~RecordKey();
  RecordKey(const RecordKey&) = delete;
  RecordKey& operator=(const RecordKey&) = delete;

 protected:
  void prepare();  // computes what is derived from key_
  void next();     // advances the number, and replaces a worn-out key
  uint64_t mac_of(const RecordHead& head) const;

  Cipher cipher_;
  bootstrap::Key key_;
  uint64_t number_ = 0;
  std::array<unsigned char, 16> head_key_ = {};      // SipHash's
  alignas(16) std::array<std::byte, 512> aes_ = {};  // libsodium's expanded key
};

class RecordSealer : public RecordKey {
 public:
  using RecordKey::RecordKey;
  // Writes one record of 1 to kRecordBytes bytes of text to `to`: text.size() + kRecordOverhead bytes.
  void seal(std::span<const std::byte> text, std::byte* to);
};

// After a failure every further call fails the same way, because the order of what follows is unknown.
class RecordOpener : public RecordKey {
 public:
  using RecordKey::RecordKey;
  // Returns the number of text bytes in the next record, from its head. RemoteError: it was not sealed as the next one;
  // the message says what is wrong with it.
  Result<size_t> announce(std::span<const std::byte, sizeof(RecordHead)> head);
  // Opens the whole record behind announce(). Nothing of a text that is not authentic is left in `to`.
  Status open(std::span<const std::byte> record, std::byte* to);

 private:
  Status broken_;
};

}  // namespace moeccl::transport::tcp
