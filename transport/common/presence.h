// SPDX-License-Identifier: Apache-2.0
// Tells whether the processes of peers still exist, for networks whose NICs cannot: to a NIC, a queue pair that its
// process took along looks like a slow network. Each rank listens at a TCP port where nothing is ever said, and a rank
// whose peer's NIC acknowledges nothing connects there. The peer's host refuses only when the listener is gone, and
// with it the process; a process that is stopped is still connected to, and a host without power does not answer.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "src/base/env.h"
#include "src/base/fd.h"
#include "src/driver/socket.h"
#include "transport/transport.h"

namespace moeccl::transport {

// One rank's port.
class Presence {
 public:
  Presence() = default;
  // Where the rank has no address or no free port for it, it cannot be asked after; the log (INFO) says why.
  static Presence open(const NetworkOptions& options, const Env& settings);
  // "10.0.0.1:4711"; empty: it cannot be asked after.
  const std::string& address() const { return address_; }
  // Becomes readable when a peer asks; -1 without an address.
  int fd() const { return listener_.get(); }
  // Takes the connections of those who ask, so that there is room for more. Returns false when that does not work; the
  // kernel then answers as long as it has room.
  bool answer() const;

 private:
  Fd listener_;
  std::string address_;
};

// The ranks after which this one asks. For one thread.
class RollCall {
 public:
  // `address` comes from the rank's Presence. Another machine may have an address of this one (a bridge of containers,
  // a clone), and this machine would then refuse in its place. A rank at such an address is asked after only if it may
  // be here, as `same_network` says (NetworkOptions), and its port has a listener now.
  void add(uint32_t rank, const std::string& address, bool same_network);
  // A firewall refuses in a host's place, so refusals count only at IP addresses of which some rank has answered. Asks
  // after one rank of each address, other ranks after others, and a few times where there is no answer, because packets
  // are lost. Takes 50 ms at most. Returns true to be called again at once, as there are more addresses, and false to
  // be called again a while later, which does nothing once all is known.
  bool meet(uint32_t own_rank);
  // Returns those of the ranks `silent` whose processes are gone. Takes at most a tenth of a second.
  std::vector<uint32_t> gone(std::span<const uint32_t> silent);
  // Adds all ranks of other hosts. `addresses` come from the Presences of all ranks, by rank.
  static RollCall of(const NetworkOptions& options, std::span<const std::string> addresses);

 private:
  struct Peer {
    driver::SocketAddress address;
    std::string host;  // the address without its port
  };
  std::vector<driver::Answer> ask(std::span<const uint32_t> ranks);
  std::vector<uint32_t> one_of_each_unheard(uint32_t own_rank) const;

  std::map<uint32_t, Peer> peers_;      // by rank
  std::map<std::string, bool> is_own_;  // addresses: whether this machine has them
  std::set<std::string> has_answered_;  // addresses
  std::vector<uint32_t> to_ask_;        // in this round of meet()
  uint32_t round_ = 0;
  size_t next_ = 0;  // of the silent ranks, where not all are asked at once
};

// When an engine asks after which peers. ask() is for the engine's thread, without the engine's lock, because it waits
// for answers.
class Questions {
 public:
  Questions() = default;
  explicit Questions(RollCall peers) : peers_(std::move(peers)) {}
  // Whether it is time to note the silent peers. It is then not time again for a while.
  bool due(int64_t now);
  // Whether a peer that acknowledges nothing since `since_ns` (0: it does) is one to ask after.
  static bool too_long(int64_t since_ns, int64_t now);
  // Notes such a peer.
  void note(uint32_t rank, int64_t since_ns, int64_t now);
  // Returns those of the noted peers whose processes are gone. Takes 150 ms at most.
  std::vector<uint32_t> ask(uint32_t own_rank);
  // Whether ask() has more to do at once.
  bool more() const { return meets_; }

 private:
  RollCall peers_;
  std::vector<uint32_t> silent_;
  int64_t noted_at_ns_ = 0;
  int64_t meets_at_ns_ = 0;  // when the roll call meets the ranks next
  bool meets_ = false;       // and whether there are more to ask at once
};

// Returns why a link loses a peer that is gone().
Status process_gone(const std::string& where);
// Asks once at the address of a rank's Presence, for Link::why_silent(). Takes 400 ms at most. `if_it_lives` is what to
// say where the process answers. Returns an empty text where nothing answers, or there is no address.
std::string why_silent(const std::string& address, const std::string& if_it_lives);

}  // namespace moeccl::transport
