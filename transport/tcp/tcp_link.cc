// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_link.h"

#include <algorithm>

#include "src/base/clock.h"
#include "src/driver/socket.h"
#include "transport/tcp/tcp_engine.h"

namespace moeccl::transport::tcp {
namespace {

// Up to this size a put is copied, so that it and its signal are one system call, and one packet where it fits.
constexpr size_t kCopied = 32 << 10;
// With several streams, puts are cut into pieces: small enough to keep all streams busy, large enough to cost few
// system calls.
constexpr size_t kPiece = 128 << 10;
// Bytes that one link may take before others have their turn.
constexpr size_t kTurnBytes = 1 << 20;

// Where a queue shows that the line is the limit, connections change to cubic. BBR, the default of some systems, paces
// each connection by the share of the line that it had before. But the connections of a collective begin and end
// together, and the last of them would go on at their shares while the line is idle. On a faster network, cubic would
// be the slower one: it stops doubling its window when a microsecond more makes it see a queue (docs/decisions.md).
constexpr const char* kForQueues = "cubic";
constexpr int64_t kQueueUs = 500;
constexpr uint32_t kLooks = 2;  // this often in a row, once each time that the socket is full

// For so long it is read what the other side sent before it went: it may also go on sending on another stream.
constexpr int64_t kLastWords_ns = 1'000'000'000;
constexpr int64_t kAskMs = 200;  // the time for a host to answer a new connection

}  // namespace

TcpLink::TcpLink(const LocalMemory& own, TcpPeer peer, TcpEngine& engine)
    : OrderedLink(engine, format("the connection to rank {} at {}", peer.rank, peer.where)),
      own_(own),
      peer_(std::move(peer)),
      engine_(engine),
      copy_(std::make_unique<BoardCopy>()) {
  peer_words_ = {&copy_->board, {&copy_->blocks[0], &copy_->blocks[1]}};
  parts_.landings = this;
}

// The other side has gone, perhaps because it had finished: what it sent before is still in the sockets.
void TcpLink::end(const Status& why) {
  if (ending_) return;
  ending_ = true;
  const int64_t until = now_ns() + kLastWords_ns;
  for (size_t i = peer_.streams.size(); i-- > 0;) {
    peer_.streams[i].look_again();
    while (!down_ && peer_.streams[i].readable() && !peer_.streams[i].stalled && now_ns() < until) receive(i);
  }
  lose(why);
}

void TcpLink::let_go() noexcept {
  put_.active = false;
  for (const Stream& s : peer_.streams) driver::end_of_stream(s.fd());
}

int64_t TcpLink::unacknowledged_ms() {
  const std::lock_guard lock(engine_.mutex_);
  int64_t most = 0;
  for (const Stream& s : peer_.streams) most = std::max(most, driver::unacknowledged_ms(s.fd()));
  return most;
}

// A host that answers a packet without data, if only by a refusal, is there, and so is the network. The stream that has
// been silent for longest is asked after: others may take another way.
std::string TcpLink::why_silent() {
  const auto silent_ms = [](const Stream& s) { return driver::unacknowledged_ms(s.fd()); };
  const auto most = std::ranges::max_element(peer_.streams, {}, silent_ms);
  const Result<driver::SocketAddress> to = driver::peer_address(most->fd()), from = driver::local_address(most->fd());
  if (!to.ok() || !from.ok()) return {};
  bool refused = false;
  const Result<Fd> answer =
      driver::connect_to(*to, Deadline::after_ms(kAskMs), {.from = &*from, .nobody_listens = &refused});
  if (!answer.ok() && !refused) return {};
  return format("{} answers new connections: large packets may be lost (MTU), or a firewall has forgotten this one",
                to->host());
}

// Returns the stream for the next piece: of those with nothing open, the one that has carried least for its weight.
size_t TcpLink::next_stream() const {
  size_t best = peer_.streams.size();
  for (size_t i = 0; i < peer_.streams.size(); ++i) {
    const Stream& s = peer_.streams[i];
    if (s.full || s.room() < sizeof(FrameHead)) continue;
    const auto carried = [](const Stream& x) { return static_cast<double>(x.put_bytes_sent) / x.weight(); };
    if (best == peer_.streams.size() || carried(s) < carried(peer_.streams[best])) best = i;
  }
  return best;
}

// Gives pieces to streams until none is free. Returns false when the link broke.
bool TcpLink::assign_pieces(size_t* moved) {
  const bool one = peer_.streams.size() == 1;
  while (put_.assigned < put_.bytes) {
    const size_t i = next_stream();
    if (i == peer_.streams.size()) break;
    Stream& s = peer_.streams[i];
    const size_t n = std::min(put_.bytes - put_.assigned, one ? kMaxPutBytes : kPiece);
    const FrameHead head{static_cast<uint8_t>(FrameType::kPut), 0, 0, static_cast<uint32_t>(n),
                         put_.offset + put_.assigned};
    s.append(&head, sizeof(head));
    s.open_payload(put_.src + put_.assigned, n);
    s.put_bytes_sent += n;
    put_.assigned += n;
    const Result<size_t> sent = s.flush();
    if (!sent.ok()) {
      end(sent.status());
      return false;
    }
    *moved += *sent;
  }
  return true;
}

Result<PutState> TcpLink::put_some(uint64_t offset, const void* src, size_t bytes) {
  const std::lock_guard lock(engine_.mutex_);
  // A put to a lost rank is dropped; a caller that needs that rank asks check_peer().
  if (down_ || bytes == 0) return PutState::kDone;
  engine_.sends(*this);
  if (!put_.active) {
    if (own_.board->health.state.load(std::memory_order_relaxed) != 0) return PutState::kDone;
    Stream& s = peer_.streams[0];
    if (bytes <= kCopied) {
      const FrameHead head{static_cast<uint8_t>(FrameType::kPut), 0, 0, static_cast<uint32_t>(bytes), offset};
      if (s.room() < sizeof(head) + bytes + kMaxSmallFrame) {
        flush(0);
        if (s.room() < sizeof(head) + bytes) return PutState::kFull;
      }
      s.append(&head, sizeof(head));
      s.append(src, bytes);
      s.put_bytes_sent += bytes;
      engine_.queue(*this);
      return PutState::kDone;
    }
    put_ = {offset, static_cast<const std::byte*>(src), bytes, 0, true};
  } else if (put_.offset != offset || put_.src != src || put_.bytes != bytes) {
    return PutState::kFull;
  }
  size_t moved = 0;
  for (size_t i = 0; i < peer_.streams.size() && !down_; ++i) {
    Stream& s = peer_.streams[i];
    if (s.full || !s.has_output()) continue;
    const Result<size_t> sent = s.flush();
    if (!sent.ok()) {
      end(sent.status());
    } else {
      moved += *sent;
    }
  }
  if (down_ || !assign_pieces(&moved)) return PutState::kDone;
  if (peer_.may_change_congestion) {
    for (Stream& s : peer_.streams) look_at_queue(s);
  }
  const bool open =
      std::any_of(peer_.streams.begin(), peer_.streams.end(), [](const Stream& s) { return s.payload_left() > 0; });
  if (!open && put_.assigned == put_.bytes) {
    put_.active = false;
    send_small();  // signals of other lanes that had to wait for the end of this put
    return PutState::kDone;
  }
  return moved > 0 ? PutState::kMoved : PutState::kFull;
}

void TcpLink::look_at_queue(Stream& s) {
  if (!s.full || !std::exchange(s.queue_unseen, false)) return;
  s.queues_seen = driver::queue_delay_us(s.fd()) < kQueueUs ? 0 : s.queues_seen + 1;
  if (s.queues_seen != kLooks) return;
  (void)driver::set_congestion_control(s.fd(), kForQueues);
  driver::pace(s.fd());  // bursts would overflow the queue
  peer_.may_change_congestion = peer_.streams.size() > 1;
}

Status TcpLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  const std::lock_guard lock(engine_.mutex_);
  if (down_) return {};
  // A failed rank's puts are dropped, see put_some(), so none of its signals may claim that they arrived.
  if (own_.board->health.state.load(std::memory_order_relaxed) != 0) return {};
  words_[sig] = static_cast<uint64_t>(tag) << 32 | number;
  new_words_ |= 1u << sig;
  for (size_t i = 0; i < peer_.streams.size(); ++i) marks_[i] = peer_.streams[i].put_bytes_sent;
  send_small();
  return {};
}

