// SPDX-License-Identifier: Apache-2.0
// The group at a root: which ranks have joined, which have contributed to the round, and which have failed.
#include <unistd.h>

#include <algorithm>

#include "src/base/log.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/root_server.h"
#include "src/driver/process.h"

namespace moeccl::bootstrap {
namespace {

constexpr int64_t kSilentMs = 1000;  // longer than any queue between two hosts delays an acknowledgement

std::string process_text(const Peer& peer) { return peer.pid > 0 ? format(" (process {})", peer.pid) : ""; }

}  // namespace

std::string RootServer::who(int rank) const {
  const Member& member = member_of(rank);
  return format("rank {}{}", rank, member.from.empty() ? process_text(member.peer) : " (" + member.from + ")");
}

// A connection has proved that it holds the key, and claims a rank.
void RootServer::admit(Id id, Connection* c, const Party& party) {
  if (c->over_unix()) {
    Result<driver::PeerCredentials> seen = driver::peer_credentials(c->fd());
    if (seen.ok()) c->peer = {seen->pid, seen->uid, true};
  }
  const auto rank = static_cast<int>(party.rank);
  const auto n_ranks = static_cast<int>(party.n_ranks);
  // Session::join checks this. A client that does not is broken, and is not a rank of the group.
  if (n_ranks < 1 || n_ranks > kMaxRanks || rank < 0 || rank >= n_ranks) return drop(id);
  if (members_.empty()) {
    members_.resize(party.n_ranks);
    sized_by_ = rank;
    if (config_.survivors) attendance_.emplace(party.n_ranks);
  }
  Status refusal;
  if (n_ranks != static_cast<int>(members_.size())) {
    refusal = error(moecclMismatch, "rank {}{} joins a group of {} ranks, {} one of {}", rank, process_text(c->peer),
                    n_ranks, who(sized_by_), members_.size());
  } else if (members_[party.rank].came) {
    refusal = error(moecclMismatch,
                    "rank {} was joined twice, by {} and by another{}: give each process a rank of its own, and each "
                    "job an id, or a MASTER_PORT, of its own",
                    rank, who(rank), c->over_unix() ? process_text(c->peer) : " (" + c->from() + ")");
  }
  if (!refusal.ok()) {
    // Not a member: it is told as well, and dropped once it closes.
    return failure_.ok() ? fail(refusal, id) : tell_failure(id);
  }
  Member& member = members_[party.rank];
  c->rank = rank;
  member.connection = id;
  member.came = true;
  member.peer = c->peer;
  if (!c->over_unix()) member.from = c->from();
  ++n_came_;
  if (attendance_) attendance_->comes(party.rank);
  if (!failure_.ok()) return tell_failure(id);
  watch_process(c->peer.pid);
}

// The connection of a killed process may stay open in a child that it forked. Its pidfd reveals its end.
void RootServer::watch_process(int32_t pid) {
  if (pid <= 0 || pid == ::getpid() || processes_.contains(pid)) return;
  Result<Fd> pidfd = driver::open_pidfd(pid);
  // It has ended already, or the kernel or namespace has no pidfds. The end of the connection then has to suffice.
  if (!pidfd.ok()) return;
  if (!poller_.add(pidfd->get(), EPOLLIN, kProcess | static_cast<uint32_t>(pid)).ok()) return;
  processes_.emplace(pid, std::move(*pidfd));
}

void RootServer::on_process_end(int32_t pid) {
  const auto found = processes_.find(pid);
  if (found == processes_.end()) return;
  poller_.remove(found->second.get());
  processes_.erase(found);
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank].peer.pid != pid || members_[rank].connection == 0) continue;
    read_all(members_[rank].connection);  // it may have sent kLeave before it ended
    if (members_[rank].connection != 0) on_lost(members_[rank].connection, {});
  }
}

void RootServer::on_lost(Id id, const Status& why) {
  const Connection* c = find(id);
  if (c == nullptr) return;
  const int rank = c->rank;
  const bool in_order = rank < 0 || member_of(rank).left;
  drop(id);
  if (in_order || !failure_.ok()) return;
  fail(error(moecclRemoteError, "{} {} before all ranks were connected{}{}", who(rank),
             why.ok() ? "ended or lost its connection" : "was cut off", why.ok() ? "" : ": ", why.message()));
}

