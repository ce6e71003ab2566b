// SPDX-License-Identifier: Apache-2.0
// Mutual authentication by HMAC-SHA256 with a shared 256-bit key. There are three frames of one fixed size:
//
//   client -> server  hello      role, rank, n_ranks, versions, client nonce
//   server -> client  challenge  role, rank, n_ranks, versions, server nonce; its MAC covers the hello
//   client -> server  proof      repeats the hello's claims; its MAC covers hello and challenge
//
// Every MAC has its own label, so no frame can stand for another (reflection). Nonces are fresh on both sides, so no
// frame can be used twice (replay). The hello has a MAC of its own, so a stranger without the key gets no answer at
// all. A peer of another version gets a refusal in place of the challenge. If it holds the key it proves that too, so
// that an overheard hello cannot make a group fail.
//
// Between hosts, both sides exchange keys: each nonce is then an ephemeral X25519 public key, and the session keys also
// depend on its shared secret. An attacker that records a connection and learns the shared key later cannot decrypt it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "moeccl/version.h"
#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

// Increased when frames or rounds change. The layout of the frames up to a refusal and its proof (magic, version,
// claims, nonce, MAC) stays the same forever.
inline constexpr uint16_t kProtocolVersion = 12;

enum class Role : uint8_t { kMember = 1, kRoot = 2, kLinkClient = 3, kLinkServer = 4 };

struct Party {
  Role role = Role::kMember;
  uint32_t rank = 0;  // of a root: its number (RootServer::Config)
  uint32_t n_ranks = 0;
  uint32_t library_version = MOECCL_VERSION;
  uint16_t protocol = kProtocolVersion;
  bool exchanges_keys = false;  // its nonce is a public key; must be the same on both sides
};

inline constexpr size_t kHandshakeFrameBytes = 88;
using HandshakeFrame = std::array<std::byte, kHandshakeFrameBytes>;
using HandshakeFrameView = std::span<const std::byte, kHandshakeFrameBytes>;
using Nonce = std::array<std::byte, 32>;

// A side's contribution to one handshake: 32 random bytes, or a public key with its secret. The secret is wiped at the
// end.
struct Fresh {
  Nonce nonce = {};
  Key secret = {};  // zeros if the nonce is not a public key
  bool exchanges_keys = false;

  Fresh() = default;
  Fresh(const Nonce& random) : nonce(random) {}
  Fresh(const Fresh&) = default;
  Fresh& operator=(const Fresh&) = default;
  ~Fresh();
  static Result<Fresh> make(bool exchanges_keys);
  // Computes the nonce if it is a public key and not there yet. A handshake does this only when it needs it, because it
  // takes 40 us, which are not spent on strangers.
  void publish();
};

// One key for each direction, known after the handshake to both sides and to no other process.
struct SessionKeys {
  Key send = {};
  Key receive = {};
};
struct Authenticated {
  Party peer;
  SessionKeys keys;
};

// The two sides as pure state machines that take frames and return frames.
class ClientHandshake {
 public:
  ClientHandshake(const Key& key, const Party& self, const Fresh& fresh);
  const HandshakeFrame& hello() const { return hello_; }
  // Returns the proof. Unsupported: another version (names both). InvalidUsage: the server does not hold the key.
  // Mismatch: only one side exchanges keys.
  Result<HandshakeFrame> answer(HandshakeFrameView challenge, Role expected);
  const Authenticated& result() const { return result_; }
  // After Unsupported: the frame that proves to the server that a rank of its group speaks another version; may be
  // empty.
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
    kContinue,  // send `reply`, which is the challenge
    kStranger,  // holds no key: send nothing and close
    kSkew,      // another protocol version: send `reply`, which names this one, and close unless holds_key is set
  };
  struct Answer {
    Verdict verdict = Verdict::kStranger;
    HandshakeFrame reply = {};
    bool wrong_key = false;  // with kStranger: it speaks like a rank, but holds another key
    bool holds_key = false;  // with kSkew: this may be a rank of the group, and its proof will tell; see skewed()
  };

  ServerHandshake(const Key& key, const Party& self, const Fresh& fresh);
  Answer on_hello(HandshakeFrameView hello, Role expected);
  // Returns true once, for the one correct proof.
  bool on_proof(HandshakeFrameView proof);
  // Returns true if the client belongs to the group but speaks another version; its proof then was about a refusal.
  bool skewed() const { return skewed_; }
  // Returns the client's claims. They are not yet proved fresh after kContinue; they are proved after on_proof().
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

// Checks the first bytes of a frame, so that servers can drop strangers before the frame is complete.
bool starts_like_handshake(std::span<const std::byte> bytes);
// "protocol 2 (library 10203)"
std::string version_text(const Party& party);

// The server that a client looks for. `accepts`, which may be empty, is asked once the server has proved that it holds
// the key. After its failure the server gets no proof, and does not count the client among those that have come.
struct Wanted {
  Role role = Role::kRoot;
  std::function<Status(const Party& server)> accepts = {};
};

// Runs the client's side over a connected socket and blocks. RemoteError: the peer closed the connection without an
// answer.
Result<Authenticated> client_handshake(int fd, const Key& key, const Party& self, const Wanted& wanted,
                                       Deadline deadline, const driver::Watch& watch = {});

// Returns HMAC-SHA256(key, label), an independent key for another purpose.
Key derive_key(std::span<const std::byte> key, std::string_view label);
// Returns a number for logs and dumps that distinguishes keys without revealing them.
uint64_t public_number(const Key& key);

}  // namespace moeccl::bootstrap
