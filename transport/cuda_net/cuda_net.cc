// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_net/cuda_net.h"

#include "src/base/device_order.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace moeccl::transport::cuda_net {

namespace cuda = driver::cuda;

namespace {

// A large put crosses the bus and the wire in pieces of this size, so that both are busy. At 25 GB/s, copying a piece
// takes 20 us, about as long as starting the copy and noticing its end.
constexpr size_t kPiece = 512 << 10;
constexpr size_t kWordBytes = 256, kWordsBytes = 64 << 10;
constexpr size_t kBlock = size_t{2} << 20;  // an allocation of this size begins on a page and shares none

}  // namespace

Result<std::unique_ptr<CudaNet>> CudaNet::create(const Staging& setting) {
  std::unique_ptr<CudaNet> net(new CudaNet(setting));
  MOECCL_ASSIGN_OR_RETURN(net->words_, cuda::Memory::pinned(setting.context, kWordBytes + kWordsBytes));
  net->host_bounce_.use(net->words_.data() + kWordBytes, kWordsBytes);
  return net;
}

Result<DeviceMemory> CudaNet::device_memory() {
  const size_t bytes = (s_.most_put_bytes + kBlock - 1) / kBlock * kBlock;
  MOECCL_ASSIGN_OR_RETURN(memory_, cuda::Memory::device(s_.context, bytes));
  return DeviceMemory{s_.context, {s_.device_staging, s_.staging_bytes}, {memory_.data(), memory_.bytes()}};
}

Status CudaNet::use(bool direct) {
  direct_ = direct;
  if (!direct) {
    MOECCL_ASSIGN_OR_RETURN(memory_, cuda::Memory::pinned(s_.context, (s_.most_put_bytes + 255) / 256 * 256));
  }
  bounce_.use(memory_.data(), memory_.bytes());
  return {};
}

CudaNet::~CudaNet() = default;

std::unique_ptr<Link> CudaNet::wrap(uint32_t rank, std::unique_ptr<Link> link) {
  auto wrapped = std::make_unique<CudaNetLink>(*this, rank, std::move(link));
  links_.push_back(wrapped.get());
  return wrapped;
}

uint64_t CudaNet::passed() const {
  // Acquire: pairs with the stream's store, which is preceded by a system-wide fence. The sender of the copies made
  // before the store sees their data.
  return load_from_device(std::atomic_ref(*reinterpret_cast<uint64_t*>(words_.data())));
}

Status CudaNet::mark() {
  if (!unmarked_) return {};
  unmarked_ = false;
  return cuda::check(
      cuda::driver()->cuStreamWriteValue64_v2(s_.stream, reinterpret_cast<cuda::Pointer>(words_.data()), ++marked_, 0),
      "a stream's word for the network");
}

Status CudaNet::copy(std::byte* dst, const std::byte* src, size_t bytes, const char* what) {
  return cuda::check(cuda::driver()->cuMemcpyAsync(reinterpret_cast<cuda::Pointer>(dst),
                                                   reinterpret_cast<cuda::Pointer>(src), bytes, s_.stream),
                     what);
}

Status CudaNet::tell_board() {
  board_waits_ = true;
  board_ticket_ = ticket();
  return mark();
}

void CudaNet::board_changed(bool now) {
  // The change is the end of an operation, which the stream has yet to store.
  if (now && board_waits_.load(std::memory_order_relaxed) && !failed()) {
    tell_now_.store(true, std::memory_order_relaxed);
    return;
  }
  inner_->board_changed(now);
}

Result<bool> CudaNet::drained() const {
  if (!status_.ok()) return Status(status_);
  return idle();
}

void CudaNet::progress(uint32_t awaited) {
  if (unmarked_) {
    const cuda::Current current(s_.context);
    if (Status s = mark(); status_.ok()) status_ = std::move(s);
  }
  inner_->progress(awaited);
  if (idle()) return;
  if (failed()) return drop();
  const uint64_t stored = passed();
  for (CudaNetLink* link : waiting_) {
    if (!link->pump(stored)) return drop();
  }
  std::erase_if(waiting_, [](const CudaNetLink* l) { return l->sent_all(); });
  if (board_waits_ && board_ticket_ <= stored) {
    board_waits_ = false;
    inner_->board_changed(tell_now_.exchange(false, std::memory_order_relaxed));
  }
}

void CudaNet::drop() {
  for (CudaNetLink* link : links_) link->drop();
  waiting_.clear();
  leaving_.clear();
  bounce_.give_back_all();
  host_bounce_.give_back_all();
  board_waits_ = false;
}

bool CudaNet::arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) {
  if (s_.device_staging == nullptr || offset >= s_.staging_bytes) return true;
  return arrived_.add(src_rank, offset, std::min(bytes, s_.staging_bytes - offset));
}

