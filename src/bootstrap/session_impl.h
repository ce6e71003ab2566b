// SPDX-License-Identifier: Apache-2.0
// The state of a Session. joining.cc makes a rank a member of a meeting; session.cc takes its part in the rounds.
#pragma once

#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/connection.h"
#include "src/bootstrap/messages.h"
#include "src/driver/process.h"

namespace moeccl::bootstrap {

// The time to wait for the reason of a broken connection, which is in the socket already or never comes.
inline constexpr int64_t kReasonMs = 200;

struct Session::Impl {
  using Bytes = std::vector<std::byte>;

  Fd fd;
  Fd root_process;  // its pidfd, if the root is in another process of this host
  int32_t root_pid = 0;
  bool over_unix = false;
  int n_greetings = 0;          // how often a root has shaken hands
  bool nobody_listens = false;  // at any of the id's addresses, as their hosts say
  bool found_last = false;      // the last attempt found only the meeting at which this rank has failed
  uint64_t meeting = 0;         // at the root that has shaken hands
  int rank = 0;
  int n_ranks = 0;
  bool cut_short = false;  // a message was sent in part, so that no other can follow
  Sealer sealer;
  Opener opener;
  PayloadKeys payload_keys;
  std::vector<Peer> peers;
  Status failure;
  Status ended;  // by options.others_alive or options.cancelled
  bool closed = false;
  driver::ForkGuard process;
  JoinOptions options;  // without others_alive once all have joined; without `gone` once it is known who has met
  RankSet told_gone;
  std::vector<uint32_t> members;

  // joining.cc
  bool greeted() const { return n_greetings > 0; }  // the root has been there
  Status meet(UniqueId id, Deadline deadline);
  Status greet(const UniqueId& id, Deadline deadline);
  Status attempt_join(const UniqueId& id, Deadline deadline);
  Status attempt_at_each(UniqueId* id, Deadline deadline);
  const char* hint_for(const UniqueId& id, bool mute, bool waited) const;
  Status take_answer(std::span<const std::byte> answer);
  Status tell_gone();
  Status look_around();
  void rest(int64_t ns, Deadline deadline);

  // session.cc
  Status look_around_and_tell();
  Status send(uint16_t type, std::span<const std::byte> payload, std::span<const int> fds, Deadline deadline);
  Status receive(std::span<std::byte> bytes, std::vector<Fd>* fds, Deadline deadline);
  Result<ControlMessage> next_message(Deadline deadline);
  Status usable() const;
  Status fail(Status why);
  void end(uint16_t type, std::span<const std::byte> payload);
  void tell_last(uint16_t type, std::span<const std::byte> payload);  // sends a last message
  std::string root_text() const;
  Result<Bytes> round(uint16_t type, std::span<const std::byte> body, std::span<const int> fds, Deadline deadline,
                      std::vector<std::vector<Fd>>* fds_of = nullptr);
  Result<Bytes> answer_of_round(Deadline deadline, std::vector<std::vector<Fd>>* fds_of);
};

}  // namespace moeccl::bootstrap
