// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/queue_pair.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "src/base/random.h"
#include "src/driver/thread.h"

namespace moeccl::transport::verbs {

using namespace driver::ibv_abi;

namespace {

// The same values as NCCL's, which users know: "receiver not ready" is retried endlessly, at 0.64 ms, and a packet may
// cross 255 routers.
constexpr uint8_t kRnrRetry = 7, kRnrTimer = 12, kHopLimit = 255;
// A NIC that looks up its peer's hardware address may take a while (RoCE, NVIDIA/nccl #1672).
constexpr int kTries = 10;
constexpr int64_t kRetryNs = 100'000'000;

}  // namespace

uint8_t timeout_code(const Env& settings, int64_t operation_timeout_ms) {
  if (settings.ib_timeout >= 0) return static_cast<uint8_t>(settings.ib_timeout);
  constexpr int kShortest = 14, kLongest = 20;  // 67 ms, 4.3 s
  const int tries = settings.ib_retry_count + 1;
  int code = kLongest;
  const auto all_tries_ms = [&](int c) { return 0.004096 * static_cast<double>(1u << c) * tries; };
  while (code > kShortest && all_tries_ms(code) > static_cast<double>(operation_timeout_ms) / 2) --code;
  return static_cast<uint8_t>(code);
}

Result<std::unique_ptr<QueuePair>> QueuePair::make(Rail& rail, const QueueOptions& options) {
  std::unique_ptr<QueuePair> q(new QueuePair(rail));
  QueuePairInit init = {};
  init.send_cq = init.recv_cq = rail.queue();
  init.qp_type = kReliable;
  // No request receives anything, but some devices refuse an empty queue.
  init.cap = {std::min(options.depth, rail.max_requests()), 1, 1, 1, std::min<uint32_t>(options.inline_bytes, kSmall)};
  const uint32_t wanted = init.cap.max_send_wr;
  for (;;) {
    QueuePairInit attempt = init;
    q->pair_ = rail.api().create_qp(rail.pd(), &attempt);
    if (q->pair_ != nullptr) {
      q->inline_bytes_ = std::min<uint32_t>(attempt.cap.max_inline_data, kSmall);
      break;
    }
    // Devices without room for this much inline data fail instead of giving less.
    if (init.cap.max_inline_data == 0 || errno == ENOMEM) {
      return error(moecclSystemError, "{} gives no queue pair of {} requests: {}", rail.info().name(), wanted,
                   std::strerror(errno));
    }
    init.cap.max_inline_data /= 2;
    if (init.cap.max_inline_data < 8) init.cap.max_inline_data = 0;
  }
  q->id_ = options.id;
  q->depth_ = wanted;
  q->bytes_until_.resize(wanted);
  // Random, so that packets of an earlier connection with the same numbers are not taken for its own.
  uint32_t first = 0;
  MOECCL_TRY(random_bytes(&first, sizeof(first)));
  q->address_ = {q->pair_->qp_num, first & 0xffffff};
  return q;
}

QueuePair::~QueuePair() {
  if (pair_ != nullptr) (void)rail_.api().destroy_qp(pair_);
}

void QueuePair::stop() noexcept {
  QueuePairAttr attr = {};
  attr.qp_state = kStateError;
  (void)rail_.api().modify_qp(pair_, &attr, kMaskState);
}

Status QueuePair::modify(QueuePairAttr* attr, int mask, const char* to) {
  for (int tries = 1;; ++tries) {
    const int rc = rail_.api().modify_qp(pair_, attr, mask);
    if (rc == 0) return {};
    const int code = rc > 0 ? rc : errno;
    if (code == ETIMEDOUT && tries < kTries) {
      driver::sleep_ns(kRetryNs);
      continue;
    }
    return error(moecclSystemError, "a queue pair of {} ({}) does not become {}: {}", rail_.info().name(),
                 text_of(rail_.info().gid.gid), to, std::strerror(code));
  }
}

Status QueuePair::connect(const Env& settings, const ConnectOptions& o) {
  const RailInfo& own = rail_.info();
  if (own.ethernet != o.peer_rail.ethernet) {
    return error(moecclRemoteError, "{} is {} and {} of the peer is {}: choose NICs of one kind by MOECCL_IB_HCA",
                 own.name(), own.ethernet ? "RoCE" : "InfiniBand", o.peer_rail.name(),
                 o.peer_rail.ethernet ? "RoCE" : "InfiniBand");
  }
  QueuePairAttr attr = {};
  attr.qp_state = kStateInit;
  attr.pkey_index = settings.ib_pkey_index;
  attr.port_num = own.port;
  attr.qp_access_flags = kLocalWrite | kRemoteWrite | kRemoteRead;
  MOECCL_TRY(modify(&attr, kMaskState | kMaskPkey | kMaskPort | kMaskAccess,
                    "ready to connect (is MOECCL_IB_PKEY an "
                    "index of the port's table?)"));
  attr = {};
  attr.qp_state = kStateReceive;
  attr.path_mtu = std::min(own.mtu_code, o.peer_rail.mtu_code);
  attr.dest_qp_num = o.peer.number;
  attr.rq_psn = o.peer.first_packet;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = kRnrTimer;
  AddressVector& to = attr.ah_attr;
  to.port_num = own.port;
  to.sl = settings.ib_service_level;
  const bool other_subnet =
      own.gid.gid.global.subnet_prefix != o.peer_rail.gid.gid.global.subnet_prefix;  // InfiniBand only
  if (own.needs_route || o.peer_rail.needs_route || other_subnet) {
    to.is_global = 1;
    to.grh.dgid = o.peer_rail.gid.gid;
    to.grh.sgid_index = static_cast<uint8_t>(own.gid.index);
    to.grh.hop_limit = kHopLimit;
    to.grh.traffic_class = settings.ib_traffic_class;
  }
  to.dlid = own.ethernet ? 0 : o.peer_rail.lid;
  MOECCL_TRY(modify(
      &attr, kMaskState | kMaskAddress | kMaskMtu | kMaskDestination | kMaskRqPsn | kMaskDestReads | kMaskRnrTimer,
      "ready to receive"));
  attr = {};
  attr.qp_state = kStateSend;
  attr.timeout = o.timeout_code;
  attr.retry_cnt = settings.ib_retry_count;
  attr.rnr_retry = kRnrRetry;
  attr.sq_psn = address_.first_packet;
  attr.max_rd_atomic = 1;
  return modify(&attr, kMaskState | kMaskTimeout | kMaskRetry | kMaskRnrRetry | kMaskSqPsn | kMaskReads,
                "ready to send");
}

QueuePair::Request& QueuePair::next(int opcode, const Target& to, uint32_t bytes, bool ask) {
  if (n_chain_ == kChain) (void)flush();  // its failure stays, and the next flush() returns it
  Request& r = chain_[n_chain_++];
  r.request = {};
  ++posted_;
  bytes_posted_ += bytes;
  bytes_until_[posted_ % depth_] = bytes_posted_;
  // At least one request in each quarter of the queue asks, or there would be nothing to wait for when it is full.
  if (ask || posted_ - std::max(asked_, completed_) >= std::max(1u, depth_ / 4)) {
    r.request.send_flags = kSendSignaled;
    asked_ = posted_;
  }
  r.request.wr_id = tag(id_, posted_);
  r.request.sg_list = &r.piece;
  r.request.num_sge = bytes > 0 ? 1 : 0;
  r.request.opcode = opcode;
  r.request.wr.rdma.remote_addr = to.address;
  r.request.wr.rdma.rkey = to.key;
  return r;
}

void QueuePair::write(const Target& to, const void* from, uint32_t lkey, uint32_t bytes, bool ask) {
  Request& r = next(kRdmaWrite, to, bytes, ask);
  r.piece = {reinterpret_cast<uint64_t>(from), bytes, lkey};
}

void QueuePair::write_small(const Target& to, const void* from, uint32_t bytes) {
  Request& r = next(kRdmaWrite, to, bytes, false);
  std::memcpy(r.data, from, bytes);
  r.piece = {reinterpret_cast<uint64_t>(r.data), bytes, 0};
  r.request.send_flags |= kSendInline;
}

void QueuePair::read(const Target& from, void* to, uint32_t lkey, uint32_t bytes) {
  Request& r = next(kRdmaRead, from, bytes, true);
  r.piece = {reinterpret_cast<uint64_t>(to), bytes, lkey};
}

Status QueuePair::flush() {
  if (n_chain_ > 0 && failure_.ok()) {
    for (size_t i = 0; i + 1 < n_chain_; ++i) chain_[i].request.next = &chain_[i + 1].request;
    SendRequest* bad = nullptr;
    const int rc = rail_.context()->ops.post_send(pair_, &chain_[0].request, &bad);
    if (rc != 0) {
      failure_ = error(moecclSystemError, "a request is not taken by {} ({}): {}", rail_.info().name(),
                       text_of(rail_.info().gid.gid), std::strerror(rc > 0 ? rc : errno));
    }
  }
  n_chain_ = 0;
  return failure_;
}

void QueuePair::done(uint64_t tag) {
  // The number's upper bits are those of the last posted number.
  uint64_t number = (posted_ & ~kNumberMask) | (tag & kNumberMask);
  if (number > posted_) number -= kNumberMask + 1;
  if (number <= completed_) return;
  completed_ = number;
  bytes_completed_ = bytes_until_[number % depth_];
}

}  // namespace moeccl::transport::verbs