std::byte* CudaNet::take(size_t bytes) {
  if (std::byte* const room = bounce_.take(bytes); room != nullptr) return room;
  std::erase_if(leaving_, [](CudaNetLink* l) { return l->reclaim(); });
  return bounce_.take(bytes);
}

Status CudaNet::settle(uint32_t rank, Link& link) {
  if (direct_) return inner_->flush();
  if (OneSidedArrivals* one_sided = link.one_sided(); one_sided != nullptr) MOECCL_TRY(one_sided->catch_up());
  for (const ArrivedRanges::Range& r : arrived_.take(rank)) {
    MOECCL_TRY(copy(s_.device_staging + r.offset, s_.own.staging + r.offset, r.bytes,
                    "a copy of what the network brought to the device"));
  }
  return {};
}

CudaNetLink::CudaNetLink(CudaNet& net, uint32_t rank, std::unique_ptr<Link> link)
    : net_(net),
      rank_(rank),
      link_(std::move(link)),
      name_(std::string(net.direct_ ? "cuda directly over " : "cuda over ") + link_->name()) {
  peer_words_ = {&link_->board(), {&link_->block(0), &link_->block(1)}};
  parts_.rooms = this;
  parts_.device = this;
}

void CudaNetLink::push(const Waiting& w) {
  if (first_ == waiting_.size()) {
    waiting_.clear();
    first_ = 0;
    net_.waiting_.push_back(this);
  }
  waiting_.push_back(w);
}

void CudaNetLink::drop() {
  waiting_.clear();
  first_ = 0;
  leaving_.clear();
  room_ = nullptr;
}

bool CudaNetLink::reclaim() {
  while (!leaving_.empty() && link_->posted_puts()->taken(leaving_.front().first)) {
    net_.bounce_.give_back(leaving_.front().second);
    leaving_.pop_front();
  }
  return leaving_.empty();
}

std::byte* CudaNetLink::room(size_t bytes) {
  if (room_ != nullptr) net_.bounce_.give_back(room_);  // it was packed but not put, and will be packed anew
  return room_ = net_.take(bytes);
}

Result<PutState> CudaNetLink::put(uint64_t offset, const void* src, size_t bytes) {
  MOECCL_TRY(Status(net_.status_));
  const bool packed = src == room_ && src != nullptr;
  if (bytes == 0) return PutState::kDone;
  std::byte* const to = packed ? std::exchange(room_, nullptr) : net_.take(bytes);
  if (to == nullptr) return PutState::kFull;
  for (size_t at = 0; at < bytes;) {
    const size_t n = packed ? bytes : std::min(kPiece, bytes - at);
    const bool last = at + n == bytes;
    if (!packed) {
      MOECCL_TRY(net_.copy(to + at, static_cast<const std::byte*>(src) + at, n, "a copy to memory of the network"));
    }
    push(
        {.ticket = net_.ticket(), .offset = offset + at, .src = to + at, .bytes = n, .give_back = last ? to : nullptr});
    // The stream stores the last piece's number with the signal that follows, or in the next progress().
    if (!last) MOECCL_TRY(net_.mark());
    at += n;
  }
  return PutState::kDone;
}

Result<PutState> CudaNetLink::put_words(uint64_t offset, const void* src, size_t bytes) {
  std::byte* const to = net_.host_bounce_.take(bytes);
  if (to == nullptr) return PutState::kFull;
  std::memcpy(to, src, bytes);
  push({.offset = offset, .src = to, .bytes = bytes, .give_back = to, .words = true});
  return PutState::kDone;
}

Status CudaNetLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  push({.ticket = net_.ticket(), .sig = sig, .number = number, .tag = tag});
  return net_.mark();
}

bool CudaNetLink::pump(uint64_t passed) {
  while (first_ < waiting_.size()) {
    const Waiting& w = waiting_[first_];
    if (w.ticket > passed) return true;
    if (w.src != nullptr) {
      PostedPuts* const posts = net_.direct_ && !w.words ? link_->posted_puts() : nullptr;
      const Result<PutState> state =
          posts != nullptr ? posts->post(w.offset, w.src, w.bytes) : link_->put(w.offset, w.src, w.bytes);
      if (!state.ok()) {
        net_.status_ = state.status();
        return false;
      }
      if (*state != PutState::kDone) return true;
      if (w.give_back != nullptr && posts != nullptr) {
        if (leaving_.empty()) net_.leaving_.push_back(this);
        leaving_.emplace_back(posts->posted(), w.give_back);
      } else if (w.give_back != nullptr) {
        (w.words ? net_.host_bounce_ : net_.bounce_).give_back(w.give_back);
      }
    } else {
      // A failed rank's put is dropped silently, so its signal must not claim that the data arrived.
      if (net_.failed()) return false;
      if (Status s = link_->signal(w.sig, w.number, w.tag); !s.ok()) {
        net_.status_ = std::move(s);
        return false;
      }
    }
    ++first_;
  }
  return true;
}

}  // namespace moeccl::transport::cuda_net
