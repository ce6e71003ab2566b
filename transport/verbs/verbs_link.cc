// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/verbs_link.h"

#include <algorithm>
#include <set>

#include "src/base/clock.h"
#include "transport/common/presence.h"
#include "transport/common/put_order.h"
#include "transport/verbs/verbs_engine.h"

namespace moeccl::transport::verbs {
namespace {

// The size of pieces where several lanes share a put: large enough that a request costs little compared to its bytes.
constexpr size_t kPiece = 64 << 10;
// Copied puts go in pieces, so that the NIC sends one while the next is copied.
constexpr size_t kCopyPiece = 32 << 10;
// Some NICs drop what exceeds their buffers when too much is under way on one queue pair (Broadcom, Pollara).
constexpr uint64_t kMostUnderWay = 16 << 20;

}  // namespace

VerbsLink::VerbsLink(LinkSetting setting, std::vector<Lane> lanes, VerbsEngine& engine)
    : OrderedLink(engine, format("rank {}", setting.far.rank)),
      s_(std::move(setting)),
      lanes_(std::move(lanes)),
      engine_(engine) {
  size_t requests = 0;
  uint32_t depth = ~0u;
  for (const Lane& lane : lanes_) {
    requests += lane.pair->depth();
    depth = std::min(depth, lane.pair->depth());
  }
  ring_ = BounceRing(s_.ring, s_.ring_bytes, requests);
  reserve_ = std::min(32u, depth / 2);
  for (OpenPut& p : puts_) p.held.reserve(64);
  peer_words_.board = &s_.copy->board;
  peer_words_.blocks[0] = &s_.copy->blocks[0];
  peer_words_.blocks[1] = &s_.copy->blocks[1];
  parts_.rooms = this;
  parts_.posted_puts = this;
  if (s_.records != nullptr) parts_.one_sided = this;
}

VerbsLink::~VerbsLink() = default;

void VerbsLink::let_go() noexcept {
  pending_ = 0;
  board_waits_ = false;
  // From now on sources count as taken, so no NIC may read one any more.
  for (const Lane& lane : lanes_) lane.pair->stop();
}

bool VerbsLink::reads_sources() const {
  const std::lock_guard lock(engine_.mutex_);
  if (down_) return false;
  engine_.poll();
  return std::any_of(puts_.begin(), puts_.end(),
                     [](const OpenPut& p) { return p.bytes != 0 && p.from == OpenPut::From::kRegistered; });
}

void VerbsLink::withdraw() {
  if (!reads_sources()) return;
  const std::lock_guard lock(engine_.mutex_);
  lose(error(moecclRemoteError, "an operation failed here while its data was under way, so the connection was ended"));
}

int64_t VerbsLink::unacknowledged_ms() {
  const std::lock_guard lock(engine_.mutex_);
  return asked_since_ns_ == 0 ? 0 : (now_ns() - asked_since_ns_) / 1'000'000;
}

// The process of a peer whose NIC is silent may be well: NICs acknowledge without it.
std::string VerbsLink::why_silent() {
  uint64_t acknowledged = 0, under_way = 0;
  std::string own;
  std::set<const Rail*> rails;  // lanes share them
  {
    const std::lock_guard lock(engine_.mutex_);
    for (const Lane& lane : lanes_) {
      Rail& rail = lane.pair->rail();
      const std::string trouble = rail.known_trouble(now_ns());
      if (!trouble.empty()) return format("{} of this host: {}", rail.info().name(), trouble);
      rails.insert(&rail);
      acknowledged += lane.pair->completed();
      under_way += lane.pair->posted() - lane.pair->completed();
    }
    if (lanes_.empty()) return {};
    const RailInfo& rail = lanes_[0].pair->rail().info();
    own = format("{} ({})", rail.name(), text_of(rail.gid.gid));
  }
  // Without the lock: a NIC may take long to answer.
  for (const Rail* rail : rails) {
    const std::string trouble = rail->port_trouble();
    if (!trouble.empty()) return format("{} of this host: {}", rail->info().name(), trouble);
  }
  const char* const look =
      acknowledged == 0 ? "look at the addresses (MOECCL_IB_GID_INDEX, MOECCL_IB_HCA) and the routes between them"
                        : "look at its port (ibstat, rdma link), and at what the switch drops (MTU, PFC, VLAN)";
  return transport::why_silent(s_.far.presence,
                               format("RDMA from {} to {} does not pass, {} of {} requests were acknowledged; {}", own,
                                      s_.far.where, acknowledged, acknowledged + under_way, look));
}

std::byte* VerbsLink::room(size_t bytes) {
  const std::lock_guard lock(engine_.mutex_);
  // The caller packs anew. A packed put that found the lanes full is not repeated as it was, even if it gets the same
  // room and goes to the same place.
  for (OpenPut& p : puts_)
    if (p.bytes != 0 && p.from == OpenPut::From::kRoom && !p.left) p.abandoned = true;
  engine_.poll();
  return take_room(bytes);
}

std::byte* VerbsLink::take_room(size_t bytes) {
  reclaim();
  std::byte* const room = ring_.take(bytes);
  if (room == nullptr) ask_for_room();
  return room;
}

void VerbsLink::ask_for_room() {
  const BounceRing::Oldest oldest = ring_.oldest();
  if (oldest.number != 0 && !down_) ask_for(lanes_[oldest.lane], oldest.number);
}

bool VerbsLink::taken(uint64_t count) const {
  if (n_taken_.load(std::memory_order_acquire) >= count) return true;
  const std::lock_guard lock(engine_.mutex_);
  if (down_) return true;
  engine_.poll();
  return n_taken_.load(std::memory_order_relaxed) >= count;
}

// Sources are read in the order in which completions come, so the put that was posted first may end last.
void VerbsLink::close_left() {
  uint64_t oldest = n_posted_ + 1;
  for (OpenPut& p : puts_) {
    if (p.bytes == 0 || !p.left) continue;
    const uint64_t number = p.number;
    if (!finish(p)) oldest = std::min(oldest, number);
  }
  n_taken_.store(oldest - 1, std::memory_order_release);
}

Result<PutState> VerbsLink::post_some(uint64_t offset, const void* src, size_t bytes, bool stays) {
  const std::lock_guard lock(engine_.mutex_);
  // A put to a lost rank is dropped; a caller that needs that rank asks check_peer().
  if (down_ || bytes == 0) return PutState::kDone;
  if (failed_here()) {
    abandon_puts();
    ring_.drop_taken();
    return PutState::kDone;
  }
  if (offset > s_.peer.staging_bytes || bytes > s_.peer.staging_bytes - offset) {
    return error(moecclInternalError, "a put of {} bytes to {} of rank {}'s staging, which has {}", bytes, offset,
                 s_.far.rank, s_.peer.staging_bytes);
  }
  OpenPut* p = nullptr;
  for (OpenPut& o : puts_) {
    if (o.bytes == bytes && o.offset == offset && o.src == src && !o.abandoned && !o.left) p = &o;
  }
  engine_.poll();
  if (p == nullptr) p = open(offset, static_cast<const std::byte*>(src), bytes);
  if (p == nullptr) return PutState::kFull;
  const bool moved = post_pieces(*p);
  if (p->from != OpenPut::From::kRegistered && p->posted == bytes && bytes <= kCopyPiece) {
    engine_.queue(*this);  // the signal behind it posts both with one call, or else the next turn does
  } else {
    flush();
  }
  if (down_ || finish(*p)) return PutState::kDone;
  if (stays && p->posted == p->bytes && p->recorded) {
    p->left = true;
    p->number = ++n_posted_;
    return PutState::kDone;
  }
  return moved ? PutState::kMoved : PutState::kFull;
}

VerbsLink::OpenPut* VerbsLink::open(uint64_t offset, const std::byte* src, size_t bytes) {
  for (OpenPut& p : puts_) {
    if (p.bytes != 0 && (!p.abandoned || !finish(p))) continue;
    p.offset = offset;
    p.src = src;
    p.bytes = bytes;
    p.posted = 0;
    p.until = {};
    p.recorded = p.left = p.abandoned = false;
    // If the memory cannot be registered, the first piece finds out (post_piece()).
    p.from = ring_.is_taken(src, bytes)                           ? OpenPut::From::kRoom
             : bytes <= s_.copy_bytes && !from_device(src, bytes) ? OpenPut::From::kCopied
                                                                  : OpenPut::From::kRegistered;
    return &p;
  }
  return nullptr;
}

// Returns the lane with room that has least under way for its weight.
Lane* VerbsLink::next_lane() {
  Lane* best = nullptr;
  const auto load = [](const Lane& l) { return static_cast<double>(l.pair->bytes_under_way()) / l.weight; };
  for (Lane& lane : lanes_) {
    if (lane.pair->room() <= reserve_ || lane.pair->bytes_under_way() >= kMostUnderWay) continue;
    if (best == nullptr || load(lane) < load(*best)) best = &lane;
  }
  return best;
}

// Returns where byte `at` of the peer's staging lies, and limits *bytes to those that lie there in one region.
QueuePair::Target VerbsLink::place(uint64_t at, const Lane& lane, size_t* bytes) const {
  if (at >= s_.peer.device_bytes) return {s_.peer.staging + at, lane.keys.staging};
  *bytes = std::min({*bytes, s_.peer.device_bytes - at, kDevicePiece - at % kDevicePiece});
  return {s_.peer.device + at, lane.keys.device[at / kDevicePiece]};
}

size_t VerbsLink::post_piece(OpenPut& p, Lane& lane, size_t wanted) {
  const std::byte* const from = p.src + p.posted;
  size_t n = std::min<size_t>(wanted, lane.pair->rail().max_message_bytes());
  const QueuePair::Target to = place(p.offset + p.posted, lane, &n);
  switch (p.from) {
    case OpenPut::From::kRoom:
      reclaim();
      if (ring_.full()) {
        ask_for_room();
        return 0;
      }
      lane.pair->write(to, from, s_.rings->lkey(lane.rail), static_cast<uint32_t>(n), false);
      ring_.sent(n, index_of(lane), lane.pair->posted());
      return n;
    case OpenPut::From::kRegistered: {
      const Region* region = s_.own_staging->holds(from, n) ? s_.own_staging : nullptr;
      if (region == nullptr && s_.device != nullptr) region = s_.device->source(from, &n);
      if (region == nullptr) {
        const Regions::Use use = engine_.regions_->use(from, n);
        if (use.region == nullptr) {
          p.from = OpenPut::From::kCopied;
          return post_piece(p, lane, wanted);
        }
        p.held.push_back(use.region);
        region = use.region;
        n = use.bytes;
      }
      lane.pair->write(to, from, region->lkey(lane.rail), static_cast<uint32_t>(n), true);
      p.until[index_of(lane)] = lane.pair->posted();
      return n;
    }
    case OpenPut::From::kCopied:
      break;
  }
  if (n <= lane.pair->inline_bytes()) {
    lane.pair->write_small(to, from, static_cast<uint32_t>(n));
    return n;
  }
  n = std::min(n, kCopyPiece);
  std::byte* const room = take_room(n);
  if (room == nullptr) return 0;
  std::memcpy(room, from, n);
  lane.pair->write(to, room, s_.rings->lkey(lane.rail), static_cast<uint32_t>(n), false);
  ring_.sent(n, index_of(lane), lane.pair->posted());
  return n;
}

bool VerbsLink::post_pieces(OpenPut& p) {
  const size_t before = p.posted;
  while (p.posted < p.bytes) {
    Lane* const lane = next_lane();
    if (lane == nullptr) break;
    const size_t left = p.bytes - p.posted;
    const size_t share = (p.bytes + lanes_.size() - 1) / lanes_.size();
    const size_t n = post_piece(p, *lane, lanes_.size() == 1 ? left : std::min(left, std::max(kPiece, share)));
    if (n == 0) break;
    p.posted += n;
    if (p.posted < p.bytes) flush();  // the NIC begins while the next piece is prepared
  }
  if (p.posted == p.bytes && !p.recorded) p.recorded = s_.peer.records == 0 || record(p);
  return p.posted > before;
}

bool VerbsLink::finish(OpenPut& p) {
  if (!p.abandoned && (p.posted < p.bytes || !p.recorded)) return false;
  if (!reached(p.until)) return false;
  for (Region* region : p.held) engine_.regions_->release(region);
  p.held.clear();
  p.bytes = 0;
  return true;
}

void VerbsLink::abandon_puts() {
  for (OpenPut& p : puts_) p.abandoned = p.bytes != 0 && !p.left;
}

bool VerbsLink::reached(const Marks& marks) const {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].pair->completed() < marks[i]) return false;
  }
  return true;
}

