// SPDX-License-Identifier: Apache-2.0
// Session: a rank's end of the rendezvous.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "src/base/log.h"
#include "src/base/random.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/control.h"
#include "src/bootstrap/failed_meetings.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/messages.h"
#include "src/bootstrap/patience.h"
#include "src/driver/limits.h"
#include "src/driver/process.h"
#include "src/driver/socket.h"
#include "src/driver/thread.h"

namespace moeccl::bootstrap {
namespace {

// At the deadline, the root tells which ranks are missing. A rank waits this much longer for that sentence.
constexpr int64_t kGraceNs = 500'000'000;
// The time for one attempt at the handshake. A root is slower only if it is stopped or is not a root at all.
constexpr int64_t kGreetingMs = 5000;
// The time to wait for the reason of a broken connection, which is in the socket already or never comes.
constexpr int64_t kReasonMs = 200;
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

Deadline with_grace(Deadline deadline) { return deadline.is_never() ? deadline : Deadline{deadline.at_ns + kGraceNs}; }

}  // namespace

struct Session::Impl {
  Fd fd;
  Fd root_process;  // its pidfd, if the root is in another process of this host
  int32_t root_pid = 0;
  bool over_unix = false;
  int n_greetings = 0;          // how often a root has shaken hands
  bool nobody_listens = false;  // at any of the id's addresses, as their hosts say
  bool waits_for_root = false;
  bool found_last = false;  // the last attempt found only the meeting at which this rank has failed
  uint64_t meeting = 0;     // at the root that has shaken hands
  int rank = 0;
  int n_ranks = 0;
  bool cut_short = false;  // a message was sent in part, so that no other can follow
  Sealer sealer;
  Opener opener;
  PayloadKeys payload_keys;
  std::vector<Peer> peers;
  Status failure;
  Status ended;  // by others_alive or cancelled
  bool closed = false;
  driver::ForkGuard process;
  std::function<Status()> others_alive;
  std::function<RankSet()> gone;
  std::function<Status()> cancelled;
  RankSet told_gone;
  std::vector<uint32_t> members;

  struct Message {
    ControlHead head;
    std::vector<std::byte> payload;
    std::vector<Fd> fds;
  };

