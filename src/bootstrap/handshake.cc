// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/handshake.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "src/base/random.h"
#include "src/base/wire.h"
#include "src/driver/socket.h"

namespace moeccl::bootstrap {
namespace {

constexpr std::string_view kMagic = "MoEC";
constexpr size_t kClaimBytes = 56;  // everything before the MAC
constexpr size_t kMacBytes = kHandshakeFrameBytes - kClaimBytes;
static_assert(kMacBytes == crypto_auth_hmacsha256_BYTES && kKeyBytes == crypto_auth_hmacsha256_KEYBYTES);

enum FrameType : uint8_t { kHello = 1, kChallenge = 2, kProof = 3, kRefused = 4 };
constexpr uint32_t kExchangesKeys = 1;  // of the flags

struct Claims {
  FrameType type = kHello;
  Party party;
  Nonce nonce = {};
};

using Mac = std::array<std::byte, kMacBytes>;
using Bytes = std::span<const std::byte>;

const unsigned char* raw(Bytes b) { return reinterpret_cast<const unsigned char*>(b.data()); }

// The label's length comes first, so that no two inputs give the same bytes.
Mac mac_of(Bytes key, std::string_view label, std::initializer_list<Bytes> parts) {
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, raw(key), key.size());
  const auto n_label = static_cast<unsigned char>(label.size());
  crypto_auth_hmacsha256_update(&state, &n_label, 1);
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(label.data()), label.size());
  for (const Bytes part : parts) crypto_auth_hmacsha256_update(&state, raw(part), part.size());
  Mac mac;
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(mac.data()));
  return mac;
}

Bytes claims_of(HandshakeFrameView frame) { return frame.first<kClaimBytes>(); }

bool has_mac(HandshakeFrameView frame, const Mac& mac) {
  return sodium_memcmp(frame.data() + kClaimBytes, mac.data(), mac.size()) == 0;  // in constant time
}

void set_mac(HandshakeFrame* frame, const Mac& mac) {
  std::memcpy(frame->data() + kClaimBytes, mac.data(), mac.size());
}

HandshakeFrame frame_of(FrameType type, const Party& party, const Nonce& nonce) {
  Writer w;
  w.raw(std::as_bytes(std::span(kMagic.data(), kMagic.size())));
  w.u16(party.protocol);
  w.u8(type);
  w.u8(static_cast<uint8_t>(party.role));
  w.u32(party.rank);
  w.u32(party.n_ranks);
  w.u32(party.library_version);
  w.u32(party.exchanges_keys ? kExchangesKeys : 0);
  w.raw(nonce);
  HandshakeFrame frame = {};
  std::copy(w.view().begin(), w.view().end(), frame.begin());
  return frame;
}

// Returns false if the frame is not a MoECCL frame of any version.
bool parse(HandshakeFrameView frame, Claims* claims) {
  if (!starts_like_handshake(frame)) return false;
  Reader r(frame.subspan(kMagic.size()));
  claims->party.protocol = r.u16();
  claims->type = static_cast<FrameType>(r.u8());
  claims->party.role = static_cast<Role>(r.u8());
  claims->party.rank = r.u32();
  claims->party.n_ranks = r.u32();
  claims->party.library_version = r.u32();
  claims->party.exchanges_keys = (r.u32() & kExchangesKeys) != 0;
  const Bytes nonce = r.raw(claims->nonce.size());
  std::copy(nonce.begin(), nonce.end(), claims->nonce.begin());
  return true;
}

Mac hello_mac(const Key& key, HandshakeFrameView hello) { return mac_of(key, "moeccl hello", {claims_of(hello)}); }
Mac challenge_mac(const Key& key, HandshakeFrameView hello, HandshakeFrameView challenge) {
  return mac_of(key, "moeccl challenge", {hello, claims_of(challenge)});
}
Mac proof_mac(const Key& key, HandshakeFrameView hello, HandshakeFrameView challenge, HandshakeFrameView proof) {
  return mac_of(key, "moeccl proof", {hello, challenge, claims_of(proof)});
}

