// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/record.h"

#include <sodium.h>

#include <cassert>
#include <cstddef>
#include <cstring>

#include "src/bootstrap/handshake.h"

namespace moeccl::transport::tcp {
namespace {

using Nonce = std::array<unsigned char, 12>;
static_assert(sizeof(Nonce) == crypto_aead_aes256gcm_NPUBBYTES);
static_assert(sizeof(Nonce) == crypto_aead_chacha20poly1305_ietf_NPUBBYTES);
static_assert(kTagBytes == crypto_aead_aes256gcm_ABYTES && kTagBytes == crypto_aead_chacha20poly1305_ietf_ABYTES);
static_assert(bootstrap::kKeyBytes == crypto_aead_aes256gcm_KEYBYTES &&
              bootstrap::kKeyBytes == crypto_aead_chacha20poly1305_ietf_KEYBYTES);

using AesState = crypto_aead_aes256gcm_state;

Nonce nonce_of(uint64_t number) {
  Nonce nonce = {};
  std::memcpy(nonce.data() + 4, &number, sizeof(number));
  return nonce;
}

const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

}  // namespace

Cipher best_cipher() {
  // The first call detects the processor's features.
  static const int ready = sodium_init();
  return ready >= 0 && crypto_aead_aes256gcm_is_available() == 1 ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
}

const char* cipher_name(Cipher cipher) {
  switch (cipher) {
    case Cipher::kChaCha20Poly1305:
      return "ChaCha20-Poly1305";
    case Cipher::kAes256Gcm:
      return "AES-256-GCM";
    default:
      return "none";
  }
}

RecordKey::RecordKey(Cipher cipher, const bootstrap::Key& key)
    : cipher_(cipher), key_(bootstrap::derive_key(key, "moeccl records")) {
  prepare();
}

RecordKey::~RecordKey() {
  sodium_memzero(key_.data(), key_.size());
  sodium_memzero(head_key_.data(), head_key_.size());
  sodium_memzero(aes_.data(), aes_.size());
}

void RecordKey::prepare() {
  const bootstrap::Key heads = bootstrap::derive_key(key_, "moeccl record heads");
  static_assert(sizeof(head_key_) == crypto_shorthash_KEYBYTES && sizeof(aes_) == sizeof(AesState));
  std::memcpy(head_key_.data(), heads.data(), head_key_.size());
  if (cipher_ == Cipher::kAes256Gcm) {
    crypto_aead_aes256gcm_beforenm(reinterpret_cast<AesState*>(aes_.data()), raw(key_.data()));
  }
}

void RecordKey::next() {
  if (++number_ % kRecordsPerKey != 0) return;
  key_ = bootstrap::derive_key(key_, "moeccl next records");
  prepare();
}

uint64_t RecordKey::mac_of(const RecordHead& head) const {
  uint64_t mac = 0;
  static_assert(sizeof(mac) == crypto_shorthash_BYTES);
  crypto_shorthash(reinterpret_cast<unsigned char*>(&mac), reinterpret_cast<const unsigned char*>(&head),
                   offsetof(RecordHead, mac), head_key_.data());
  return mac;
}

void RecordSealer::seal(std::span<const std::byte> text, std::byte* to) {
  assert(!text.empty() && text.size() <= kRecordBytes);
  RecordHead head{number_, static_cast<uint32_t>(text.size()), 0, 0};
  head.mac = mac_of(head);
  std::memcpy(to, &head, sizeof(head));
  const Nonce nonce = nonce_of(number_);
  unsigned char* const out = raw(to) + sizeof(head);
  unsigned char* const tag = out + text.size();
  if (cipher_ == Cipher::kAes256Gcm) {
    crypto_aead_aes256gcm_encrypt_detached_afternm(out, tag, nullptr, raw(text.data()), text.size(), raw(to),
                                                   sizeof(head), nullptr, nonce.data(),
                                                   reinterpret_cast<const AesState*>(aes_.data()));
  } else {
    crypto_aead_chacha20poly1305_ietf_encrypt_detached(out, tag, nullptr, raw(text.data()), text.size(), raw(to),
                                                       sizeof(head), nullptr, nonce.data(), raw(key_.data()));
  }
  next();
}

Result<size_t> RecordOpener::announce(std::span<const std::byte, sizeof(RecordHead)> bytes) {
  if (!broken_.ok()) return broken_;
  RecordHead head;
  std::memcpy(&head, bytes.data(), sizeof(head));
  const uint64_t mac = mac_of(head);
  if (sodium_memcmp(&mac, &head.mac, sizeof(mac)) != 0) {
    broken_ = error(moecclRemoteError,
                    "the head of encrypted record {} is not authentic: it was changed or cut on its way", number_);
  } else if (head.number != number_) {
    broken_ =
        error(moecclRemoteError,
              "encrypted record {} came where {} was due: records were dropped, reordered or replayed on their way",
              head.number, number_);
  } else if (head.zero != 0 || head.bytes == 0 || head.bytes > kRecordBytes) {
    broken_ = error(moecclRemoteError, "encrypted record {} has {} bytes where 1 to {} are accepted", number_,
                    head.bytes, kRecordBytes);
  }
  if (!broken_.ok()) return broken_;
  return size_t{head.bytes};
}

Status RecordOpener::open(std::span<const std::byte> record, std::byte* to) {
  if (!broken_.ok()) return broken_;
  assert(record.size() > kRecordOverhead);
  const size_t bytes = record.size() - kRecordOverhead;
  const Nonce nonce = nonce_of(number_);
  const unsigned char* const head = raw(record.data());
  const unsigned char* const in = head + sizeof(RecordHead);
  const int bad =
      cipher_ == Cipher::kAes256Gcm
          ? crypto_aead_aes256gcm_decrypt_detached_afternm(raw(to), nullptr, in, bytes, in + bytes, head,
                                                           sizeof(RecordHead), nonce.data(),
                                                           reinterpret_cast<const AesState*>(aes_.data()))
          : crypto_aead_chacha20poly1305_ietf_decrypt_detached(raw(to), nullptr, in, bytes, in + bytes, head,
                                                               sizeof(RecordHead), nonce.data(), raw(key_.data()));
  if (bad != 0) {
    broken_ = error(moecclRemoteError, "encrypted record {} of {} bytes is not authentic: it was changed on its way",
                    number_, bytes);
    return broken_;
  }
  next();
  return {};
}

}  // namespace moeccl::transport::tcp