void VerbsLink::reclaim() {
  ring_.give_back([this](uint32_t lane, uint64_t number) { return lanes_[lane].pair->completed() >= number; });
}

void VerbsLink::ask_for(Lane& lane, uint64_t number) {
  if (lane.pair->asked() >= number || lane.pair->room() == 0) return;
  lane.pair->write({s_.peer.copy, lane.keys.copy}, nullptr, 0, 0, true);
  flush();
}

void VerbsLink::flush() {
  for (Lane& lane : lanes_) {
    if (Status st = lane.pair->flush(); !st.ok()) lose(st);
  }
  note_asked();
}

void VerbsLink::note_asked() {
  if (asked_since_ns_ != 0 || down_) return;
  const bool any = std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return l.pair->awaits(); });
  if (any) asked_since_ns_ = now_ns();
}

void VerbsLink::completed(uint32_t lane, uint64_t tag, int64_t now) {
  lanes_[lane].pair->done(tag);
  const bool any = std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return l.pair->awaits(); });
  asked_since_ns_ = any ? now : 0;
  if (n_taken_.load(std::memory_order_relaxed) < n_posted_) close_left();
}

bool VerbsLink::idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return l.pair->idle(); });
}

void VerbsLink::drain() {
  for (Lane& lane : lanes_) {
    if (!lane.pair->idle()) ask_for(lane, lane.pair->posted());
  }
}

void VerbsLink::release_all() {
  for (OpenPut& p : puts_) {
    for (Region* region : p.held) engine_.regions_->release(region);
    p.held.clear();
    p.bytes = 0;
  }
  if (!down_) lose(error(moecclInternalError, "the engine has ended"));
  lanes_.clear();
}

}  // namespace moeccl::transport::verbs
