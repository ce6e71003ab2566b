// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/session_impl.h"

#include <poll.h>

#include <algorithm>

namespace moeccl::bootstrap {
namespace {

// At the deadline, the root tells which ranks are missing. A rank waits this much longer for that sentence.
constexpr int64_t kGraceNs = 500'000'000;

Deadline with_grace(Deadline deadline) { return deadline.is_never() ? deadline : Deadline{deadline.at_ns + kGraceNs}; }

}  // namespace

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Status Session::Impl::send(uint16_t type, std::span<const std::byte> payload, std::span<const int> fds,
                           Deadline deadline) {
  if (cut_short) return Status(moecclRemoteError, "the last message was cut short");
  const SealedPayload travels({payload.begin(), payload.end()}, payload_keys.next());
  const ControlHeadBytes sealed = sealer.seal(travels.head(type, fds.size()));
  driver::Watch watch(root_process.get());
  // What has ended the session does not end its last word.
  if (ended.ok() && (options.cancelled || options.others_alive)) watch.cancelled = [this] { return look_around(); };
  std::vector<std::byte> frame(sealed.begin(), sealed.end());  // one system call for the usual small frame
  frame.insert(frame.end(), travels.bytes.begin(), travels.bytes.end());
  Status sent = fds.empty() ? driver::send_all(fd.get(), frame, deadline, watch)
                            : driver::send_fds(fd.get(), frame, fds, deadline, watch);
  cut_short = !sent.ok();
  return sent;
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
  if (options.others_alive || options.gone || options.cancelled)
    watch.cancelled = [this] { return look_around_and_tell(); };
  if (over_unix) return driver::recv_fds(fd.get(), bytes, fds, deadline, watch);
  return driver::recv_exact(fd.get(), bytes, deadline, watch);
}

Result<ControlMessage> Session::Impl::next_message(Deadline deadline) {
  ControlMessage message;
  ControlHeadBytes sealed;
  MOECCL_TRY(receive(sealed, &message.fds, deadline));
  MOECCL_ASSIGN_OR_RETURN(const ControlHead head,
                          opener.open(sealed, kMaxGatheredBytes + kMaxRanks * sizeof(uint32_t)));
  message.type = head.type;
  message.payload.resize(head.n_bytes);
  MOECCL_TRY(receive(message.payload, &message.fds, deadline));
  if (!open_payload(head, message.payload) || message.fds.size() != head.n_fds) {
    return error(moecclRemoteError, "a control frame of the meeting point is not what was announced");
  }
  return message;
}

// Reads up to the answer that ends the round, and keeps descriptors that arrive on the way.
Result<Session::Impl::Bytes> Session::Impl::answer_of_round(Deadline deadline, std::vector<std::vector<Fd>>* fds_of) {
  for (;;) {
    MOECCL_ASSIGN_OR_RETURN(ControlMessage message, next_message(with_grace(deadline)));
    if (message.type == kDone) return std::move(message.payload);
    if (message.type == kFailed) {
      failure = decode_failure(message.payload);
      return failure;
    }
    Reader r(message.payload);
    const uint32_t src_rank = r.u32();
    if (message.type != kFdsOf || fds_of == nullptr || !r.done() || src_rank >= fds_of->size()) {
      return error(moecclInternalError, "the meeting point sent a message of type {} out of turn", message.type);
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
      Result<ControlMessage> last = next_message(Deadline::after_ms(kReasonMs));
      if (!last.ok()) break;
      if (last->type != kFailed) continue;
      failure = decode_failure(last->payload);
      fd.reset();
      return failure;
    }
    why = error(moecclRemoteError, "the meeting point{} ended or lost its connection before all ranks were connected",
                root_text());
  } else if (why.code() == moecclTimeout) {
    why = error(moecclTimeout, "the meeting point{} did not answer in time{}", root_text(),
                over_unix ? "" : ": its process is stopped, or its packets are lost on the way (MTU, firewall)");
  }
  failure = why;
  tell_last(kAbandon, encode_failure(failure));
  return failure;
}

Result<Session::Impl::Bytes> Session::Impl::round(uint16_t type, std::span<const std::byte> body,
                                                  std::span<const int> fds, Deadline deadline,
                                                  std::vector<std::vector<Fd>>* fds_of) {
  Writer w;
  w.u32(wire_timeout(deadline));
  w.raw(body);
  Status sent = send(type, w.view(), fds, with_grace(deadline));
  if (!sent.ok()) return fail(std::move(sent));
  Result<Bytes> answer = answer_of_round(deadline, fds_of);
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
const std::function<Status()>& Session::cancelled() const { return impl_->options.cancelled; }
bool Session::over_unix() const { return impl_->over_unix; }
Result<driver::SocketAddress> Session::local_address() const { return driver::local_address(impl_->fd.get()); }
std::span<const Peer> Session::peers() const { return impl_->peers; }

Result<std::vector<std::vector<std::byte>>> Session::all_gather(std::span<const std::byte> mine, Deadline deadline) {
  MOECCL_TRY(impl_->usable());
  if (mine.size() > kMaxBlobBytes) {
    return error(moecclInvalidArgument, "a blob of {} bytes; at most {}", mine.size(), kMaxBlobBytes);
  }
  MOECCL_ASSIGN_OR_RETURN(const auto answer, impl_->round(kGather, mine, {}, deadline));
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
  MOECCL_ASSIGN_OR_RETURN(const auto answer, impl_->round(kRows, encode_blobs(rows), {}, deadline));
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
  return impl_->round(kBarrier, {}, {}, deadline).status();
}

int Session::news_fd() const { return impl_->fd.get(); }

Status Session::news(int64_t wait_ms) {
  MOECCL_TRY(impl_->usable());
  if (!driver::wait_fd(impl_->fd.get(), POLLIN, Deadline::after_ms(wait_ms)).ok()) return {};
  return impl_->fail(error(moecclRemoteError, "the meeting point sent a message between rounds"));
}

void Session::Impl::end(uint16_t type, std::span<const std::byte> payload) {
  if (!usable().ok()) return;
  closed = true;
  tell_last(type, payload);
}

// The process of a rank that gives up may end at once, and a root in it with it. The root tells all other ranks before
// it closes the connection of the one that has given up.
void Session::Impl::tell_last(uint16_t type, std::span<const std::byte> payload) {
  const Deadline soon = Deadline::after_ms(kReasonMs);
  const bool root_is_here = root_pid == ::getpid() || (!peers.empty() && peers[static_cast<size_t>(rank)].with_root);
  if (send(type, payload, {}, soon).ok() && type == kAbandon && root_is_here) {
    std::byte rest{};
    while (driver::recv_exact(fd.get(), std::span(&rest, 1), soon).ok()) {
    }
  }
  fd.reset();
}

void Session::close() { impl_->end(kLeave, {}); }
void Session::abandon(const Status& why) { impl_->end(kAbandon, encode_failure(why)); }

}  // namespace moeccl::bootstrap