  bool greeted() const { return n_greetings > 0; }  // the root has been there
  Status meet(UniqueId id, Deadline deadline, const JoinOptions& options);
  Status greet(const UniqueId& id, Deadline deadline);
  Status attempt_join(const UniqueId& id, Deadline deadline);
  Status attempt_at_each(UniqueId* id, Deadline deadline);
  const char* hint_for(const UniqueId& id, bool mute, bool waited) const;
  Status take_answer(std::span<const std::byte> answer);
  Status tell_gone();
  Status look_around();
  Status look_around_and_tell();
  void rest(int64_t ns, Deadline deadline);
  Status send(uint16_t type, std::span<const std::byte> payload, std::span<const int> fds, Deadline deadline);
  Status receive(std::span<std::byte> bytes, std::vector<Fd>* fds, Deadline deadline);
  Result<Message> next_message(Deadline deadline);
  Status usable() const;
  Status fail(Status why);
  void end(uint16_t type, std::span<const std::byte> payload);  // sends a last message
  std::string root_text() const;
  Result<std::vector<std::byte>> round(uint16_t type, std::span<const std::byte> body, std::span<const int> fds,
                                       Deadline deadline, std::vector<std::vector<Fd>>* fds_of = nullptr);
  Result<std::vector<std::byte>> answer_of_round(Deadline deadline, std::vector<std::vector<Fd>>* fds_of);
};

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

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
    found_last = waits_for_root && FailedMeetings::has(found, rank);
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
  if (gone) {
    told_gone = gone();
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
  if (gone) {
    if (!decode_numbers(answer, &members, &answer)) return unreadable;
    const auto here = std::lower_bound(members.begin(), members.end(), static_cast<uint32_t>(rank));
    const bool ascend = std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
    if (!ascend || here == members.end() || *here != static_cast<uint32_t>(rank) ||
        members.back() >= static_cast<uint32_t>(n_ranks)) {
      return unreadable;
    }
    rank = static_cast<int>(here - members.begin());
    n_ranks = static_cast<int>(members.size());
    gone = nullptr;  // it uses the old numbers
  } else {
    members.resize(static_cast<size_t>(n_ranks));
    std::iota(members.begin(), members.end(), 0u);
  }
  return decode_peers(answer, static_cast<size_t>(n_ranks), &peers) ? Status() : unreadable;
}

// Called while this rank waits for others.
Status Session::Impl::tell_gone() {
  if (!gone) return {};
  RankSet now = gone();
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
Status Session::Impl::meet(UniqueId id, Deadline deadline, const JoinOptions& options) {
  if (cancelled) MOECCL_TRY(cancelled());
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
    const bool may_come = waits_for_root && !greeted();
    const bool again = last.code() == moecclRemoteError || last.code() == moecclTimeout ||
                       (last.code() == moecclInvalidUsage && may_come);
    if (Status why = look_around(); !why.ok()) return why;
    if (!failure.ok() || !again) return last;  // the root's own failure, or one that time does not heal
    mute = static_cast<bool>(fd);
    // What makes a host unreachable may pass. Survivors look for another place instead.
    const bool is_gone = nobody_listens || gone;
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
               hint_for(id, mute, waits_for_root));
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
  impl->waits_for_root = options.wait_for_root;
  impl->rank = rank;
  impl->n_ranks = n_ranks;
  impl->others_alive = options.others_alive;
  impl->gone = options.gone;
  impl->cancelled = options.cancelled;
  if (Status met = impl->meet(id, deadline, options); !met.ok()) {
    if (options.gone) return met;  // survivors go to another place
    // A root lets each rank in once. One that has not seen this process's rank 0 does not know that it gave up.
    if (impl->greeted())
      FailedMeetings::add(impl->meeting, rank);
    else if (rank == 0)
      Root::without_rank_0(id);
    return met;
  }
  impl->others_alive = nullptr;  // from now on the root sees their connections
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

Status Session::Impl::send(uint16_t type, std::span<const std::byte> payload, std::span<const int> fds,
                           Deadline deadline) {
  if (cut_short) return Status(moecclRemoteError, "the last message was cut short");
  const SealedPayload travels({payload.begin(), payload.end()}, payload_keys.next());
  ControlHead head;
  head.type = type;
  head.n_fds = static_cast<uint16_t>(fds.size());
  travels.announce(&head);
  const ControlHeadBytes sealed = sealer.seal(head);
  driver::Watch watch(root_process.get());
  // What has ended the session does not end its last word.
  if (ended.ok() && (cancelled || others_alive)) watch.cancelled = [this] { return look_around(); };
  std::vector<std::byte> frame(sealed.begin(), sealed.end());  // one system call for the usual small frame
  frame.insert(frame.end(), travels.bytes.begin(), travels.bytes.end());
  Status sent = fds.empty() ? driver::send_all(fd.get(), frame, deadline, watch)
                            : driver::send_fds(fd.get(), frame, fds, deadline, watch);
  cut_short = !sent.ok();
  return sent;
}

Status Session::Impl::look_around() {
  if (ended.ok() && cancelled) ended = cancelled();
  if (ended.ok() && others_alive) ended = others_alive();
  return ended;
}

// Sleeps, but not beyond the deadline or the end of the session.
void Session::Impl::rest(int64_t ns, Deadline deadline) {
  const Deadline until = Deadline::earlier(deadline, {now_ns() + ns});
  while (!until.passed() && look_around().ok()) driver::sleep_ns(std::min(until.at_ns - now_ns(), kLookNs));
}

// Called while this rank waits for the root.
Status Session::Impl::look_around_and_tell() {
  MOECCL_TRY(tell_gone());
  Status why = look_around();
  if (why.ok()) return why;
  static_cast<void>(send(kAbandon, encode_failure(why), {}, Deadline::after_ms(kReasonMs)));
  return failure = why;
}

Status Session::Impl::receive(std::span<std::byte> bytes, std::vector<Fd>* fds, Deadline deadline) {
  driver::Watch watch(root_process.get());
  if (others_alive || gone || cancelled) watch.cancelled = [this] { return look_around_and_tell(); };
  if (over_unix) return driver::recv_fds(fd.get(), bytes, fds, deadline, watch);
  return driver::recv_exact(fd.get(), bytes, deadline, watch);
}

Result<Session::Impl::Message> Session::Impl::next_message(Deadline deadline) {
  Message message;
  ControlHeadBytes head;
  MOECCL_TRY(receive(head, &message.fds, deadline));
  MOECCL_ASSIGN_OR_RETURN(message.head, opener.open(head, kMaxGatheredBytes + kMaxRanks * sizeof(uint32_t)));
  message.payload.resize(message.head.n_bytes);
  MOECCL_TRY(receive(message.payload, &message.fds, deadline));
  if (!open_payload(message.head, message.payload) || message.fds.size() != message.head.n_fds) {
    return error(moecclRemoteError, "a control frame of the meeting point is not what was announced");
  }
  return message;
}

// Reads up to the answer that ends the round, and keeps descriptors that arrive on the way.
Result<std::vector<std::byte>> Session::Impl::answer_of_round(Deadline deadline, std::vector<std::vector<Fd>>* fds_of) {
  for (;;) {
    MOECCL_ASSIGN_OR_RETURN(Message message, next_message(with_grace(deadline)));
    if (message.head.type == kDone) return std::move(message.payload);
    if (message.head.type == kFailed) {
      failure = decode_failure(message.payload);
      return failure;
    }
    Reader r(message.payload);
    const uint32_t src_rank = r.u32();
    if (message.head.type != kFdsOf || fds_of == nullptr || !r.done() || src_rank >= fds_of->size()) {
      return error(moecclInternalError, "the meeting point sent a message of type {} out of turn", message.head.type);
    }
    (*fds_of)[src_rank] = std::move(message.fds);
  }
}

Status Session::Impl::usable() const {
  if (process.forked()) {
    return error(moecclInvalidUsage, "this process was forked from process {}, to which the session belongs",
                 process.owner());
  }
  if (!failure.ok()) return failure;
  if (closed) return error(moecclInvalidUsage, "rank {} has closed its session", rank);
  return {};
}

// " (process 4711 with rank 0)": the root's process and the ranks that run in it, as far as they are known.
std::string Session::Impl::root_text() const {
  std::vector<int> ranks;
  for (size_t r = 0; r < peers.size(); ++r) {
    if (peers[r].with_root) ranks.push_back(static_cast<int>(r));
  }
  if (root_pid > 0) return format(" (process {}{})", root_pid, ranks.empty() ? "" : " with " + describe_ranks(ranks));
  return ranks.empty() ? "" : format(" (in the process of {})", describe_ranks(ranks));
}

// Makes a failure final and tells the others, unless it came from them.
Status Session::Impl::fail(Status why) {
  if (!failure.ok()) {
    fd.reset();
    return failure;
  }
  if (why.code() == moecclRemoteError) {
    // The connection broke, perhaps just after the root sent its reason.
    while (fd) {
      Result<Message> last = next_message(Deadline::after_ms(kReasonMs));
      if (!last.ok()) break;
      if (last->head.type != kFailed) continue;
      failure = decode_failure(last->payload);
      fd.reset();
      return failure;
    }
    why = error(moecclRemoteError, "the meeting point{} ended or lost its connection before all ranks were connected",
                root_text());
  } else if (why.code() == moecclTimeout) {
    why = error(moecclTimeout, "the meeting point{} did not answer in time", root_text());
  }
  failure = why;
  static_cast<void>(send(kAbandon, encode_failure(failure), {}, Deadline::after_ms(kReasonMs)));
  fd.reset();
  return failure;
}

Result<std::vector<std::byte>> Session::Impl::round(uint16_t type, std::span<const std::byte> body,
                                                    std::span<const int> fds, Deadline deadline,
                                                    std::vector<std::vector<Fd>>* fds_of) {
  Writer w;
  w.u32(wire_timeout(deadline));
  w.raw(body);
  Status sent = send(type, w.view(), fds, with_grace(deadline));
  if (!sent.ok()) return fail(std::move(sent));
  Result<std::vector<std::byte>> answer = answer_of_round(deadline, fds_of);
  if (!answer.ok()) return fail(std::move(answer).status());
  return answer;
}

Session::~Session() {
  if (impl_->fd && !impl_->closed && !impl_->process.forked()) {
    abandon(Status(moecclAborted, "it gave up before all ranks were connected"));
  }
}

int Session::rank() const { return impl_->rank; }
std::span<const uint32_t> Session::members() const { return impl_->members; }
const std::function<Status()>& Session::cancelled() const { return impl_->cancelled; }
bool Session::over_unix() const { return impl_->over_unix; }
Result<driver::SocketAddress> Session::local_address() const { return driver::local_address(impl_->fd.get()); }
std::span<const Peer> Session::peers() const { return impl_->peers; }

Result<std::vector<std::vector<std::byte>>> Session::all_gather(std::span<const std::byte> mine, Deadline deadline) {
  MOECCL_TRY(impl_->usable());
  if (mine.size() > kMaxBlobBytes) {
    return error(moecclInvalidArgument, "a blob of {} bytes; at most {}", mine.size(), kMaxBlobBytes);
  }
  MOECCL_ASSIGN_OR_RETURN(const std::vector<std::byte> answer, impl_->round(kGather, mine, {}, deadline));
  std::vector<std::vector<std::byte>> blobs;
  if (!decode_blobs(answer, static_cast<size_t>(impl_->n_ranks), &blobs)) {
    return impl_->fail(error(moecclInternalError, "the gathered blobs cannot be read"));
  }
  return blobs;
}

Result<std::vector<std::vector<std::byte>>> Session::all_to_all(std::span<const std::vector<std::byte>> rows,
                                                                Deadline deadline) {
  MOECCL_TRY(impl_->usable());
  const auto n_ranks = static_cast<size_t>(impl_->n_ranks);
  size_t n_bytes = rows.size() * sizeof(uint32_t);
  for (const std::vector<std::byte>& row : rows) n_bytes += row.size();
  if (rows.size() != n_ranks || n_bytes > kMaxRowsBytes) {
    return error(moecclInvalidArgument, "{} rows for {} ranks, with {} bytes; at most {}", rows.size(), n_ranks,
                 n_bytes, kMaxRowsBytes);
  }
  MOECCL_ASSIGN_OR_RETURN(const std::vector<std::byte> answer, impl_->round(kRows, encode_blobs(rows), {}, deadline));
  std::vector<std::vector<std::byte>> from;
  if (!decode_rows(answer, n_ranks, &from)) {
    return impl_->fail(error(moecclInternalError, "the rows of all_to_all cannot be read"));
  }
  return from;
}

Result<std::vector<std::vector<Fd>>> Session::all_gather_fds(std::span<const int> mine, const RankSet& wanted_by,
                                                             Deadline deadline) {
  MOECCL_TRY(impl_->usable());
  const auto n_ranks = static_cast<size_t>(impl_->n_ranks);
  if (mine.size() > kMaxFdsPerRank || (!wanted_by.empty() && wanted_by.size() != n_ranks)) {
    return error(moecclInvalidArgument, "{} descriptors (at most {}) for a set of {} ranks ({} expected)", mine.size(),
                 kMaxFdsPerRank, wanted_by.size(), n_ranks);
  }
  RankSet set = wanted_by;
  set.resize(n_ranks);
  const bool wanted = std::find(set.begin(), set.end(), true) != set.end();
  if (wanted && !mine.empty() && !impl_->over_unix) {
    return error(moecclUnsupported, "file descriptors need a meeting point on a UNIX socket, this one is on TCP");
  }
  std::vector<std::vector<Fd>> fds_of(n_ranks);
  const std::span<const int> sent = wanted ? mine : std::span<const int>();
  MOECCL_ASSIGN_OR_RETURN(const std::vector<std::byte> answer,
                          impl_->round(kFds, encode_ranks(set), sent, deadline, &fds_of));
  return fds_of;
}

Status Session::barrier(Deadline deadline) {
  MOECCL_TRY(impl_->usable());
  Result<std::vector<std::byte>> answer = impl_->round(kBarrier, {}, {}, deadline);
  return std::move(answer).status();
}

int Session::news_fd() const { return impl_->fd.get(); }

Status Session::news(int64_t wait_ms) {
  MOECCL_TRY(impl_->usable());
  if (!driver::wait_fd(impl_->fd.get(), POLLIN, Deadline::after_ms(wait_ms)).ok()) return {};
  return impl_->fail(error(moecclRemoteError, "the meeting point sent a message between rounds"));
}

void Session::Impl::end(uint16_t type, std::span<const std::byte> payload) {
  if (!usable().ok()) return;
  static_cast<void>(send(type, payload, {}, Deadline::after_ms(kReasonMs)));
  closed = true;
  fd.reset();
}

void Session::close() { impl_->end(kLeave, {}); }
void Session::abandon(const Status& why) { impl_->end(kAbandon, encode_failure(why)); }

}  // namespace moeccl::bootstrap
