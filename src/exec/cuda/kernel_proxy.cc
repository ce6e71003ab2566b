// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/kernel_proxy.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "src/base/clock.h"
#include "src/base/device_order.h"
#include "src/base/log.h"
#include "src/base/pause.h"
#include "src/driver/thread.h"

namespace moeccl::exec {

using moeccl::cuda::kNetArrivals;
using moeccl::cuda::kNetCells;
using moeccl::cuda::kNetCommands;
using moeccl::cuda::kNetQueues;
using moeccl::cuda::kWalkEntries;
using moeccl::cuda::kWalkSigs;
using moeccl::cuda::NetCommand;
using moeccl::cuda::WalkArrival;
using moeccl::cuda::WalkArrivals;
using moeccl::cuda::WalkCommand;
using moeccl::cuda::WalkEntry;
using moeccl::cuda::WalkHeader;
using moeccl::cuda::WalkQueue;
using moeccl::cuda::WalkSplit;
using transport::kSigsPerPeer;

namespace {

// A cell crosses the bus and is given to the network as one piece: at 25 GB/s, 64 KiB take 3 us, about as long as the
// flags around it. A cell is at most a sixteenth of an operation's staging, so that little staging means little memory.
constexpr uint64_t kMostCell = 64 << 10, kLeastCell = 4 << 10;
// Signals in addition to the plans' own: how many operations a rank has ended on the device, and how many it has
// launched (the tag) and ended (the number) outside of graphs.
constexpr uint32_t kDoneSig = 8, kProgressSig = 9;
static_assert(kDoneSig >= kWalkSigs && kProgressSig < kSigsPerPeer);
constexpr int64_t kSpin_ns = 50'000, kYield_ns = 2'000'000, kAwake_ns = 10'000'000, kFarewell_ns = 1'000'000'000;

size_t lines(size_t bytes) { return (bytes + 255) / 256 * 256; }

std::atomic_ref<uint64_t> atomic(const uint64_t& word) { return std::atomic_ref(const_cast<uint64_t&>(word)); }

}  // namespace

Result<std::unique_ptr<KernelProxy>> KernelProxy::create(const Rank& rank) {
  std::unique_ptr<KernelProxy> p(new KernelProxy(rank));
  const size_t n = rank.n_ranks;
  p->cell_bytes_ = std::clamp(rank.half_bytes / 16 / 4096 * 4096, kLeastCell, kMostCell);
  size_t used = lines(sizeof(transport::Board));
  const auto place = [&](size_t& at, size_t bytes) {
    at = used;
    used += lines(bytes);
  };
  place(p->signals_at_, n * kSigsPerPeer * sizeof(transport::SignalLine));
  place(p->blocks_at_, n * sizeof(transport::BlockWord));
  place(p->queues_at_, kNetQueues * sizeof(WalkQueue));
  place(p->arrivals_at_, sizeof(WalkArrivals));
  p->mirror_bytes_ = lines(sizeof(WalkHeader) + kWalkEntries * n * sizeof(WalkSplit));
  place(p->mirrors_at_, n * p->mirror_bytes_);
  place(p->cells_at_, size_t{kNetQueues} * kNetCells * p->cell_bytes_);
  place(p->staging_at_, p->record_at(rank.n_ranks, 0));
  MOECCL_ASSIGN_OR_RETURN(p->pinned_, driver::cuda::Memory::pinned(rank.context, used));
  std::memset(static_cast<void*>(p->pinned_.data()), 0, p->cells_at_);  // flags begin at 0
  p->seen_.resize(n * kSigsPerPeer);
  p->done_.resize(n);
  return p;
}

KernelProxy::~KernelProxy() {
  if (process_.forked()) {
    // The thread is the parent's, so its handle can be neither joined nor destroyed here.
    new std::thread(std::move(thread_));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  engine_ = nullptr;  // it may still be sending from the cells
}

transport::LocalMemory KernelProxy::memory() {
  std::byte* base = pinned_.data();
  auto* blocks = reinterpret_cast<transport::BlockWord*>(base + blocks_at_);
  transport::LocalMemory m;
  m.rank = s_.rank;
  m.board = reinterpret_cast<transport::Board*>(base);
  m.signals = reinterpret_cast<transport::SignalLine*>(base + signals_at_);
  m.blocks[0] = m.blocks[1] = blocks;
  m.staging = base + staging_at_;
  m.staging_bytes = record_at(s_.n_ranks, 0);
  m.arrivals = this;
  return m;
}

Status KernelProxy::start(std::vector<std::unique_ptr<transport::Link>> links,
                          std::unique_ptr<transport::Engine> engine) {
  links_ = std::move(links);
  engine_ = std::move(engine);
  MOECCL_ASSIGN_OR_RETURN(
      thread_, driver::start_thread("moeccl-walk", [this] {
        const Status ran = contained([&] { return run(), Status(); });
        if (ran.ok()) return;
        engine_->end();  // its thread drives again; operations that were served here end at their deadline
        log(LogLevel::kError, "the network's side of CUDA kernels: {}", ran.message());
      }));
  return {};
}

moeccl::cuda::WalkNet KernelProxy::net() const {
  std::byte* base = pinned_.data();
  moeccl::cuda::WalkNet net{};
  net.queues = &queue(0);
  net.cells = reinterpret_cast<uint8_t*>(base + cells_at_);
  net.arrivals = reinterpret_cast<WalkArrivals*>(base + arrivals_at_);
  net.staging = reinterpret_cast<const uint8_t*>(base + staging_at_);
  net.cell_bytes = static_cast<uint32_t>(cell_bytes_);
  return net;
}

moeccl::cuda::WalkPeer KernelProxy::peer(uint32_t rank) const {
  std::byte* mirror = pinned_.data() + mirrors_at_ + rank * mirror_bytes_;
  return {reinterpret_cast<WalkHeader*>(mirror), reinterpret_cast<uint8_t*>(pinned_.data() + staging_at_),
          reinterpret_cast<WalkSplit*>(mirror + sizeof(WalkHeader))};
}

WalkQueue& KernelProxy::queue(uint32_t i) const { return reinterpret_cast<WalkQueue*>(pinned_.data() + queues_at_)[i]; }
std::byte* KernelProxy::cell(uint32_t queue, uint32_t i) const {
  return pinned_.data() + cells_at_ + (size_t{queue} * kNetCells + i) * cell_bytes_;
}
const std::atomic<uint64_t>& KernelProxy::word(uint32_t rank, uint32_t sig) const {
  const auto* signals = reinterpret_cast<const transport::SignalLine*>(pinned_.data() + signals_at_);
  return signals[size_t{rank} * kSigsPerPeer + sig].word;
}

void KernelProxy::wake() {
  if (!asleep_.load()) return;
  { const std::lock_guard lock(mutex_); }
  changed_.notify_all();
}
void KernelProxy::captured() {
  captured_ = true;
  wake();
}

bool KernelProxy::has_launched(uint32_t rank, uint64_t number) const {
  const uint64_t told = load_from_device(word(rank, kProgressSig));
  return static_cast<int32_t>(static_cast<uint32_t>(told >> 32) - static_cast<uint32_t>(number)) >= 0;
}
bool KernelProxy::has_ended(uint32_t rank, uint64_t number) const {
  const uint64_t told = load_from_device(word(rank, kProgressSig));
  return static_cast<int32_t>(static_cast<uint32_t>(told) - static_cast<uint32_t>(number)) >= 0;
}

// Outgoing.

bool KernelProxy::put(uint32_t rank, uint64_t offset, const std::byte* src, size_t bytes) {
  const Result<transport::PutState> state = links_[rank]->put(offset, src, bytes);
  // A lost rank misses what it does not receive. Ranks that need it hear of its loss from the fabric's links.
  return !state.ok() || *state == transport::PutState::kDone;
}

bool KernelProxy::send_one(uint32_t i, const WalkCommand& c) {
  switch (static_cast<NetCommand>(c.kind)) {
    case NetCommand::kPut:
      return put(c.peer, c.offset, cell(i, c.cell), c.bytes);
    case NetCommand::kSignal:
      (void)links_[c.peer]->signal(c.sig, c.number, c.tag);
      return true;
    case NetCommand::kDone:
      for (const auto& link : links_)
        if (link != nullptr) (void)link->signal(kDoneSig, static_cast<uint32_t>(c.offset), 0);
      return true;
    case NetCommand::kEnter:
      break;
  }
  const auto* entry = reinterpret_cast<const WalkEntry*>(cell(i, c.cell));
  const auto* splits = reinterpret_cast<const WalkSplit*>(entry + 1);
  for (; open_.next < links_.size(); ++open_.next) {
    if (links_[open_.next] == nullptr) continue;
    open_.record = {*entry, c.bytes > 0 ? splits[open_.next] : WalkSplit{}};
    const auto* record = reinterpret_cast<const std::byte*>(&open_.record);
    if (!put(open_.next, record_at(s_.rank, entry->seq), record, sizeof(Record))) return false;
  }
  open_.next = 0;
  // A one-sided link tells the peer of puts with its next signal. Where operations begin with a comparison, none comes
  // before the peer has seen the entry, so this repeats the last one, which says nothing new.
  for (const auto& link : links_)
    if (link != nullptr && link->one_sided() != nullptr)
      (void)link->signal(kProgressSig, static_cast<uint32_t>(told_ended_), static_cast<uint32_t>(told_launched_));
  return true;
}

bool KernelProxy::send(uint32_t i, uint64_t head, bool& moved) {
  WalkQueue& q = queue(i);
  for (uint64_t tail = q.tail; tail < head; ++tail) {
    const WalkCommand& c = q.commands[tail % kNetCommands];
    begun_[i] = true;
    if (!send_one(i, c)) return false;
    begun_[i] = false;
    const auto kind = static_cast<NetCommand>(c.kind);
    moved = true;
    // Release: both pair with acquires in walk_net.cuh, walk_net_cell() and walk_net_give().
    if (kind == NetCommand::kPut || kind == NetCommand::kEnter) store_to_device(atomic(q.freed), q.freed + 1);
    store_to_device(atomic(q.tail), tail + 1);
  }
  return true;
}

bool KernelProxy::given_all() const {
  for (uint32_t i = 0; i < kNetQueues; ++i)
    if (load_from_device(atomic(queue(i).head)) != queue(i).tail) return false;
  return true;
}

bool KernelProxy::tell() {
  // Acquire: pairs with the release in walk_leave() on the device; everything that it gave before is seen below.
  const uint64_t ended = load_from_device(s_.own->progress.walked);
  const uint64_t launched = s_.own->progress.walks_called.load(std::memory_order_acquire);
  if ((ended == told_ended_ && launched == told_launched_) || !given_all()) return false;
  told_ended_ = ended;
  told_launched_ = launched;
  for (const auto& link : links_) {
    if (link != nullptr)
      (void)link->signal(kProgressSig, static_cast<uint32_t>(ended), static_cast<uint32_t>(launched));
  }
  return true;
}

// Incoming.

bool KernelProxy::arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) {
  if (offset < staging_bytes()) {
    return bytes <= staging_bytes() - offset && ranges_.add(src_rank, offset, bytes);
  }
  // A record: the kernel recognises it by its number, which is written last.
  const uint64_t first = record_at(src_rank, 0);
  if (offset < first || (offset - first) % sizeof(Record) != 0 || bytes != sizeof(Record)) return false;
  const uint64_t slot = (offset - first) / sizeof(Record);
  if (slot >= kWalkEntries) return false;
  Record record;
  std::memcpy(&record, pinned_.data() + staging_at_ + offset, sizeof(record));
  const moeccl::cuda::WalkPeer mirror = peer(src_rank);
  WalkEntry& e = mirror.header->entries[slot];
  WalkSplit& split = mirror.splits[slot * s_.n_ranks + s_.rank];
  const auto relaxed = [](uint64_t& to, uint64_t value) { atomic(to).store(value, std::memory_order_relaxed); };
  relaxed(e.history, record.entry.history);
  relaxed(e.signature, record.entry.signature);
  relaxed(e.count, record.entry.count);
  relaxed(e.plan, record.entry.plan);
  relaxed(e.largest, record.entry.largest);
  relaxed(split.sends, record.split.sends);
  relaxed(split.expects, record.split.expects);
  // Release: pairs with the acquire in walk_differs(), walk_fail() and walk_splits_compare() on the device.
  store_to_device(atomic(e.seq), record.entry.seq);
  return true;
}

bool KernelProxy::collect() {
  if (waiting_from_ < waiting_.size()) return false;  // the kernel has not taken the earlier arrivals
  waiting_.clear();
  waiting_from_ = 0;
  std::vector<WalkArrival>& flags = flags_;
  for (uint32_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr) continue;
    flags.clear();
    for (uint32_t sig = 0; sig <= kDoneSig; ++sig) {
      uint64_t& seen = seen_[size_t{p} * kSigsPerPeer + sig];
      // Acquire: pairs with the release in transport::tcp; everything that was put before has arrived.
      const uint64_t now = load_from_device(word(p, sig));
      if (now == seen) continue;
      seen = now;
      if (sig < kDoneSig) {
        flags.push_back({now, 0, s_.n_ranks + p * kWalkSigs + sig});
        continue;
      }
      done_[p] += static_cast<uint32_t>(now) - static_cast<uint32_t>(done_[p]);
      flags.push_back({done_[p], 0, p});
    }
    // Entries come without a signal that is looked at here. A failed link brings nothing more; the operation hears of
    // the failure from its own links.
    auto* const one_sided = links_[p]->one_sided();
    if (one_sided != nullptr && !one_sided->catch_up().ok()) continue;
    if (flags.empty()) continue;
    for (const auto& r : ranges_.take(p)) waiting_.push_back({r.offset, static_cast<uint32_t>(r.bytes), 0});
    waiting_.insert(waiting_.end(), flags.begin(), flags.end());
  }
  return !waiting_.empty();
}