// Works like HKDF-Extract (RFC 5869) with the shared key as salt: the result requires both the secret from X25519 (RFC
// 7748) and the shared key. Returns false if the peer's public key is invalid.
bool session_keys(const Key& key, HandshakeFrameView hello, HandshakeFrameView challenge, const Fresh& own,
                  const Nonce& peers, bool client, SessionKeys* keys) {
  Key secret = {};
  static_assert(sizeof(secret) == crypto_scalarmult_BYTES && sizeof(peers) == crypto_scalarmult_BYTES);
  if (own.exchanges_keys &&
      crypto_scalarmult(reinterpret_cast<unsigned char*>(secret.data()), raw(own.secret), raw(peers)) != 0) {
    return false;
  }
  const Key to_server = mac_of(key, "moeccl to server", {hello, challenge, secret});
  const Key to_client = mac_of(key, "moeccl to client", {hello, challenge, secret});
  keys->send = client ? to_server : to_client;
  keys->receive = client ? to_client : to_server;
  sodium_memzero(secret.data(), secret.size());
  return true;
}

Party with(Party party, const Fresh& fresh) {
  party.exchanges_keys = fresh.exchanges_keys;
  return party;
}

}  // namespace

bool starts_like_handshake(std::span<const std::byte> bytes) {
  return std::memcmp(bytes.data(), kMagic.data(), std::min(bytes.size(), kMagic.size())) == 0;
}

std::string version_text(const Party& party) {
  return format("protocol {} (library {}.{}.{})", party.protocol, party.library_version / 10000,
                party.library_version / 100 % 100, party.library_version % 100);
}

Fresh::~Fresh() { sodium_memzero(secret.data(), secret.size()); }

Result<Fresh> Fresh::make(bool exchanges_keys) {
  Fresh fresh;
  fresh.exchanges_keys = exchanges_keys;
  Key random;
  MOECCL_TRY(random_bytes(random.data(), random.size()));
  if (!exchanges_keys) {
    fresh.nonce = random;
    return fresh;
  }
  fresh.secret = random;
  sodium_memzero(random.data(), random.size());
  return fresh;
}

void Fresh::publish() {
  if (!exchanges_keys || nonce != Nonce{}) return;
  crypto_scalarmult_base(reinterpret_cast<unsigned char*>(nonce.data()), raw(secret));
}

Key derive_key(std::span<const std::byte> key, std::string_view label) { return mac_of(key, label, {}); }

uint64_t public_number(const Key& key) {
  const Key derived = derive_key(key, "moeccl public number");
  uint64_t number;
  std::memcpy(&number, derived.data(), sizeof(number));
  return number;
}

ClientHandshake::ClientHandshake(const Key& key, const Party& self, const Fresh& fresh)
    : key_(key), self_(with(self, fresh)), fresh_(fresh) {
  fresh_.publish();
  hello_ = frame_of(kHello, self_, fresh_.nonce);
  set_mac(&hello_, hello_mac(key_, hello_));
}

Result<HandshakeFrame> ClientHandshake::answer(HandshakeFrameView challenge, Role expected) {
  Claims claims;
  if (!parse(challenge, &claims)) return error(moecclInvalidUsage, "what answers is not MoECCL");
  // A refusal need not be authenticated: at worst an attacker on the path makes this fail, which it can do anyway.
  if (claims.party.protocol != self_.protocol) {
    if (has_mac(challenge, challenge_mac(key_, hello_, challenge))) last_word_ = proof_for(challenge, claims.nonce);
    return error(moecclUnsupported, "the other side speaks {}, this rank {}: use one version on all ranks",
                 version_text(claims.party), version_text(self_));
  }
  if (claims.type != kChallenge || claims.party.role != expected ||
      !has_mac(challenge, challenge_mac(key_, hello_, challenge))) {
    return error(moecclInvalidUsage, "what answers does not hold the key of this id");
  }
  if (claims.party.exchanges_keys != self_.exchanges_keys) {
    return error(moecclMismatch, "the other side {} for encryption and this rank {}: set MOECCL_ENCRYPT alike",
                 claims.party.exchanges_keys ? "exchanges keys" : "exchanges no keys",
                 self_.exchanges_keys ? "does" : "does not");
  }
  result_.peer = claims.party;
  if (!session_keys(key_, hello_, challenge, fresh_, claims.nonce, true, &result_.keys))
    return error(moecclInvalidUsage, "what answers sends no valid public key");
  return proof_for(challenge, claims.nonce);
}

