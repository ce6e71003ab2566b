// SPDX-License-Identifier: Apache-2.0
// What several processes report about themselves (moecclStatus), put together: which rank waited for which, and the
// culprit.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tools {

struct Call {
  uint64_t sequence = 0, count = 0;
  uint32_t place = 0;  // the root; for Send/Recv the peer
  std::string op, type, reduce, plan, state;
  double began_ms = 0;  // Unix time
  double ended_ms = 0;  // 0: it has not ended, or the time was not measured

  bool is_send() const { return sequence == 0 && plan == "send"; }
  std::string text() const;  // "allreduce #58 (count 4096, float32, sum, root 0)"
  bool same_call(const Call& other) const;
};

struct Wait {
  std::string what;
  uint64_t sequence = 0;
  int thread = 0;
  double blocked_ms = 0;
  std::vector<uint32_t> peers;
  uint64_t n_peers = 0;  // more than `peers` names, where there are many
  int64_t awaits = -1;   // the only rank that can let it go on; -1: not known
};

// One rank of one communicator.
struct Member {
  std::string process, host, host_id;  // process: its host and number, "3f2a:123"
  int pid = 0;
  uint32_t rank = 0, n_ranks = 0;
  bool failed = false;
  double failed_ms = 0, written_ms = 0;
  std::string code, failure;
  std::vector<Call> calls;
  std::vector<Wait> waits;

  const Call* newest() const;  // of the calls with numbers; null: none
  const Call* call(uint64_t sequence) const;
  void move_back(double ms);  // all its times
  // It waited as long as it was to, or still waits: the rank that kept it waiting is to blame. Other failures cut waits
  // short.
  bool waited_in_full() const { return !failed || code == "moecclTimeout"; }
};

// The ranks of a communicator on one host.
struct Host {
  std::string id, name;
  std::vector<uint32_t> ranks;
  double clock_ahead_ms = 0;  // of the first host's clock
};

struct Group {
  std::string id, name, memory;
  uint32_t n_ranks = 0;
  std::map<uint32_t, Member> members = {};  // by rank; only of processes that reported something
  std::vector<Host> hosts = {};             // where there are several

  const Host* host_of(uint32_t rank) const;  // null: not known
  bool says_something(const Host& host) const;

  std::string title() const;
};

class PostMortem {
 public:
  // live: the processes still run, on this host; other hosts were not asked.
  explicit PostMortem(bool live) : live_(live) {}
  // Adds one process. Throws std::runtime_error with a message when `text` is no status.
  void add(const std::string& text);
  // Returns what has happened, for a person; to be called once, after all processes were added. *found says whether a
  // culprit is named.
  std::string report(bool* found);

 private:
  struct Node {  // a wait
    const Group* group = nullptr;
    const Member* member = nullptr;
    const Wait* wait = nullptr;
  };
  // Finds why `rank` keeps `node` waiting: a culprit, or the waits that the rank is in itself. Nothing: it does its
  // part.
  void follow(const Node& node, uint32_t rank, std::map<std::string, std::vector<std::string>>& culprits,
              std::vector<size_t>& next);
  // Returns the host of `rank` when nothing came from any of its ranks, in any communicator; null when something did,
  // or when the host is not known.
  const Host* silent_host(const Group& group, uint32_t rank) const;
  std::string name_of(const Host& host) const;   // with its id where another host has the same name
  std::string ranks_of(const Host& host) const;  // "ranks 2, 3 of communicator 5c1e09aa; rank 1 of communicator ..."
  // Returns what the rank of `member` itself waits for, in all communicators, as numbers of nodes.
  std::vector<size_t> waits_of(const Member& member, const Node& waiter) const;
  void find_differences(std::vector<std::string>& lines) const;
  std::string first_failure() const;
  std::string cycle(const std::vector<std::vector<size_t>>& edges) const;
  std::string stuck_links() const;

  // Brings all times to one clock where those of the hosts differ. Returns a note about that.
  std::string use_one_clock();

  bool live_;
  std::vector<Group> groups_;
  std::vector<Node> nodes_;
};

}  // namespace tools