bool KernelProxy::deliver() {
  auto& arrivals = *reinterpret_cast<WalkArrivals*>(pinned_.data() + arrivals_at_);
  uint64_t head = arrivals.head;
  // Acquire: pairs with the release in walk_net_raise() on the device.
  const uint64_t room = kNetArrivals - (head - load_from_device(atomic(arrivals.tail)));
  const size_t n = std::min<size_t>(room, waiting_.size() - waiting_from_);
  if (n == 0) return false;
  for (size_t i = 0; i < n; ++i) arrivals.ring[head++ % kNetArrivals] = waiting_[waiting_from_++];
  // Release: pairs with the acquire in walk_net_look() on the device.
  store_to_device(atomic(arrivals.head), head);
  return true;
}

// The thread.

bool KernelProxy::turn() {
  engine_->progress();
  uint64_t heads[kNetQueues];
  bool moved = false;
  // The operation's own queue is read last and sent first: what a lane gave came after this rank's entry, and must do
  // so at the peers too. Acquire: pairs with the release in walk_net_give() on the device.
  for (uint32_t i = 0; i < kNetQueues; ++i) heads[i] = load_from_device(atomic(queue(i).head));
  const bool entered = send(kNetQueues - 1, heads[kNetQueues - 1], moved);
  // A command that was tried before belongs to an operation that has entered. It goes on in any case: a link with an
  // open put takes nothing else, not even the next operation's entry.
  for (uint32_t i = 0; i + 1 < kNetQueues; ++i)
    if (entered || begun_[i]) (void)send(i, entered ? heads[i] : queue(i).tail + 1, moved);
  moved = tell() || moved;
  moved = collect() || moved;
  return deliver() || moved;
}