void TcpLink::flush(size_t stream) {
  Stream& s = peer_.streams[stream];
  if (down_ || s.full || !s.has_output()) return;
  // An open payload is the caller's: only put() sends from it until abandon_puts() has replaced it.
  if (s.payload_left() > 0 && put_.active) return;
  const Result<size_t> sent = s.flush();
  if (!sent.ok()) end(sent.status());
}

bool TcpLink::board_is_new() const { return news_.any(*own_.board); }

void TcpLink::append_board() {
  std::byte frame[kMaxSmallFrame];
  size_t n = 0;
  const BoardParts parts = news_.write(own_, peer_.rank, frame + sizeof(FrameHead), &n);
  const FrameHead head{static_cast<uint8_t>(FrameType::kBoard), parts.n_entries, parts.health ? kHealth : uint16_t{0},
                       static_cast<uint32_t>(n), 0};
  std::memcpy(frame, &head, sizeof(head));
  peer_.streams[0].append(frame, sizeof(head) + n);
}

void TcpLink::append_signals() {
  std::byte frame[kMaxSmallFrame];
  size_t n = sizeof(FrameHead);
  const auto add = [&](const auto& value) {
    std::memcpy(frame + n, &value, sizeof(value));
    n += sizeof(value);
  };
  FrameHead head{static_cast<uint8_t>(FrameType::kSignals), 0, 0, 0, 0};
  for (size_t i = 0; i < peer_.streams.size(); ++i) add(marks_[i]);
  for (uint32_t sig = 0; sig < kSigsPerPeer; ++sig) {
    if ((new_words_ >> sig & 1u) == 0) continue;
    add(WireSignal{sig, words_[sig]});
    ++head.n;
  }
  new_words_ = 0;
  head.bytes = static_cast<uint32_t>(n - sizeof(FrameHead));
  std::memcpy(frame, &head, sizeof(head));
  peer_.streams[0].append(frame, n);
}

