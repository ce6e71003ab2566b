// SPDX-License-Identifier: Apache-2.0
// Who may speak, proved by HMAC-SHA256 with a shared 256-bit key. Three frames of one fixed size:
//
//   client -> server  hello      role, rank, n_ranks, versions, client nonce
//   server -> client  challenge  role, rank, n_ranks, versions, server nonce; its MAC covers the hello
//   client -> server  proof      repeats the hello's claims; its MAC covers hello and challenge
//
// Every MAC has its own label, so no frame can stand for another (reflection); nonces are fresh on both sides, so no
// frame is of use twice (replay). The hello has a MAC of its own: a stranger without the key gets no answer at all. A
// peer of another version gets a refusal in the place of the challenge; if it holds the key it proves that, too, so
// that an overheard hello fails no group.
//
// Between hosts both sides exchange keys: each nonce is then an ephemeral X25519 public key, and the session's keys
// come from its shared secret, too. Whoever records a connection and learns the shared key later cannot open it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "moeccl/version.h"
#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

// Raised when frames or rounds change. The layout of the frames up to a refusal and its proof (magic, version, claims,
// nonce, MAC) is the same for ever.
inline constexpr uint16_t kProtocolVersion = 2;

enum class Role : uint8_t { kMember = 1, kRoot = 2, kLinkClient = 3, kLinkServer = 4 };

struct Party {
  Role role = Role::kMember;
  uint32_t rank = 0;
  uint32_t n_ranks = 0;
  uint32_t library_version = MOECCL_VERSION;
  uint16_t protocol = kProtocolVersion;
  bool exchanges_keys = false;  // its nonce is a public key; both sides do, or none
};

inline constexpr size_t kHandshakeFrameBytes = 88;
using HandshakeFrame = std::array<std::byte, kHandshakeFrameBytes>;
using HandshakeFrameView = std::span<const std::byte, kHandshakeFrameBytes>;
using Nonce = std::array<std::byte, 32>;

// What a side brings to one handshake: 32 random bytes, or a public key with its secret, which is wiped behind it.
struct Fresh {
  Nonce nonce = {};
  Key secret = {};  // zeros: the nonce is no public key
  bool exchanges_keys = false;

  Fresh() = default;
  Fresh(const Nonce& random) : nonce(random) {}
  Fresh(const Fresh&) = default;
  Fresh& operator=(const Fresh&) = default;
  ~Fresh();
  static Result<Fresh> make(bool exchanges_keys);
  // Fills the nonce where it is a public key and not there yet. A handshake does it when it needs it: that takes 40 us,
  // which no stranger gets.
  void publish();
};

// One key for each direction, known to both after the handshake and to nobody else.
struct SessionKeys {
  Key send = {};
  Key receive = {};
};
struct Authenticated {
  Party peer;
  SessionKeys keys;
};

// The two sides as pure state machines: frames in, frames out.
class ClientHandshake {
 public:
  ClientHandshake(const Key& key, const Party& self, const Fresh& fresh);
  const HandshakeFrame& hello() const { return hello_; }
  // The proof. Unsupported: another version (names both); InvalidUsage: the server does not hold the key; Mismatch:
  // only one side exchanges keys.
  Result<HandshakeFrame> answer(HandshakeFrameView challenge, Role expected);
  const Authenticated& result() const { return result_; }
  // After Unsupported: what proves to the server that one of its group speaks another version; may be empty.
  const std::optional<HandshakeFrame>& last_word() const { return last_word_; }

 private:
  HandshakeFrame proof_for(HandshakeFrameView challenge, const Nonce& nonce) const;

  Key key_;
  Party self_;
  Fresh fresh_;
  HandshakeFrame hello_ = {};
  Authenticated result_;
  std::optional<HandshakeFrame> last_word_;
};

class ServerHandshake {
 public:
  enum class Verdict : uint8_t {
    kContinue,  // send `reply`, the challenge
    kStranger,  // no key: send nothing, close
    kSkew,      // another protocol version: send `reply`, which names this one, and close, but for holds_key
  };
  struct Answer {
    Verdict verdict = Verdict::kStranger;
    HandshakeFrame reply = {};
    bool holds_key = false;  // with kSkew: perhaps it is one of ours; its proof will tell, see skewed()
  };

  ServerHandshake(const Key& key, const Party& self, const Fresh& fresh);
  Answer on_hello(HandshakeFrameView hello, Role expected);
  // True once, for the one right proof.
  bool on_proof(HandshakeFrameView proof);
  // Whether the proof was about a refusal: the client is one of the group and speaks another version.
  bool skewed() const { return skewed_; }
  // The client's claims: after kContinue not yet proved fresh; after on_proof() proved.
  const Authenticated& result() const { return result_; }

 private:
  Key key_;
  Party self_;
  Fresh fresh_;
  HandshakeFrame hello_ = {};
  HandshakeFrame challenge_ = {};
  Nonce peers_nonce_ = {};
  bool challenged_ = false, skewed_ = false;
  Authenticated result_;
};

// The first bytes of every frame, for servers that want to drop strangers before the frame is complete.
bool starts_like_handshake(std::span<const std::byte> bytes);
// "protocol 2 (library 10203)"
std::string version_text(const Party& party);

// Blocking, over a connected socket. watch: see driver::recv_exact. RemoteError: the peer closed without a word.
Result<Authenticated> client_handshake(int fd, const Key& key, const Party& self, Role expected, Deadline deadline,
                                       int watch = -1);

// HMAC-SHA256(key, label): an independent key for another purpose.
Key derive_key(std::span<const std::byte> key, std::string_view label);
// A number that tells one key from another and does not give it away, for logs and dumps.
uint64_t public_number(const Key& key);

}  // namespace moeccl::bootstrap