// Other threads may need the core, and a program that computes for long must not pay for this thread.
void KernelProxy::rest(int64_t idle_ns) {
  if (idle_ns < kSpin_ns) {
    pause_core();
    return;
  }
  if (idle_ns < kYield_ns) {
    sched_yield();
    return;
  }
  const auto nothing_runs = [&] {
    return !captured_ && !stop_ && s_.own->progress.walks_called.load() == told_launched_ &&
           told_launched_ == told_ended_;
  };
  if (idle_ns < kAwake_ns || !nothing_runs()) return driver::sleep_ns(50'000);
  engine_->end();  // its own thread handles what arrives early
  {
    std::unique_lock lock(mutex_);
    asleep_ = true;
    changed_.wait_for(lock, std::chrono::milliseconds(20), [&] { return !nothing_runs(); });
    asleep_ = false;
  }
  engine_->begin();
}

void KernelProxy::run() {
  engine_->begin();
  int64_t moved_at = now_ns(), stopped_at = 0;
  while (true) {
    if (stop_) {
      if (stopped_at == 0) stopped_at = now_ns();
      if ((given_all() && !tell()) || now_ns() - stopped_at > kFarewell_ns) break;
    }
    const bool moved = turn();
    const int64_t now = now_ns();
    if (moved)
      moved_at = now;
    else
      rest(now - moved_at);
  }
  engine_->end();
}

}  // namespace moeccl::exec