// A signal takes the board with it, so that a rank that sees it can compare what both ranks run.
void TcpLink::send_small() {
  if (down_) return;
  if (new_words_ != 0 || board_waits_) engine_.sends(*this);
  Stream& s = peer_.streams[0];
  const bool board = new_words_ != 0 || board_waits_;
  if (board && board_is_new()) {
    if (s.room() < kMaxSmallFrame) flush(0);
    if (s.room() < kMaxSmallFrame) return;  // its turn comes with the socket's event, or with the end of the put
    append_board();
  }
  board_waits_ = false;
  if (new_words_ != 0) {
    if (s.room() < kMaxSmallFrame) flush(0);
    if (s.room() < kMaxSmallFrame) return;
    append_signals();
  }
  flush(0);
}

void TcpLink::abandon_puts() {
  if (!put_.active) return;
  put_.active = false;
  for (Stream& s : peer_.streams) s.abandon_payload();
}

bool TcpLink::wants_turn() const {
  if (down_) return false;
  for (const Stream& s : peer_.streams) {
    if (s.readable() && !s.stalled) return true;
  }
  const Stream& s = peer_.streams[0];
  return !s.full && s.payload_left() == 0 && (new_words_ != 0 || board_waits_ || s.has_output());
}

void TcpLink::receive(size_t stream) {
  Stream& s = peer_.streams[stream];
  size_t taken = 0;
  while (!down_ && s.readable() && !s.stalled && taken < kTurnBytes) {
    bool ended = false;
    const std::span<std::byte> to(s.put_to, s.put_left);
    const Result<size_t> came = s.receive(to, &ended);
    if (!came.ok() || ended) {
      s.stop_reading();
      s.ended = true;
      // A rank that leaves ends all its streams. The last words are on the first one, which may be slower than this.
      const bool whole = came.ok() && s.put_left == 0 && !s.inside_record() && s.arrived().empty();
      if (whole && !std::all_of(peer_.streams.begin(), peer_.streams.end(), [](const Stream& x) { return x.ended; }))
        break;
      return end(!came.ok() ? came.status()
                            : error(moecclRemoteError, "it was {} by the other side",
                                    s.inside_record() ? "cut off inside an encrypted record, or closed" : "closed"));
    }
    Stream::Text text{*came, std::min<size_t>(*came, to.size())};
    if (s.encrypted()) {
      Result<Stream::Text> decrypted = s.take_record(to);
      if (!decrypted.ok()) return lose(decrypted.status());
      text = *decrypted;
    }
    taken += text.bytes;
    if (Status st = advance_put(s, text.in_place); !st.ok()) return lose(st);
    if (Status st = parse(stream); !st.ok()) return lose(st);
  }
  if (taken > 0) engine_.moved();
  // Signals may wait for this stream's bytes.
  if (stream > 0 && (taken > 0 || s.ended) && peer_.streams[0].stalled) {
    peer_.streams[0].stalled = false;
    if (Status st = parse(0); !st.ok()) lose(st);
  }
}