void RootServer::on_message(Id id, ControlMessage message) {
  Connection* c = find(id);
  if (c == nullptr) return;
  if (c->rank < 0) return;  // it was refused
  Member& member = member_of(c->rank);
  switch (message.type) {
    case kLeave:
      member.left = true;
      ++n_left_;
      drop(id);
      // A rank that waits for a round with it would wait forever.
      if (failure_.ok() && round_.type != 0 && !member.contributed) {
        fail(error(moecclRemoteError, "{} has left, but {} calls {}", who(static_cast<int>(&member - members_.data())),
                   who(round_.first_rank), round_name(round_.type)));
      }
      return;
    case kAbandon: {
      const Status why = decode_failure(message.payload);
      const std::string name = who(c->rank);
      member.told = true;  // it knows already
      if (failure_.ok()) fail(error(moecclRemoteError, "{} failed: {}", name, why.message()));
      drop(id);  // after the others know: see Session::Impl::tell_last
      return;
    }
    case kGone: {
      // A message that arrives late refers to the old numbers.
      if (!attendance_ || !member.contributed || !failure_.ok()) return;
      RankSet gone;
      if (!decode_ranks(message.payload, members_.size(), &gone)) {
        return fail(error(moecclInternalError, "{} reports ranks as gone that do not exist", who(c->rank)));
      }
      attendance_->reports(static_cast<size_t>(c->rank), std::move(gone));
      if (all_are_here()) finish_round();
      return;
    }
    default:
      if (failure_.ok()) contribute(id, c, std::move(message));
  }
}

// A rank may give init longer, in its config, than the environment of the process in which the meeting point runs.
void RootServer::give_time(uint32_t timeout_ms) {
  config_.timeout_ms = std::max(config_.timeout_ms, int64_t{timeout_ms});
  if (timeout_ms > 0) deadline_.at_ns = std::max(deadline_.at_ns, Deadline::after_ms(timeout_ms).at_ns);
}

// Returns true if a part fits into the open round; otherwise fails the group.
bool RootServer::accept_part(Connection* c, const ControlMessage& message, Reader* body) {
  const uint32_t timeout_ms = body->u32();
  const Deadline deadline = deadline_of(timeout_ms);
  give_time(timeout_ms);
  const bool known = (message.type >= kJoin && message.type <= kFds) || message.type == kRows;
  const bool in_turn = (message.type == kJoin) != joined_;
  Member& member = member_of(c->rank);
  if (!body->ok() || !known || !in_turn || member.contributed) {
    fail(error(moecclInternalError, "{} sent a message out of turn", who(c->rank)));
    return false;
  }
  if (round_.type == 0) {
    round_.type = message.type;
    round_.first_rank = c->rank;
    round_.blobs.resize(members_.size());
    for (size_t rank = 0; rank < members_.size(); ++rank) {
      if (!members_[rank].left) continue;
      fail(error(moecclRemoteError, "{} has left, but {} calls {}", who(static_cast<int>(rank)), who(c->rank),
                 round_name(message.type)));
      return false;
    }
  }
  if (round_.type != message.type) {
    fail(error(moecclMismatch, "{} calls {} while {} calls {}", who(c->rank), round_name(message.type),
               who(round_.first_rank), round_name(round_.type)));
    return false;
  }
  if (deadline.at_ns < round_.deadline.at_ns) {
    round_.deadline = deadline;
    round_.deadline_rank = c->rank;
  }
  member.contributed = true;
  ++round_.n_contributed;
  return true;
}

