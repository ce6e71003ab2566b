// SPDX-License-Identifier: Apache-2.0
// Control frames, after the handshake: a head of fixed size that is checked before anything else is believed, then the
// payload. Head: payload bytes u32, type u16, descriptors u16, sequence number u64, BLAKE2b of the payload as it
// travels, the payload's own key under a key of the direction (ChaCha20, the sequence number is its nonce), HMAC-SHA256
// of all this with the direction's key. A payload that goes to many ranks is encrypted and hashed once and sealed for
// each.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/base/status.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

inline constexpr size_t kControlHeadBytes = 112;
using ControlHeadBytes = std::array<std::byte, kControlHeadBytes>;
using Digest = std::array<std::byte, 32>;

struct ControlHead {
  uint32_t n_bytes = 0;
  uint16_t type = 0;
  uint16_t n_fds = 0;  // descriptors that travel with the head
  Digest digest = {};  // of the payload as it travels
  Key payload_key = {};
};

Digest digest_of(std::span<const std::byte> payload);

// A key for each payload, of a seed that is known to nobody but those who read the payloads.
class PayloadKeys {
 public:
  PayloadKeys() = default;
  explicit PayloadKeys(const Key& seed) : seed_(seed) {}
  Key next();

 private:
  Key seed_ = {};
  uint64_t number_ = 0;
};

// A payload as it travels: encrypted with a key that nothing else has.
struct SealedPayload {
  SealedPayload(std::vector<std::byte> plain, const Key& key);
  void announce(ControlHead* head) const;  // its size, digest and key
  std::vector<std::byte> bytes;
  Digest digest;
  Key key;
};
// Decrypts in place. False: it is not what the head announces.
bool open_payload(const ControlHead& head, std::span<std::byte> payload);

// Counts what is sent in one direction.
class Sealer {
 public:
  Sealer() = default;
  explicit Sealer(const Key& key);
  ControlHeadBytes seal(const ControlHead& head);

 private:
  Key key_ = {}, mask_key_ = {};
  uint64_t next_ = 0;
};

// Accepts each frame once and in order.
class Opener {
 public:
  Opener() = default;
  explicit Opener(const Key& key);
  // RemoteError for a head that the peer did not seal next, or that announces more than max_bytes.
  Result<ControlHead> open(std::span<const std::byte, kControlHeadBytes> head, size_t max_bytes);

 private:
  Key key_ = {}, mask_key_ = {};
  uint64_t next_ = 0;
};

}  // namespace moeccl::bootstrap
