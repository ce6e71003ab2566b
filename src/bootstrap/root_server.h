// SPDX-License-Identifier: Apache-2.0
// The work of a Root's thread: one poll loop over listeners, strangers, members and their processes. Strangers are
// served alongside the ranks and delay no rank (see lobby.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"
#include "src/bootstrap/attendance.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/connection.h"
#include "src/bootstrap/handout.h"
#include "src/bootstrap/lobby.h"
#include "src/bootstrap/messages.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/poller.h"

namespace moeccl::bootstrap {

class RootServer {
 public:
  struct Config {
    Key key = {};
    bool over_unix = true;
    int64_t timeout_ms = 0;
    moecclUniqueId id = {};              // the id for the handout listeners
    bool survivors = false;              // see RootOptions
    Key payload_seed = {};               // known only to this root
    bool handout_to_these_pids = false;  // see RootOptions
    uint32_t number = 0;                 // tells the roots with one key apart; 0 where no other has the key
  };
  // Descriptors that become readable when the owner wants the server to end, or to leave its place to another: it then
  // takes no further ranks and serves those that are there.
  struct Wishes {
    int end = -1;
    int leave_place = -1;
  };

  // There are at most two `handouts`, and at most kMaxOtherAddresses listeners besides the first.
  static Result<std::unique_ptr<RootServer>> create(const Config& config, std::vector<Fd> listeners,
                                                    std::vector<HandoutListener> handouts, const Wishes& wishes);
  // Runs until all ranks have left, a failure has been told to all, the time is over or the owner wants the end.
  void run();

 private:
  using Id = uint64_t;  // of a connection; never reused, so that a late event finds nothing
  enum Tag : uint64_t {
    kEnd = 0,
    kLeavePlace = 1,
    kHandout = 2,
    kListener = 4,
    kFirstConnection = 16,
    kProcess = uint64_t{1} << 63
  };
  static_assert(kListener + 1 + kMaxOtherAddresses <= kFirstConnection);

  struct Member {
    Id connection = 0;  // 0: has not joined, or is gone
    bool came = false;
    bool left = false;  // it sent kLeave
    bool told = false;  // it knows of the failure
    bool contributed = false;
    bool in_own_process = false;  // it runs in this root's process
    Peer peer;
    std::string from;  // over TCP: "at 10.0.0.2"
  };
  struct Round {
    uint16_t type = 0;  // 0: not begun
    int first_rank = -1;
    int n_contributed = 0;
    Deadline deadline = Deadline::never();
    int deadline_rank = -1;  // the rank that set the deadline
    size_t n_bytes = 0;
    std::vector<std::vector<std::byte>> blobs;
    std::vector<Writer> rows;  // of kRows: each rank's answer
  };

  RootServer(const Config& config, std::vector<Fd> listeners, std::vector<HandoutListener> handouts,
             const Wishes& wishes, driver::Poller poller);

  // root_server.cc: connections.
  bool finished() const;
  Deadline next_deadline() const;
  void on_event(const epoll_event& event);
  void on_time();
  void accept_some(size_t listener);
  void hand_out(size_t listener);
  bool make_room();
  void pause_accepting();
  void set_accepting(bool on);
  void close_listeners();
  void on_readable(Id id);
  void on_handshake(Id id, Connection* c, const HandshakeFrame& frame);
  void read_all(Id id);
  void flush(Id id);
  void drop(Id id);

  // root_rounds.cc: the group.
  void admit(Id id, Connection* c, const Party& party);
  void watch_process(int32_t pid);
  void on_process_end(int32_t pid);
  void on_lost(Id id, const Status& why);
  void on_message(Id id, ControlMessage message);
  void contribute(Id id, Connection* c, ControlMessage message);
  void give_time(uint32_t timeout_ms);
  bool accept_part(Connection* c, const ControlMessage& message, Reader* body);
  Status forward_rows(int src_rank, std::span<const std::byte> rows);
  void forward_fds(int src_rank, const RankSet& wanted_by, std::vector<Fd> fds);
  bool all_are_here() const;
  std::vector<uint32_t> number_anew();
  void finish_round();
  void on_round_timeout();
  // `refused` is a connection that caused the failure but is not a member; 0 for none.
  void fail(const Status& why, Id refused = 0);
  void tell_failure(Id id);
  std::string who(int rank) const;
  std::string unreached(std::span<const int> ranks) const;
  Connection* find(Id id) const;  // null if it is gone
  Member& member_of(int rank) { return members_[static_cast<size_t>(rank)]; }
  const Member& member_of(int rank) const { return members_[static_cast<size_t>(rank)]; }

  Config config_;
  std::vector<Fd> listeners_;
  std::vector<HandoutListener> handouts_;
  Wishes wishes_;
  driver::Poller poller_;
  Id next_id_ = kFirstConnection;
  std::unordered_map<Id, std::unique_ptr<Connection>> connections_;
  Lobby lobby_;                  // connections that are not authenticated
  std::string refused_;          // where the last rank with another key came from; empty for none
  int64_t accept_again_ns_ = 0;  // 0 while accepting
  std::vector<Id> throttled_;    // wait until descriptors in flight are received
  Deadline deadline_;            // for all to join, and after that for the next round
  bool ended_ = false;           // by its owner
  bool over_ = false;            // nothing more can be sent: end

  std::vector<Member> members_;  // [n_ranks], known when the first rank joins
  int sized_by_ = -1;            // that rank
  int n_came_ = 0;
  int n_left_ = 0;
  std::optional<Attendance> attendance_;  // at a meeting of survivors, until they have joined
  bool joined_ = false;
  Round round_;
  std::unordered_map<int32_t, Fd> processes_;  // pidfds of members' processes
  Status failure_;
  PayloadKeys payload_keys_{config_.payload_seed};
  std::shared_ptr<const SharedPayload> failure_payload_;
  Deadline linger_ = Deadline::never();
};

}  // namespace moeccl::bootstrap