void RootServer::contribute(Id, Connection* c, ControlMessage message) {
  Reader body(message.payload);
  if (!accept_part(c, message, &body)) return;
  const std::span<const std::byte> rest = body.raw(body.left());
  if (message.type == kJoin) {
    Reader process(rest);
    member_of(c->rank).in_own_process = process.u64() == driver::this_process().random;
    if (attendance_) {
      RankSet gone;
      if (!decode_ranks(process.raw(process.left()), members_.size(), &gone)) {
        return fail(error(moecclInternalError, "{} joins survivors without saying which ranks are gone", who(c->rank)));
      }
      attendance_->reports(static_cast<size_t>(c->rank), std::move(gone));
    }
  }
  if (message.type == kGather) {
    round_.n_bytes += rest.size();
    if (rest.size() > kMaxBlobBytes || round_.n_bytes > kMaxGatheredBytes) {
      return fail(error(moecclInvalidArgument, "all_gather of more than {} bytes, or of a blob of more than {}",
                        kMaxGatheredBytes, kMaxBlobBytes));
    }
    round_.blobs[static_cast<size_t>(c->rank)].assign(rest.begin(), rest.end());
  }
  if (message.type == kRows) {
    if (const Status why = forward_rows(c->rank, rest); !why.ok()) return fail(why);
  }
  if (message.type == kFds) {
    RankSet wanted_by;
    if (!decode_ranks(rest, members_.size(), &wanted_by)) {
      return fail(error(moecclInternalError, "{} sent descriptors for ranks that do not exist", who(c->rank)));
    }
    forward_fds(c->rank, wanted_by, std::move(message.fds));
  }
  if (failure_.ok() && all_are_here()) finish_round();
}

bool RootServer::all_are_here() const {
  return attendance_ ? attendance_->complete() : round_.n_contributed == static_cast<int>(members_.size());
}

// Leaves out the ranks that have not joined.
std::vector<uint32_t> RootServer::number_anew() {
  std::vector<uint32_t> numbers;
  std::vector<Member> present;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (!members_[rank].came) continue;
    if (Connection* c = find(members_[rank].connection); c != nullptr) c->rank = static_cast<int>(present.size());
    numbers.push_back(static_cast<uint32_t>(rank));
    present.push_back(std::move(members_[rank]));
  }
  members_ = std::move(present);
  return numbers;
}

// Appends each row to the answer of its rank.
Status RootServer::forward_rows(int src_rank, std::span<const std::byte> rows) {
  round_.n_bytes += rows.size();
  if (round_.n_bytes > kMaxAllRowsBytes)
    return error(moecclInvalidArgument, "all_to_all of more than {} bytes", kMaxAllRowsBytes);
  round_.rows.resize(members_.size());
  Reader in(rows);
  for (Writer& answer : round_.rows) {
    const std::span<const std::byte> row = in.bytes(kMaxRowsBytes);
    answer.u32(static_cast<uint32_t>(src_rank));
    answer.bytes(row);
    if (answer.size() > kMaxGatheredBytes)
      return error(moecclInvalidArgument, "all_to_all of more than {} bytes for one rank", kMaxGatheredBytes);
  }
  return in.done() ? Status()
                   : error(moecclInternalError, "{} sent rows for other ranks than there are", who(src_rank));
}

// Forwards them at once, without waiting for the others' parts, so that a root holds few descriptors at a time.
void RootServer::forward_fds(int src_rank, const RankSet& wanted_by, std::vector<Fd> fds) {
  if (fds.empty()) return;
  const auto shared = std::make_shared<const std::vector<Fd>>(std::move(fds));
  Writer w;
  w.u32(static_cast<uint32_t>(src_rank));
  const auto payload = std::make_shared<const SharedPayload>(w.take(), payload_keys_.next());
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (!wanted_by[rank] || static_cast<int>(rank) == src_rank) continue;
    Connection* c = find(members_[rank].connection);
    if (c == nullptr) continue;  // its loss will be noticed soon
    c->queue(kFdsOf, payload, shared);
    flush(members_[rank].connection);
  }
}

void RootServer::finish_round() {
  std::vector<std::byte> answer;
  if (round_.type == kJoin) {
    if (attendance_) answer = encode_numbers(number_anew());
    attendance_.reset();
    std::vector<Peer> peers;
    for (Member& m : members_) {
      m.peer.with_root = m.in_own_process;
      peers.push_back(m.peer);
    }
    const std::vector<std::byte> list = encode_peers(peers);
    answer.insert(answer.end(), list.begin(), list.end());
    joined_ = true;
    close_listeners();
  } else if (round_.type == kGather) {
    answer = encode_blobs(round_.blobs);
  }
  std::vector<Writer> rows = std::move(round_.rows);
  round_ = {};
  deadline_ = Deadline::after_ms(config_.timeout_ms);
  auto payload = std::make_shared<const SharedPayload>(std::move(answer), payload_keys_.next());
  for (Member& m : members_) m.contributed = false;
  // This process's own ranks come last: as soon as they know, they may end the process and this root with it.
  for (const bool own : {false, true}) {
    for (size_t rank = 0; rank < members_.size(); ++rank) {
      const Member& m = members_[rank];
      Connection* c = find(m.connection);
      if (m.in_own_process != own || c == nullptr) continue;
      if (!rows.empty()) payload = std::make_shared<const SharedPayload>(rows[rank].take(), payload_keys_.next());
      c->queue(kDone, payload);
      flush(m.connection);
    }
  }
}

