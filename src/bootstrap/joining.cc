// SPDX-License-Identifier: Apache-2.0
// A rank's way into its meeting: finds the root at one of its id's addresses, shakes hands, and waits for the others.
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "src/base/log.h"
#include "src/base/random.h"
#include "src/bootstrap/failed_meetings.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/session_impl.h"
#include "src/driver/limits.h"
#include "src/driver/thread.h"

namespace moeccl::bootstrap {
namespace {

// The time for one attempt at the handshake. A root is slower only if it is stopped or is not a root at all.
constexpr int64_t kGreetingMs = 5000;
// The time to connect to one of several addresses before the next is tried, as a firewall may swallow what is sent to
// this one. TCP repeats its first packet after a second.
constexpr int64_t kConnectMs = 1500;
// How long a rank sleeps without looking whether it is still wanted.
constexpr int64_t kLookNs = 50'000'000;

// The pause of a rank that has found only its last meeting. That one's root makes a public key (40 us, Fresh::publish)
// for each rank that asks. Pauses that differ, of 125 us for each rank on average, leave it two thirds of its thread.
int64_t pause_at_last_meeting_ns(int n_ranks) {
  const uint64_t most_ns = std::max<uint64_t>(50'000'000, uint64_t{250'000} * static_cast<uint64_t>(n_ranks));
  return static_cast<int64_t>(SplitMix64(static_cast<uint64_t>(now_ns())).below(most_ns));
}

}  // namespace

// Connects and shakes hands. After RemoteError or Timeout, another attempt may help.
Status Session::Impl::greet(const UniqueId& id, Deadline deadline) {
  const Deadline until = Deadline::earlier(deadline, Deadline::after_ms(kGreetingMs));
  const Deadline connected = id.others.empty() ? until : Deadline::earlier(until, Deadline::after_ms(kConnectMs));
  over_unix = id.address.is_unix();
  found_last = false;
  root_process.reset();
  root_pid = 0;
  const auto look = [this] { return look_around(); };
  bool refused = false;
  Result<Fd> made = driver::connect_to(id.address, connected, {.watch = {-1, look}, .nobody_listens = &refused});
  nobody_listens &= refused;
  MOECCL_ASSIGN_OR_RETURN(fd, std::move(made));
  if (over_unix) {
    MOECCL_ASSIGN_OR_RETURN(const driver::PeerCredentials root, driver::peer_credentials(fd.get()));
    root_pid = root.pid;
    if (root.pid > 0 && root.pid != ::getpid()) {
      Result<Fd> pidfd = driver::open_pidfd(root.pid);
      if (pidfd.ok()) root_process = std::move(*pidfd);
      // The listener may outlive its process in a forked child, where nothing accepts connections.
      if (!pidfd.ok() && pidfd.status().code() == moecclRemoteError) {
        nobody_listens = true;
        fd.reset();
        return std::move(pidfd).status();
      }
    }
  } else {
    MOECCL_TRY(driver::set_no_delay(fd.get()));
    MOECCL_TRY(driver::set_lost_after(fd.get(), kLostMs));
  }
  Party self = {Role::kMember, static_cast<uint32_t>(rank), static_cast<uint32_t>(n_ranks)};
  self.exchanges_keys = !over_unix;
  uint64_t found = 0;
  const auto accepts = [&](const Party& root) {
    found = meeting_number(id.key, root.rank);
    found_last = options.wait_for_root && FailedMeetings::has(found, rank);
    return found_last ? error(moecclRemoteError, "the last meeting there has failed, and rank 0 has not come again")
                      : Status();
  };
  Result<Authenticated> met =
      client_handshake(fd.get(), id.key, self, {Role::kRoot, accepts}, until, {root_process.get(), look});
  if (found_last) fd.reset();  // it is not mute
  MOECCL_ASSIGN_OR_RETURN(const Authenticated root, std::move(met));
  meeting = found;
  sealer = Sealer(root.keys.send);
  opener = Opener(root.keys.receive);
  cut_short = false;
  payload_keys = PayloadKeys(derive_key(root.keys.send, "moeccl payloads"));
  ++n_greetings;
  return {};
}

// Makes one attempt at all steps of joining. After RemoteError with `failure` ok(), another attempt may help.
Status Session::Impl::attempt_join(const UniqueId& id, Deadline deadline) {
  MOECCL_TRY(greet(id, deadline));
  Writer body;
  body.u32(wire_timeout(deadline));
  body.u64(driver::this_process().random);
  if (options.gone) {
    told_gone = options.gone();
    body.raw(encode_ranks(told_gone));
  }
  if (Status sent = send(kJoin, body.view(), {}, deadline); !sent.ok()) {
    // The root may have sent its reason before it ended.
    if (sent.code() == moecclRemoteError) static_cast<void>(answer_of_round(Deadline::after_ms(kReasonMs), nullptr));
    return failure.ok() ? sent : failure;
  }
  MOECCL_ASSIGN_OR_RETURN(const std::vector<std::byte> answer, answer_of_round(deadline, nullptr));
  return take_answer(answer);
}

// Makes one attempt at each of the id's addresses until the root greets at one, which becomes the id's only one.
Status Session::Impl::attempt_at_each(UniqueId* id, Deadline deadline) {
  UniqueId at = *id;
  nobody_listens = true;
  Status last = attempt_join(at, deadline);
  Fd mute;  // a connection without an answer
  // Only MoECCL itself answers so: the meeting point is there, and says that this rank does not fit.
  const auto refused = [&last] { return last.code() == moecclUnsupported || last.code() == moecclMismatch; };
  for (size_t i = 0; i < id->others.size() && !greeted() && !refused() && failure.ok() && !deadline.passed(); ++i) {
    if (fd) mute = std::move(fd);
    at.address = id->others[i];
    Status next = attempt_join(at, deadline);
    // A failure that time may heal counts more than one that it does not, such as a host without IPv6.
    const bool may_heal = last.code() == moecclRemoteError || last.code() == moecclTimeout;
    if (!next.ok() && !greeted())
      next = Status(may_heal ? last.code() : next.code(), last.message() + "; " + next.message());
    last = std::move(next);
  }
  if (greeted()) *id = {at.address, {}, id->key, id->host_hash};
  if (!fd) fd = std::move(mute);
  return last;
}

// Stores the list of ranks and this rank's place in it.
Status Session::Impl::take_answer(std::span<const std::byte> answer) {
  const Status unreadable = error(moecclInternalError, "the list of ranks cannot be read");
  if (options.gone) {
    if (!decode_numbers(answer, &members, &answer)) return unreadable;
    const auto here = std::lower_bound(members.begin(), members.end(), static_cast<uint32_t>(rank));
    const bool ascend = std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
    if (!ascend || here == members.end() || *here != static_cast<uint32_t>(rank) ||
        members.back() >= static_cast<uint32_t>(n_ranks)) {
      return unreadable;
    }
    rank = static_cast<int>(here - members.begin());
    n_ranks = static_cast<int>(members.size());
    options.gone = nullptr;  // it uses the old numbers
  } else {
    members.resize(static_cast<size_t>(n_ranks));
    std::iota(members.begin(), members.end(), 0u);
  }
  return decode_peers(answer, static_cast<size_t>(n_ranks), &peers) ? Status() : unreadable;
}

// Called while this rank waits for others.
Status Session::Impl::tell_gone() {
  if (!options.gone) return {};
  RankSet now = options.gone();
  if (now == told_gone) return {};
  told_gone = std::move(now);
  return send(kGone, encode_ranks(told_gone), {}, Deadline::after_ms(kReasonMs));
}

// Returns what may be wrong when no attempt to join has led anywhere. mute: the last one found a meeting point that
// does not answer. waited: for a root that need not have been there yet.
const char* Session::Impl::hint_for(const UniqueId& id, bool mute, bool waited) const {
  if (id.address.is_unix() && id.host_hash != driver::host_identity().hash())
    return ": the id was made on another host or in another container, whose UNIX sockets this one cannot reach; set "
           "MOECCL_SOCKET_ADDR there";
  if (mute && waited && !greeted())
    return ": what listens there does not answer as rank 0's meeting point: rank 0's process is stopped, or has "
           "another MOECCL_SECRET";
  if (mute && greeted())
    return ": the meeting point has accepted this rank and does not answer any more: its process, which is rank 0's "
           "unless another rank made the id, is stopped or has lost its network";
  if (mute)
    return ": the meeting point does not answer: its process is stopped, or this rank does not have its id or its "
           "MOECCL_SECRET";
  if (waited && greeted())
    return ": the meeting point has ended, which is in rank 0's process unless another rank made the id: look at its "
           "output";
  if (waited)
    return ": rank 0 did not listen there in time, or has ended: check that it runs, that MASTER_ADDR is its host, and "
           "that no firewall is in between";
  if (!id.address.is_unix() && !nobody_listens)
    return ": its host cannot be reached from here: check that it runs, that the address is one by which this host "
           "knows it (MOECCL_SOCKET_ADDR where the id is made), and that no firewall is in between";
  return ": the meeting point has ended (its process died, its time ran out, or its group is complete)";
}

// Tries until all ranks have met.
Status Session::Impl::meet(UniqueId id, Deadline deadline) {
  if (options.cancelled) MOECCL_TRY(options.cancelled());
  Status last;
  int64_t backoff_us = 1000;
  bool mute = false;
  Deadline lost = Deadline::after_ms(options.lost_after_ms);
  Patience patience;
  do {
    const int before = n_greetings;
    last = attempt_at_each(&id, deadline);
    if (last.ok()) return last;
    if (n_greetings > before) lost = Deadline::after_ms(options.lost_after_ms);
    const bool may_come = options.wait_for_root && !greeted();
    const bool again = last.code() == moecclRemoteError || last.code() == moecclTimeout ||
                       (last.code() == moecclInvalidUsage && may_come);
    if (Status why = look_around(); !why.ok()) return why;
    if (!failure.ok() || !again) return last;  // the root's own failure, or one that time does not heal
    mute = static_cast<bool>(fd);
    // What makes a host unreachable may pass. Survivors look for another place instead.
    const bool is_gone = nobody_listens || options.gone;
    if (!fd && last.code() == moecclRemoteError && is_gone && !may_come) {
      if (!options.ask_again || greeted()) break;
      MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId next, options.ask_again());
      MOECCL_ASSIGN_OR_RETURN(id, decode_unique_id(next));
    }
    fd.reset();
    sealer = {};
    if (!deadline.passed() && patience.ends()) {
      log(LogLevel::kWarn, "rank {} cannot join at {} yet, and keeps trying: {}{}", rank, id.address.str(),
          last.message(), mute ? " (is its MOECCL_SECRET that of rank 0?)" : "");
    }
    rest(found_last ? pause_at_last_meeting_ns(n_ranks) : backoff_us * 1000, deadline);
    backoff_us = std::min<int64_t>(backoff_us * 2, 50'000);
  } while (!deadline.passed() && !lost.passed());

  std::string places = id.address.str();
  for (const driver::SocketAddress& other : id.others) places += " or " + other.str();
  const bool late = deadline.passed() || lost.passed();
  return error(late ? moecclTimeout : last.code(), "rank {} cannot join at {}: {}{}{}", rank, places,
               late && !deadline.passed() ? format("no answer for {} ms: ", options.lost_after_ms) : "", last.message(),
               hint_for(id, mute, options.wait_for_root));
}

Status Session::Impl::look_around() {
  if (ended.ok() && options.cancelled) ended = options.cancelled();
  if (ended.ok() && options.others_alive) ended = options.others_alive();
  return ended;
}

// Sleeps, but not beyond the deadline or the end of the session.
void Session::Impl::rest(int64_t ns, Deadline deadline) {
  const Deadline until = Deadline::earlier(deadline, {now_ns() + ns});
  while (!until.passed() && look_around().ok()) driver::sleep_ns(std::min(until.at_ns - now_ns(), kLookNs));
}

Result<std::unique_ptr<Session>> Session::join(const moecclUniqueId& unique_id, int rank, int n_ranks,
                                               Deadline deadline, const JoinOptions& options) {
  if (n_ranks < 1 || n_ranks > kMaxRanks) {
    return error(moecclInvalidArgument, "n_ranks is {}: give 1 to {}", n_ranks, kMaxRanks);
  }
  if (rank < 0 || rank >= n_ranks) {
    return error(moecclInvalidArgument, "rank is {}: give 0 to {}", rank, n_ranks - 1);
  }
  MOECCL_ASSIGN_OR_RETURN(const UniqueId id, decode_unique_id(unique_id));
  driver::raise_file_limit();
  auto impl = std::make_unique<Impl>();
  impl->rank = rank;
  impl->n_ranks = n_ranks;
  impl->options = options;
  if (Status met = impl->meet(id, deadline); !met.ok()) {
    if (options.gone) return met;  // survivors go to another place
    // A root lets each rank in once. One that has not seen this process's rank 0 does not know that it gave up.
    if (impl->greeted())
      FailedMeetings::add(impl->meeting, rank);
    else if (rank == 0)
      Root::without_rank_0(id);
    return met;
  }
  impl->options.others_alive = nullptr;  // from now on the root sees their connections
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

}  // namespace moeccl::bootstrap
