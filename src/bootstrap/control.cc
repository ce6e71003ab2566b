// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/control.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>

#include "src/base/wire.h"
#include "src/bootstrap/handshake.h"

namespace moeccl::bootstrap {
namespace {

constexpr size_t kSealedBytes = kControlHeadBytes - crypto_auth_hmacsha256_BYTES;

const unsigned char* raw(std::span<const std::byte> b) { return reinterpret_cast<const unsigned char*>(b.data()); }

void encrypt(const Key& key, uint64_t number, std::span<std::byte> bytes) {
  static_assert(kKeyBytes == crypto_stream_chacha20_KEYBYTES && sizeof(number) == crypto_stream_chacha20_NONCEBYTES);
  if (bytes.empty()) return;  // libsodium accepts no null pointer, whatever the length
  unsigned char nonce[sizeof(number)];
  std::memcpy(nonce, &number, sizeof(number));
  auto* const in_place = reinterpret_cast<unsigned char*>(bytes.data());
  crypto_stream_chacha20_xor(in_place, in_place, bytes.size(), nonce, raw(key));
}

Key mask_key(const Key& key) { return derive_key(key, "moeccl payload keys"); }

}  // namespace

Key PayloadKeys::next() { return derive_key(seed_, format("moeccl payload {}", number_++)); }

SealedPayload::SealedPayload(std::vector<std::byte> plain, const Key& own_key) : bytes(std::move(plain)), key(own_key) {
  encrypt(key, 0, bytes);
  digest = digest_of(bytes);
}

ControlHead SealedPayload::head(uint16_t type, size_t n_fds) const {
  return {static_cast<uint32_t>(bytes.size()), type, static_cast<uint16_t>(n_fds), digest, key};
}

bool open_payload(const ControlHead& head, std::span<std::byte> payload) {
  if (payload.size() != head.n_bytes || digest_of(payload) != head.digest) return false;
  encrypt(head.payload_key, 0, payload);
  return true;
}

Sealer::Sealer(const Key& key) : key_(key), mask_key_(mask_key(key)) {}
Opener::Opener(const Key& key) : key_(key), mask_key_(mask_key(key)) {}

Digest digest_of(std::span<const std::byte> payload) {
  // Selects the fastest code for this processor. Later calls return at once. Without it, the portable code is used.
  static const int ready = sodium_init();
  static_cast<void>(ready);
  Digest digest;
  crypto_generichash(reinterpret_cast<unsigned char*>(digest.data()), digest.size(), raw(payload), payload.size(),
                     nullptr, 0);
  return digest;
}

ControlHeadBytes Sealer::seal(const ControlHead& head) {
  Writer w;
  w.u32(head.n_bytes);
  w.u16(head.type);
  w.u16(head.n_fds);
  w.u64(next_);
  w.raw(head.digest);
  Key masked = head.payload_key;
  encrypt(mask_key_, next_++, masked);
  w.raw(masked);
  ControlHeadBytes out;
  std::copy(w.view().begin(), w.view().end(), out.begin());
  crypto_auth_hmacsha256(reinterpret_cast<unsigned char*>(out.data()) + kSealedBytes, raw(out), kSealedBytes,
                         raw(key_));
  return out;
}

Result<ControlHead> Opener::open(std::span<const std::byte, kControlHeadBytes> bytes, size_t max_bytes) {
  const unsigned char* mac = raw(bytes) + kSealedBytes;
  if (crypto_auth_hmacsha256_verify(mac, raw(bytes), kSealedBytes, raw(key_)) != 0) {
    return Status(moecclRemoteError, "a control frame is not authentic");
  }
  Reader r(bytes);
  ControlHead head;
  head.n_bytes = r.u32();
  head.type = r.u16();
  head.n_fds = r.u16();
  const uint64_t sequence = r.u64();
  const std::span<const std::byte> digest = r.raw(head.digest.size());
  std::copy(digest.begin(), digest.end(), head.digest.begin());
  const std::span<const std::byte> masked = r.raw(head.payload_key.size());
  std::copy(masked.begin(), masked.end(), head.payload_key.begin());
  encrypt(mask_key_, sequence, head.payload_key);
  if (sequence != next_) {
    return error(moecclRemoteError, "control frame {} came where {} was due (replayed or lost)", sequence, next_);
  }
  ++next_;
  if (head.n_bytes > max_bytes) {
    return error(moecclRemoteError, "a control frame announces {} bytes, at most {} are accepted", head.n_bytes,
                 max_bytes);
  }
  return head;
}

}  // namespace moeccl::bootstrap