Status TcpLink::advance_put(Stream& s, size_t bytes) {
  s.put_to += bytes;
  s.put_left -= bytes;
  s.put_bytes_received += bytes;
  if (bytes == 0 || s.put_left > 0 || own_.arrivals == nullptr) return {};
  if (own_.arrivals->arrived(peer_.rank, s.put_offset, s.put_bytes)) return {};
  return protocol_error(peer_.rank, "more puts than an operation has");
}

Status TcpLink::parse(size_t stream) {
  Stream& s = peer_.streams[stream];
  for (;;) {
    std::span<const std::byte> in = s.arrived();
    if (s.put_left > 0) {
      const size_t n = std::min<size_t>(s.put_left, in.size());
      if (n > 0) std::memcpy(s.put_to, in.data(), n);
      MOECCL_TRY(advance_put(s, n));
      s.consume(n);
      if (s.put_left > 0) return {};
      continue;
    }
    FrameHead head;
    if (in.size() < sizeof(head)) return {};
    std::memcpy(&head, in.data(), sizeof(head));
    in = in.subspan(sizeof(head));
    if (head.type == static_cast<uint8_t>(FrameType::kPut)) {
      MOECCL_TRY(begin_put(s, head));
      s.consume(sizeof(head));
      continue;
    }
    if (stream != 0 || head.bytes > kMaxSmallFrame - sizeof(head)) {
      return protocol_error(peer_.rank, "a frame that it must not send");
    }
    if (in.size() < head.bytes) return {};
    in = in.first(head.bytes);
    if (head.type == static_cast<uint8_t>(FrameType::kSignals)) {
      MOECCL_TRY(take_signals(s, head, in, &s.stalled));
      if (s.stalled) return {};
    } else if (head.type == static_cast<uint8_t>(FrameType::kBoard)) {
      MOECCL_TRY(take_board(head, in));
    } else {
      return protocol_error(peer_.rank, "a frame of an unknown type");
    }
    s.consume(sizeof(head) + head.bytes);
  }
}

