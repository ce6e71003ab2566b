// SPDX-License-Identifier: Apache-2.0
#include "src/exec/message.h"

#include <algorithm>
#include <cstring>

#include "src/base/data_type.h"
#include "src/base/device_order.h"
#include "src/exec/revoked.h"

namespace moeccl::exec {

using transport::kSigsPerPeer;
using transport::shm::kMessageSlots;

namespace {

// The peer writes the header, so read each word once, after an acquire load of the slot's signal.
MessageSlotHeader read_header(const MessageSlotHeader* h) {
  MessageSlotHeader copy;
  std::memcpy(&copy, h, sizeof(copy));
  return copy;
}

}  // namespace

std::string Message::describe() const {
  return format("{} of {} bytes {} rank {}", is_send ? "send" : "receive", bytes, is_send ? "to" : "from", peer);
}

size_t record(Fabric& fabric, const Message& message) {
  Signature signature;
  signature.op = moecclOpSendRecv;
  signature.type = message.type;
  signature.count = message.bytes / moecclTypeSize(message.type);
  signature.root = message.peer;
  const size_t made = fabric.recorder.begin_message(signature, message.is_send, message.data);
  fabric.recorder.chose(made, message.is_send ? "send" : "receive");
  return made;
}

Status sizes_differ(uint64_t sender, uint64_t sent, uint64_t receiver, uint64_t expected) {
  return error(moecclMismatch, "ranks disagree on the size of a message: rank {} sends {} bytes, rank {} expects {}",
               sender, sent, receiver, expected);
}

Status types_differ(uint64_t sender, uint64_t sent, uint64_t receiver, uint64_t expected) {
  const auto name = [](uint64_t type) {
    return type_name(static_cast<moecclDataType_t>(std::min<uint64_t>(type, MOECCL_NUM_DATA_TYPES)));
  };
  return error(moecclMismatch, "ranks disagree on the type of a message: rank {} sends {}, rank {} expects {}", sender,
               name(sent), receiver, name(expected));
}

Status check_own(uint32_t rank, const Message& sent, const Message& received) {
  if (sent.bytes != received.bytes) {
    return error(moecclMismatch, "rank {} sends {} bytes to itself and receives {}", rank, sent.bytes, received.bytes);
  }
  if (sent.type != received.type) {
    return error(moecclMismatch, "rank {} sends {} to itself and receives {}", rank, type_name(sent.type),
                 type_name(received.type));
  }
  return {};
}

Progress MessageTask::poll() {
  if (before_ != nullptr && !before_->finished_) {
    // The earlier message is not done. If it has failed, so has the communicator, which ends this message too.
    if (fabric().failed()) return fail(fabric().failure());
    return Progress::kBlocked;
  }
  if (record_ == 0) {
    // Two ranks may exchange messages forever without ever looking at a third one that has revoked the communicator.
    if (Status s = check_revoked(fabric()); !s.ok()) return fail(std::move(s));
    record_ = record(fabric(), message_);
  }
  return message_.is_send ? send() : receive();
}

std::string MessageTask::describe() const { return format("{} ({} moved)", message_.describe(), moved_bytes_); }

uint32_t MessageTask::acknowledged() const {
  return static_cast<uint32_t>(load_from_device(fabric().own->signal(message_.peer, kMessageCredit).word));
}

// The slots for messages to a rank are in that rank's segment, ordered by source.
const MessageSlotHeader* MessageTask::own_slot(uint32_t number) const {
  Fabric& f = fabric();
  return reinterpret_cast<const MessageSlotHeader*>(f.own->message(message_.peer, number % kMessageSlots));
}

uint64_t MessageTask::room() const {
  const Fabric& f = fabric();
  if (const uint64_t on_device = f.slots_with(message_.peer).bytes; on_device > 0) return on_device;
  return f.message_bytes.empty() ? f.own->shape().message_bytes - sizeof(MessageSlotHeader)
                                 : f.message_bytes[message_.peer];
}

bool MessageTask::direct_possible(uint64_t& kind, uint64_t& place) const {
  Fabric& f = fabric();
  const transport::Link& link = f.link(message_.peer);
  const bool in_heap = !link.view().same_process && link.view().heap != nullptr && f.in_heap(message_.data);
  kind = in_heap ? kHeapOffset : kAddress;
  place = in_heap ? static_cast<uint64_t>(message_.data - f.heap) : reinterpret_cast<uint64_t>(message_.data);
  return in_heap || link.view().same_process || link.reads() != nullptr;
}

void MessageTask::begin_use() {
  if (!begun_) engine_use_.begin(fabric().engine.get(), message_class());
  begun_ = true;
}

uint32_t MessageTask::message_class() const { return traffic_class(moecclOpSendRecv, message_.priority); }

Progress MessageTask::done() {
  finished_ = true;
  engine_use_.end();
  fabric().recorder.end(record_, false);
  return Progress::kDone;
}

Progress MessageTask::send() {
  Fabric& f = fabric();
  uint32_t& sent = f.sent[message_.peer * kSigsPerPeer + kMessageData];
  if (handed_over_) {
    // Everything is handed over. Data that the receiver copies from our memory itself must also have been taken.
    const transport::PostedPuts* const posts = f.link(message_.peer).posted_puts();
    if (posts != nullptr && !posts->taken(posted_)) return Progress::kBlocked;
    if (!direct_ || static_cast<int32_t>(acknowledged() - last_number_) >= 0) return done();
    return Progress::kBlocked;
  }
  const uint64_t room = this->room();
  bool any = false;
  while (sent - acknowledged() < kMessageSlots) {
    MessageSlotHeader header{};
    header.bytes = message_.bytes;
    header.type = static_cast<uint64_t>(message_.type);
    header.kind = kChunks;
    uint64_t kind = 0, place = 0;
    const uint64_t now = std::min(room, message_.bytes - moved_bytes_);
    const bool direct = message_.bytes > room && moved_bytes_ == 0 && direct_possible(kind, place);
    if (direct) {
      header.kind = kind;
      header.place = place;
      direct_ = true;
      last_number_ = sent + 1;
    }
    begin_use();
    if (!filled_) {
      if (const Progress p = fill_slot(sent, header, direct ? 0 : now); p != Progress::kDone) {
        return p == Progress::kBlocked && any ? Progress::kMoved : p;
      }
      filled_ = true;
    }
    if (f.paced[message_.peer] && !f.link(message_.peer).pace()->admit(message_class())) {
      return any ? Progress::kMoved : Progress::kBlocked;
    }
    filled_ = false;
    moved_bytes_ += direct ? message_.bytes : now;
    if (Status s = f.link(message_.peer).signal(kMessageData, ++sent, 0); !s.ok()) return fail(std::move(s));
    any = true;
    handed_over_ = moved_bytes_ == message_.bytes;
    if (handed_over_) return !direct_ && posted_ == 0 ? done() : Progress::kMoved;
  }
  return any ? Progress::kMoved : Progress::kBlocked;
}

Progress MessageTask::fill_slot(uint32_t number, const MessageSlotHeader& header, uint64_t bytes) {
  Fabric& f = fabric();
  transport::Link& link = f.link(message_.peer);
  const uint64_t offset = f.own->message_offset(f.rank, number % kMessageSlots);
  if (std::byte* staging = link.view().messages; staging != nullptr) {
    auto* h = reinterpret_cast<MessageSlotHeader*>(staging + offset);
    *h = header;
    if (bytes == 0) return Progress::kDone;
    const DeviceSlots slots = f.slots_with(message_.peer);
    void* const to = slots.bytes > 0 ? static_cast<void*>(slots.out + number % kMessageSlots * slots.bytes) : h + 1;
    f.kernels->copy(to, message_.data + moved_bytes_, bytes);
    if (link.pace() != nullptr) link.pace()->wrote(bytes);
    return Progress::kDone;
  }
  // A blocked put must be repeated with the same source, so the header stays where it was.
  transport::PutTurns* const turns = link.put_turns();
  if (!header_there_ && bytes > 0 && turns != nullptr && !turns->may_put(message_class(), bytes))
    return Progress::kBlocked;
  if (!header_there_) {
    header_ = header;
    transport::DeviceSide* const device = link.device();
    const Result<transport::PutState> state = device != nullptr ? device->put_words(offset, &header_, sizeof(header_))
                                                                : link.put(offset, &header_, sizeof(header_));
    if (!state.ok()) return fail(state.status());
    if (*state != transport::PutState::kDone) return Progress::kBlocked;
    header_there_ = true;
  }
  if (bytes > 0) {
    transport::PostedPuts* const posts = link.posted_puts();
    const Result<transport::PutState> state =
        posts != nullptr ? posts->post(offset + sizeof(header), message_.data + moved_bytes_, bytes)
                         : link.put(offset + sizeof(header), message_.data + moved_bytes_, bytes);
    if (!state.ok()) return fail(state.status());
    if (*state == transport::PutState::kMoved) return Progress::kMoved;
    if (*state == transport::PutState::kFull) return Progress::kBlocked;
    if (posts != nullptr) posted_ = posts->posted();
  }
  header_there_ = false;
  return Progress::kDone;
}

Progress MessageTask::receive() {
  Fabric& f = fabric();
  uint32_t& taken = f.awaited[message_.peer * kSigsPerPeer + kMessageData];
  const transport::SignalLine& line = f.own->signal(message_.peer, kMessageData);
  const uint64_t room = this->room();
  const DeviceSlots slots = f.slots_with(message_.peer);
  bool any = false;
  // Acquire: pairs with the release in Link::signal().
  while (static_cast<int32_t>(static_cast<uint32_t>(load_from_device(line.word)) - taken) > 0) {
    if (f.paced[message_.peer] &&
        line.visible_ns[(taken + 1) % transport::kVisibleRing].load(std::memory_order_relaxed) > now_ns()) {
      break;
    }
    const MessageSlotHeader* slot_header = own_slot(taken);
    const MessageSlotHeader header = read_header(slot_header);
    if (header.bytes != message_.bytes) return fail(sizes_differ(message_.peer, header.bytes, f.rank, message_.bytes));
    if (const auto own = static_cast<uint64_t>(message_.type); header.type != own)
      return fail(types_differ(message_.peer, header.type, f.rank, own));
    begin_use();
    if (header.kind != kChunks) {
      if (Progress p = receive_direct(header); p == Progress::kFailed) return p;
      moved_bytes_ = message_.bytes;
    } else {
      const uint64_t now = std::min(room, message_.bytes - moved_bytes_);
      const void* const from =
          slots.bytes > 0 ? static_cast<const void*>(slots.in + taken % kMessageSlots * slots.bytes) : slot_header + 1;
      if (now > 0) f.kernels->copy(message_.data + moved_bytes_, from, now);
      moved_bytes_ += now;
    }
    ++taken;
    if (Status s = f.link(message_.peer).signal(kMessageCredit, taken, 0); !s.ok()) return fail(std::move(s));
    any = true;
    if (moved_bytes_ == message_.bytes) return done();
  }
  return any ? Progress::kMoved : Progress::kBlocked;
}

Progress MessageTask::receive_direct(const MessageSlotHeader& header) {
  Fabric& f = fabric();
  transport::Link& link = f.link(message_.peer);
  const transport::PeerView& view = link.view();
  const std::byte* from = nullptr;
  auto& reads = f.own->board().progress.reads_message_of;
  if (view.same_process) {
    reads.store(message_.peer + 1, std::memory_order_seq_cst);
    if (Status s = still_runs(message_.peer) ? Status() : check_peer_state(*this, message_.peer); !s.ok()) {
      reads.store(0, std::memory_order_release);
      return fail(std::move(s));
    }
  }
  if (header.kind == kAddress && view.same_process) from = reinterpret_cast<const std::byte*>(header.place);
  if (header.kind == kHeapOffset && view.heap != nullptr && message_.bytes <= view.heap_bytes &&
      header.place <= view.heap_bytes - message_.bytes) {
    from = view.heap + header.place;
  }
  // A sender that gave up meanwhile has its memory back, so the data read from it is worthless.
  const auto still_sent = [&] {
    std::atomic_thread_fence(std::memory_order_acquire);  // orders the reads above
    return still_runs(message_.peer) ? Status() : check_peer_state(*this, message_.peer);
  };
  if (from != nullptr) {
    (message_.bytes > kernels::stream_threshold_bytes() ? f.kernels->copy_stream : f.kernels->copy)(message_.data, from,
                                                                                                    message_.bytes);
    reads.store(0, std::memory_order_release);
    Status s = view.same_process ? Status() : still_sent();
    return s.ok() ? Progress::kMoved : fail(std::move(s));
  }
  if (header.kind != kAddress || link.reads() == nullptr) {
    return fail(error(moecclRemoteError, "rank {} announced a message that cannot be reached from rank {}",
                      message_.peer, f.rank));
  }
  Status s = link.reads()->read(header.place, message_.data, message_.bytes);
  if (s.ok()) s = still_sent();
  return s.ok() ? Progress::kMoved : fail(std::move(s).with_context(format("message from rank {}", message_.peer)));
}

// A receive whose slots are all full no longer needs the sender, which may leave while a paced link holds them back.
bool MessageTask::needs(uint32_t peer) const {
  if (peer != message_.peer || message_.is_send) return peer == message_.peer;
  const Fabric& f = fabric();
  const auto number = static_cast<uint32_t>(load_from_device(f.own->signal(peer, kMessageData).word));
  const uint32_t full = number - f.awaited[peer * kSigsPerPeer + kMessageData];
  return full == 0 || full * room() < message_.bytes - moved_bytes_;
}

void MessageTask::let_go() { fabric().recorder.end(record_, true); }

void MessageTask::abandon() {
  Fabric& f = fabric();
  const transport::Link& link = f.link(message_.peer);
  if (!message_.is_send) return;
  take_sources_back(f);
  if (!link.view().same_process) return;
  wait_for_peers([&] { return link.board().progress.reads_message_of.load(std::memory_order_seq_cst) == f.rank + 1; },
                 1'000'000'000 + static_cast<int64_t>(message_.bytes) * kSlowCopy_ns);
}

Progress SelfMessageTask::poll() {
  if (Status s = check_own(fabric().rank, send_, receive_); !s.ok()) return fail(std::move(s));
  if (fabric().cuda) {
    if (send_.bytes > 0 && receive_.data != send_.data) fabric().kernels->copy(receive_.data, send_.data, send_.bytes);
  } else if (send_.bytes > 0) {
    std::memmove(receive_.data, send_.data, send_.bytes);
  }
  return Progress::kDone;
}

}  // namespace moeccl::exec