HandshakeFrame ClientHandshake::proof_for(HandshakeFrameView challenge, const Nonce& nonce) const {
  HandshakeFrame proof = frame_of(kProof, self_, nonce);
  set_mac(&proof, proof_mac(key_, hello_, challenge, proof));
  return proof;
}

ServerHandshake::ServerHandshake(const Key& key, const Party& self, const Fresh& fresh)
    : key_(key), self_(with(self, fresh)), fresh_(fresh) {}

ServerHandshake::Answer ServerHandshake::on_hello(HandshakeFrameView hello, Role expected) {
  Answer answer;
  Claims claims;
  if (challenged_ || !parse(hello, &claims) || claims.type != kHello) return answer;
  answer.holds_key = has_mac(hello, hello_mac(key_, hello));
  result_.peer = claims.party;
  skewed_ = claims.party.protocol != self_.protocol;
  if (skewed_ && !answer.holds_key) {
    answer.verdict = Verdict::kSkew;
    answer.reply = frame_of(kRefused, self_, {});
    return answer;
  }
  answer.wrong_key = !answer.holds_key;
  if (!answer.holds_key || claims.party.role != expected) return answer;
  peers_nonce_ = claims.nonce;
  std::copy(hello.begin(), hello.end(), hello_.begin());
  fresh_.publish();
  challenge_ = frame_of(skewed_ ? kRefused : kChallenge, self_, fresh_.nonce);
  set_mac(&challenge_, challenge_mac(key_, hello_, challenge_));
  challenged_ = true;
  answer.verdict = skewed_ ? Verdict::kSkew : Verdict::kContinue;
  answer.reply = challenge_;
  return answer;
}

bool ServerHandshake::on_proof(HandshakeFrameView proof) {
  if (!challenged_) return false;
  challenged_ = false;  // one attempt per challenge
  Claims claims;
  if (!parse(proof, &claims) || claims.type != kProof) return false;
  if (!has_mac(proof, proof_mac(key_, hello_, challenge_, proof))) return false;
  // If only this side exchanges keys, the client still gets the challenge, which says so, but gets no further.
  return skewed_ || (result_.peer.exchanges_keys == self_.exchanges_keys &&
                     session_keys(key_, hello_, challenge_, fresh_, peers_nonce_, false, &result_.keys));
}

Result<Authenticated> client_handshake(int fd, const Key& key, const Party& self, const Wanted& wanted,
                                       Deadline deadline, const driver::Watch& watch) {
  MOECCL_ASSIGN_OR_RETURN(const Fresh fresh, Fresh::make(self.exchanges_keys));
  ClientHandshake client(key, self, fresh);
  MOECCL_TRY(driver::send_all(fd, client.hello(), deadline, watch));
  HandshakeFrame challenge;
  MOECCL_TRY(driver::recv_exact(fd, challenge, deadline, watch));
  const Result<HandshakeFrame> proof = client.answer(challenge, wanted.role);
  if (client.last_word()) static_cast<void>(driver::send_all(fd, *client.last_word(), deadline, watch));
  if (!proof.ok()) return proof.status();
  if (wanted.accepts) MOECCL_TRY(wanted.accepts(client.result().peer));
  MOECCL_TRY(driver::send_all(fd, proof.value(), deadline, watch));
  return client.result();
}

}  // namespace moeccl::bootstrap