Status TcpLink::begin_put(Stream& s, const FrameHead& head) {
  if (head.bytes == 0 || head.offset > own_.staging_bytes || head.bytes > own_.staging_bytes - head.offset) {
    return protocol_error(peer_.rank, "a put outside of the staging");
  }
  s.put_to = own_.staging + head.offset;
  s.put_left = head.bytes;
  s.put_offset = head.offset;
  s.put_bytes = head.bytes;
  for (Landing& l : landings_) {
    if (l.bytes != head.bytes || l.offset != head.offset || l.used) continue;
    l.used = true;
    s.put_to = l.dst;
    break;
  }
  return {};
}

void TcpLink::land(uint64_t offset, size_t bytes, std::byte* dst) {
  if (peer_.streams.size() > 1 || bytes == 0) return;
  const std::lock_guard lock(engine_.mutex_);
  for (Landing& l : landings_) {
    if (l.bytes != 0) continue;
    l = {offset, bytes, dst, false};
    return;
  }
}

Result<bool> TcpLink::landed(uint64_t offset) {
  const std::lock_guard lock(engine_.mutex_);
  for (Landing& l : landings_) {
    if (l.bytes == 0 || l.offset != offset) continue;
    // The caller has seen the put's signal, and the memory is the program's again after this.
    const bool whole = !take_back(l);
    l.bytes = 0;
    if (whole) return l.used;
    const Status why = protocol_error(peer_.rank, "a signal before the end of the put that it announces");
    lose(why);  // if it is not lost yet
    return why;
  }
  return false;
}

void TcpLink::land_nothing() {
  const std::lock_guard lock(engine_.mutex_);
  for (const Landing& l : landings_) (void)take_back(l);
  landings_ = {};
}

bool TcpLink::take_back(const Landing& l) {
  bool any = false;
  for (Stream& s : peer_.streams) {
    const bool here = l.bytes != 0 && l.used && s.put_left > 0 && s.put_to == l.dst + (l.bytes - s.put_left);
    if (here) s.put_to = own_.staging + l.offset + (l.bytes - s.put_left);
    any = any || here;
  }
  return any;
}

Status TcpLink::take_signals(Stream& s, const FrameHead& head, std::span<const std::byte> payload, bool* stalled) {
  const size_t marks = peer_.streams.size() * sizeof(uint64_t);
  if (payload.size() != marks + head.n * sizeof(WireSignal)) return protocol_error(peer_.rank, "a bad signal frame");
  for (size_t i = 0; i < peer_.streams.size(); ++i) {
    uint64_t mark = 0;
    std::memcpy(&mark, payload.data() + i * sizeof(mark), sizeof(mark));
    // On its own stream the puts before it have arrived; a mark beyond them would be waited for forever.
    if (&peer_.streams[i] == &s && mark > s.put_bytes_received) return protocol_error(peer_.rank, "a bad signal frame");
    if (peer_.streams[i].put_bytes_received < mark) {
      if (peer_.streams[i].ended) return error(moecclRemoteError, "it was closed by the other side");
      *stalled = true;
      return {};
    }
  }
  for (size_t i = 0; i < head.n; ++i) {
    WireSignal signal;
    std::memcpy(&signal, payload.data() + marks + i * sizeof(signal), sizeof(signal));
    if (signal.sig >= kSigsPerPeer) return protocol_error(peer_.rank, "a signal of an unknown number");
    // Release: pairs with the acquire load of `word` in exec::Wait; puts that came before it are visible there.
    own_.signals[size_t{peer_.rank} * kSigsPerPeer + signal.sig].word.store(signal.word, std::memory_order_release);
  }
  return {};
}

Status TcpLink::take_board(const FrameHead& head, std::span<const std::byte> payload) {
  if (copy_->take({head.n, (head.parts & kHealth) != 0}, payload)) return {};
  return protocol_error(peer_.rank, "a bad board frame");
}

}  // namespace moeccl::transport::tcp