void RootServer::on_round_timeout() {
  if (joined_ && round_.type == 0) {  // silence: no rank is waiting for anything
    over_ = true;
    return;
  }
  if (members_.empty()) {
    log(LogLevel::kInfo, "bootstrap: no rank came within {} ms", config_.timeout_ms);
    over_ = true;
    return;
  }
  std::vector<int> missing;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    const bool awaited = attendance_ ? attendance_->awaits(rank) : !members_[rank].contributed;
    if (awaited) missing.push_back(static_cast<int>(rank));
  }
  const std::string whose = round_.deadline.passed() && round_.deadline_rank >= 0
                                ? format("the time of rank {}", round_.deadline_rank)
                                : format("the time of the meeting point, {} ms,", config_.timeout_ms);
  if (!joined_) {
    const std::string hint =
        refused_.empty()
            ? "look at their output, or give them longer by MOECCL_INIT_TIMEOUT_MS"
            : format("a rank {} came with another key, so give all ranks the same id or MOECCL_SECRET", refused_);
    const Result<UniqueId> id = decode_unique_id(config_.id);
    const std::string where = config_.over_unix || !id.ok() ? "" : " at " + id->address.str();
    fail(error(moecclTimeout, "{} of {} did not join{} before {} was over: {}", describe_ranks(missing),
               members_.size(), where, whose, hint));
  } else {
    fail(error(moecclTimeout, "{} of {} did not call {} before {} was over{}", describe_ranks(missing), members_.size(),
               round_name(round_.type), whose, unreached(missing)));
  }
}

// Says which of these ranks have not even taken the answer of the last round.
std::string RootServer::unreached(std::span<const int> ranks) const {
  std::vector<int> silent;
  int64_t most_ms = 0;
  for (const int rank : ranks) {
    const Connection* c = config_.over_unix ? nullptr : find(member_of(rank).connection);
    const int64_t ms = c == nullptr ? 0 : driver::unacknowledged_ms(c->fd());
    if (ms > kSilentMs) silent.push_back(rank);
    most_ms = std::max(most_ms, ms);
  }
  if (silent.empty()) return "";
  return format(
      ": the host of {} has acknowledged nothing for {} ms: either its network is cut, or large packets are lost on "
      "the way (compare the MTUs of hosts and switches)",
      describe_ranks(silent), most_ms);
}

void RootServer::fail(const Status& why, Id refused) {
  if (!failure_.ok()) return;
  failure_ = why;
  failure_payload_ = std::make_shared<const SharedPayload>(encode_failure(why), payload_keys_.next());
  linger_ = Deadline::after_ms(kLingerMs);
  deadline_ = Deadline::never();
  round_ = {};
  if (config_.survivors) close_listeners();  // a rank that comes from now on wants the next meeting at this address
  // This process's own ranks come last, as in finish_round. The refused connection comes in between, because it may be
  // one of them.
  for (const bool own : {false, true}) {
    if (own) tell_failure(refused);
    for (Member& m : members_) {
      if ((m.in_own_process || m.peer.pid == ::getpid()) != own) continue;
      if (m.came && m.connection == 0) m.told = true;  // gone, so it cannot be told
      if (m.connection != 0) tell_failure(m.connection);
    }
  }
}

void RootServer::tell_failure(Id id) {
  Connection* c = find(id);
  if (c == nullptr) return;
  if (c->rank >= 0) member_of(c->rank).told = true;
  c->queue(kFailed, failure_payload_);
  flush(id);
}

}  // namespace moeccl::bootstrap
