// SPDX-License-Identifier: Apache-2.0
// Control frames, which follow the handshake. A head of fixed size is checked before anything else is trusted; the
// payload follows it. The head holds: payload bytes u32, type u16, descriptors u16, sequence number u64, BLAKE2b of the
// payload as sent, the payload's own key encrypted under a key of the direction (ChaCha20 with the sequence number as
// nonce), HMAC-SHA256 of all this with the direction's key. A payload that goes to many ranks is encrypted and hashed
// once and sealed for each.
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
  uint16_t n_fds = 0;  // descriptors that are sent with the head
  Digest digest = {};  // of the payload as it is sent
  Key payload_key = {};
};

Digest digest_of(std::span<const std::byte> payload);

// Makes a key for each payload from a seed that only the readers of the payloads know.
class PayloadKeys {
 public:
  PayloadKeys() = default;
  explicit PayloadKeys(const Key& seed) : seed_(seed) {}
  Key next();

 private:
  Key seed_ = {};
  uint64_t number_ = 0;
};

// A payload as it is sent, encrypted with a key that is used for nothing else.
struct SealedPayload {
  SealedPayload(std::vector<std::byte> plain, const Key& key);
  ControlHead head(uint16_t type, size_t n_fds = 0) const;  // announces it
  std::vector<std::byte> bytes;
  Digest digest;
  Key key;
};
// Decrypts in place. Returns false if the payload is not what the head announces.
bool open_payload(const ControlHead& head, std::span<std::byte> payload);

// Seals the heads of one direction and counts them.
class Sealer {
 public:
  Sealer() = default;
  explicit Sealer(const Key& key);
  ControlHeadBytes seal(const ControlHead& head);

 private:
  Key key_ = {}, mask_key_ = {};
  uint64_t next_ = 0;
};

// Opens the heads of one direction. Accepts each frame only once and in order.
class Opener {
 public:
  Opener() = default;
  explicit Opener(const Key& key);
  // Returns RemoteError for a head that is not the next one that the peer sealed, or that announces more than
  // max_bytes.
  Result<ControlHead> open(std::span<const std::byte, kControlHeadBytes> head, size_t max_bytes);

 private:
  Key key_ = {}, mask_key_ = {};
  uint64_t next_ = 0;
};

}  // namespace moeccl::bootstrap
