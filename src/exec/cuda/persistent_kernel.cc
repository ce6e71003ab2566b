// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/persistent_kernel.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/cuda/tables_args.h"
#include "src/base/clock.h"
#include "src/base/device_order.h"
#include "src/base/hash.h"
#include "src/driver/thread.h"
#include "src/exec/cuda/urgent_stream.h"
#include "src/exec/cuda/walk_failure.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;
using moeccl::cuda::WalkArgs;
using moeccl::cuda::WalkHeader;
using moeccl::cuda::WalkPeer;
using moeccl::cuda::WalkReport;

namespace {

constexpr size_t kPinnedBytes = 1u << 20;
constexpr uint32_t kThreads = 256;
constexpr unsigned kExternal = 1;  // CU_EVENT_WAIT_EXTERNAL, CU_EVENT_RECORD_EXTERNAL: a node of the graph
// In page-locked memory, behind the report.
constexpr size_t kUploadedAt = (sizeof(WalkReport) + 63) / 64 * 64, kMessagesEndedAt = kUploadedAt + 64;
// A graph keeps forever what it captured, so it is worth waiting once per program for the copy on the device. The copy
// takes some 20 us unless the device's channel is held up.
constexpr int64_t kCapturedUpload_ns = 100'000'000;
// One block is worthwhile for this much of the message, as in stream_engine.cc.
constexpr uint64_t kBlockBytes = uint64_t{kThreads} * 64;

// Returns the lowest rank of this process.
uint32_t head_of(const Fabric& f) {
  for (uint32_t r = 0; r < f.rank; ++r)
    if (f.link(r).view().same_process) return r;
  return f.rank;
}

bool beside_others(const Fabric& f) {
  for (uint32_t r = 0; r < f.n_ranks; ++r)
    if (r != f.rank && f.link(r).view().same_process) return true;
  return false;
}

moeccl::cuda::ScalarBits bits(const kernels::Scalar& s) {
  moeccl::cuda::ScalarBits b{};
  b.u64 = s.u64;
  return b;
}

}  // namespace

Result<std::unique_ptr<PersistentKernel>> PersistentKernel::create(StreamEngine& engine, const Setting& setting) {
  std::unique_ptr<PersistentKernel> w(new PersistentKernel(engine));
  const cuda::Current current(engine.context());
  w->n_ranks_ = setting.n_ranks;
  w->half_bytes_ = setting.half_bytes / 256 * 256;
  w->most_blocks_ = setting.most_blocks;
  w->message_area_ = setting.message_area;
  w->graph_mixing_ = setting.graph_mixing;
  constexpr size_t kCounts = (1 + moeccl::cuda::kMessageChannels) * sizeof(uint32_t);
  const size_t bytes = w->left_at() + kCounts;
  MOECCL_ASSIGN_OR_RETURN(w->memory_, PeerMemory::create(engine.context(), {bytes, setting.for_processes ? bytes : 0}));
  MOECCL_ASSIGN_OR_RETURN(w->pinned_, cuda::Memory::pinned(engine.context(), kPinnedBytes));
  MOECCL_ASSIGN_OR_RETURN(w->programs_, cuda::Memory::device(engine.context(), kPinnedBytes));
  w->programs_from_ = w->used_ =
      (kMessagesEndedAt + (2 + 2 * size_t{setting.n_ranks}) * sizeof(uint64_t) + 63) / 64 * 64;
  MOECCL_ASSIGN_OR_RETURN(w->upload_stream_, create_urgent_stream(engine.context()));
  if (setting.message_area > 0) {
    MOECCL_ASSIGN_OR_RETURN(w->message_stream_, create_urgent_stream(engine.context()));
  }
  MOECCL_ASSIGN_OR_RETURN(w->watch_, DeviceWatch::of(engine.context()));
  std::vector<cuda::EventOwner*> events{&w->event_, &w->replayed_};
  for (Capture& c : w->captures_) events.push_back(&c.last);
  for (cuda::EventOwner* event : events) {
    MOECCL_ASSIGN_OR_RETURN(*event, cuda::make_event());
  }
  // A graph may be replayed, and wait for both, before any launch or replay has ended.
  for (const cuda::EventOwner* event : {&w->event_, &w->replayed_})
    MOECCL_TRY(cuda::check(cuda::driver()->cuEventRecord(event->get(), w->upload_stream_.get()), "a CUDA event"));
  return w;
}

PersistentKernel::~PersistentKernel() {
  // A kernel that still waits for a peer ends now, which frees its stream. This comes before the calls of the driver
  // below: some may not return until the kernel has ended, if another thread frees memory.
  if (pinned_.data() != nullptr) stop();
  if (watch_ != nullptr) watch_->forget(event_.get());
  const cuda::Current current(engine_.context());
  upload_stream_ = nullptr;
  message_stream_ = nullptr;
  for (const cuda::EventOwner* event : {&event_, &replayed_})
    while (*event != nullptr && cuda::driver()->cuEventQuery(event->get()) == cuda::kNotReady) driver::sleep_ns(50'000);
  proxy_ = nullptr;
}

Status PersistentKernel::connect(Fabric& fabric, std::span<std::byte* const> memories,
                                 std::unique_ptr<KernelProxy> proxy, std::unique_ptr<KernelMessages> messages) {
  fabric_ = &fabric;
  proxy_ = std::move(proxy);
  messages_ = std::move(messages);
  memory_.join(memories[head_of(fabric)]);
  const cuda::Current current(engine_.context());
  std::vector<WalkPeer> peers;
  for (uint32_t r = 0; r < n_ranks_; ++r) {
    if (elsewhere(r)) {
      peers.push_back(proxy_->peer(r));
      continue;
    }
    std::byte* m = memories[r];
    peers.push_back({reinterpret_cast<WalkHeader*>(m),
                     reinterpret_cast<uint8_t*>(m + moeccl::cuda::walk_header_bytes(n_ranks_)),
                     reinterpret_cast<moeccl::cuda::WalkSplit*>(m + splits_at())});
  }
  const auto store = [&](size_t at, const auto& table) {
    return cuda::copy(memory_.data() + at, table.data(), table.size() * sizeof(table[0]), engine_.stream(),
                      "the table of peers to the device");
  };
  MOECCL_TRY(store(peers_at(), peers));
  std::vector<moeccl::cuda::MessagePair> pairs;
  if (messages_ != nullptr) {
    MOECCL_TRY(messages_->prepare(engine_.context()));
    std::vector<std::byte*> areas(memories.begin(), memories.end());
    for (std::byte*& m : areas) m = m == nullptr ? nullptr : m + area_at();
    pairs = messages_->pairs(areas);
    MOECCL_TRY(store(pairs_at(), pairs));
  }
  return engine_.synchronize();
}

bool PersistentKernel::idle() const {
  return load_from_device(fabric_->own->board().progress.walked) == launched() &&
         messages_ended() == messages_launched_.load(std::memory_order_acquire);
}

bool PersistentKernel::waits_for(uint32_t peer) const {
  if (has_captured()) return true;
  const uint64_t last = launched();
  return load_from_device(fabric_->own->board().progress.walked) < last && !has_ended(peer, last);
}

bool PersistentKernel::has_launched(uint32_t peer, uint64_t number) const {
  if (elsewhere(peer)) return proxy_->has_launched(peer, number);
  return load_from_device(fabric_->link(peer).board().progress.walks_called) >= number;
}
bool PersistentKernel::has_ended(uint32_t peer, uint64_t number) const {
  if (elsewhere(peer)) return proxy_->has_ended(peer, number);
  return load_from_device(fabric_->link(peer).board().progress.walked) >= number;
}

// Programs are placed in page-locked memory, so that a new one can run at once, even in a capture. Soon afterwards they
// are also on the device, where blocks read them without crossing the bus three times in turn. There are few programs,
// because what differs between counts is passed in the launch. When the memory is full, all programs are dropped once
// nothing runs, unless a graph has captured one.
Result<PersistentKernel::Placed*> PersistentKernel::place(const Operation& op) {
  const uint64_t key = op.choice.program_hash;
  if (const auto it = known_.find(key); key != 0 && it != known_.end()) return it->second;
  MOECCL_ASSIGN_OR_RETURN(const KernelProgram program, compile_kernel_program(*op.choice.program));
  std::vector<std::byte> image(program.bytes());
  const KernelProgram::Offsets at = program.write(image.data());
  const uint64_t content = hash_bytes(image);
  auto it = placed_.find(content);
  if (it == placed_.end()) {
    const bool graphs = std::any_of(placed_.begin(), placed_.end(), [](const auto& p) { return p.second.captured; });
    if (used_ + image.size() > pinned_.bytes() && !graphs && idle()) {
      placed_.clear();
      known_.clear();
      used_ = programs_from_;
    }
    if (used_ + image.size() > pinned_.bytes()) {
      return error(moecclOutOfMemory,
                   "the {} bytes for programs of the persistent kernel are full: synchronise the streams now and then, "
                   "or set MOECCL_CUDA_PERSISTENT=0",
                   pinned_.bytes());
    }
    std::byte* base = pinned_.data() + used_;
    std::memcpy(base, image.data(), image.size());
    MOECCL_TRY(upload(base, image.size()));
    used_ += (image.size() + 63) / 64 * 64;
    Placed p;
    p.program = {};
    p.upload = uploads_;
    p.program.lanes = reinterpret_cast<const moeccl::cuda::WalkLane*>(base + at.lanes);
    p.program.steps = reinterpret_cast<const moeccl::cuda::WalkStep*>(base + at.steps);
    p.program.refs = reinterpret_cast<const moeccl::cuda::WalkRef*>(base + at.refs);
    p.program.totals = reinterpret_cast<const moeccl::cuda::WalkTotal*>(base + at.totals);
    p.program.n_lanes = static_cast<uint32_t>(program.lanes.size());
    p.program.n_steps = static_cast<uint32_t>(program.steps.size());
    p.program.n_refs = static_cast<uint32_t>(program.refs.size());
    p.program.n_totals = static_cast<uint32_t>(program.totals.size());
    it = placed_.emplace(content, p).first;
  }
  if (key != 0) known_.emplace(key, &it->second);
  return &it->second;
}

// Uses a separate stream, for which nothing waits, even while another is being captured. The stream is urgent: in a
// hardware channel shared with a caller's stream, the program would arrive after what that stream waits for.
Status PersistentKernel::upload(std::byte* at, size_t bytes) {
  MOECCL_TRY(
      cuda::copy(programs_.data() + (at - pinned_.data()), at, bytes, upload_stream_.get(), "a program to the device"));
  // Everything that the stream did before is visible to all before the number is. uploaded() is read with acquire
  // before the launch that reads the copy.
  const auto number = reinterpret_cast<cuda::Pointer>(&uploaded());
  return cuda::check(cuda::driver()->cuStreamWriteValue64_v2(upload_stream_.get(), number, ++uploads_, 0),
                     "a program to the device");
}

const std::atomic<uint64_t>& PersistentKernel::uploaded() const {
  return *reinterpret_cast<const std::atomic<uint64_t>*>(pinned_.data() + kUploadedAt);
}

// Uses the copy of the program on the device once it is there.
WalkArgs PersistentKernel::program_of(const Placed& placed, bool captured) const {
  WalkArgs a = placed.program;
  const auto there = [&] { return load_from_device(uploaded()) >= placed.upload; };
  if (captured && !there()) {
    const int64_t until = now_ns() + kCapturedUpload_ns;
    while (!there() && now_ns() < until) driver::sleep_ns(10'000);
  }
  if (!there()) return a;
  const auto move = [&](auto*& part) {
    const auto offset = reinterpret_cast<const std::byte*>(part) - pinned_.data();
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(programs_.data() + offset);
  };
  move(a.lanes);
  move(a.steps);
  move(a.refs);
  move(a.totals);
  return a;
}

// Sets the arguments that all launches have in common.
void PersistentKernel::fill(const Operation& op, WalkArgs& a) const {
  const Choice& choice = op.choice;
  a.header = reinterpret_cast<WalkHeader*>(memory_.data());
  a.peers = reinterpret_cast<const WalkPeer*>(memory_.data() + peers_at());
  if (proxy_ != nullptr) {
    a.net = proxy_->net();
    a.net.state = reinterpret_cast<moeccl::cuda::WalkNetState*>(memory_.data() + net_at());
  }
  a.report = &report();
  a.rank = fabric_->rank;
  a.n_ranks = n_ranks_;
  a.signature = pack(op.signature, 0);
  a.count = op.binding.count;
  a.plan = op.signature.plan;
  a.input = op.input;
  a.output = op.output;
  a.chunk = choice.chunking.chunk;
  a.n_chunks = choice.chunking.n_chunks;
  a.slot_elements = op.binding.slot_elements > 0
                        ? op.binding.slot_elements
                        : (choice.chunking.chunk * op.element_bytes + 63) / 64 * 64 / op.element_bytes;
  a.half_bytes = half_bytes_;
  a.timeout_ns = static_cast<uint64_t>(fabric_->timeout_ms) * 1'000'000;
  a.depth = choice.program->depth;
  a.n_slots = choice.program->n_slots;
  a.n_part_slots = choice.program->n_part_slots;
  a.element_bytes = static_cast<uint32_t>(op.element_bytes);
  a.part_slot_elements = plan::part_range(a.slot_elements, a.element_bytes, 0, choice.program->slot_parts).length;
  a.op = static_cast<uint32_t>(op.reduce);
  a.divisor = op.divisor;
  a.scaled = op.scaled;
  a.scale = bits(op.scale);
  a.scale_at = op.scale_at;
  a.unit = bits(unit_scale(op.signature.type));
}

namespace {

// Returns roughly how many bytes an operation moves on this rank; its blocks share them.
uint64_t work_of(const Operation& op, uint32_t n_ranks, bool captured) {
  if (op.rows.tables != nullptr) return captured ? op.rows.most_bytes : op.rows.bytes;
  if (op.signature.op == moecclOpAllToAllv) {
    const uint64_t sent = std::reduce(op.send_counts.begin(), op.send_counts.end());
    return std::max(sent, std::reduce(op.recv_counts.begin(), op.recv_counts.end())) * op.element_bytes;
  }
  const uint32_t blocks =
      std::max(plan::in_blocks(op.signature.op, n_ranks), plan::out_blocks(op.signature.op, n_ranks));
  return op.binding.count * op.element_bytes * blocks;
}

moeccl::cuda::WalkRowsArgs with_rows(const Operation& op, const WalkArgs& walk) {
  moeccl::cuda::WalkRowsArgs a{};
  a.walk = walk;
  a.tables = op.rows.tables;
  a.dispatch = op.signature.op == moecclOpDispatch;
  a.weighted = op.rows.weighted;
  a.grouped = op.grouped;
  a.type = static_cast<uint32_t>(op.signature.type);
  a.scale_bytes = op.scales.bytes;
  a.row_elements = static_cast<uint32_t>((op.element_bytes - op.scales.bytes) / moecclTypeSize(op.signature.type));
  a.input_scales = op.scales.input;
  a.output_scales = op.scales.output;
  return a;
}

moeccl::cuda::WalkSplitsArgs with_splits(const Operation& op, const WalkArgs& walk) {
  moeccl::cuda::WalkSplitsArgs a{};
  a.walk = walk;
  const auto copy = [&](const std::vector<uint64_t>& from, uint64_t* to) {
    std::copy(from.begin(), from.end(), to);  // n_ranks is at most kMaxSources: world/kernel_side has checked this
  };
  copy(op.send_counts, a.send_counts);
  copy(op.send_displs, a.send_displs);
  copy(op.recv_counts, a.recv_counts);
  copy(op.recv_displs, a.recv_displs);
  for (const auto* counts : {&op.send_counts, &op.recv_counts})
    for (const uint64_t c : *counts) a.largest = std::max(a.largest, c);
  return a;
}

}  // namespace

Status PersistentKernel::start(const Operation& op, const WalkArgs& a, cuda::Stream stream) const {
  const uint32_t lanes = lanes_of(a);
  const uint64_t team =
      std::clamp<uint64_t>(work_of(op, n_ranks_, a.completed == nullptr) / kBlockBytes, 1, most_blocks_ / lanes);
  const auto launch_kernel = [&](cuda::Function kernel, const void* args) {
    void* parameters[] = {const_cast<void*>(args)};
    return cuda::check(cuda::driver()->cuLaunchKernel(kernel, static_cast<unsigned>(team) * lanes, 1, 1, kThreads, 1, 1,
                                                      0, stream, parameters, nullptr),
                       "launching the persistent kernel");
  };
  if (op.rows.tables != nullptr) {
    const auto rows = with_rows(op, a);
    return launch_kernel(engine_.function("moeccl_walk_rows"), &rows);
  }
  if (op.signature.op == moecclOpAllToAllv) {
    const auto splits = with_splits(op, a);
    return launch_kernel(engine_.function("moeccl_walk_splits"), &splits);
  }
  return launch_kernel(
      engine_.function("moeccl_walk", plan::reduces(op.signature.op) ? op.signature.type : moecclUint8), &a);
}

// Streams that a capture has forked would run their operations in any order, and ranks must not differ in it. Returns
// the driver's number of the stream's capture. The first operation of a capture makes each replay wait for what was
// launched or replayed before it, unless the program has said that it orders them itself.
Result<uint64_t> PersistentKernel::follow_captured(cuda::Stream stream) {
  const cuda::Driver& d = *cuda::driver();
  int capturing = 0;
  uint64_t id = 0;
  MOECCL_TRY(cuda::check(d.cuStreamGetCaptureInfo_v2(stream, &capturing, &id, nullptr, nullptr, nullptr),
                         "the capture of a CUDA stream"));
  if (id == 0) return id;  // the capture has failed
  constexpr const char* kWhat = "the order of operations in a graph";
  for (const Capture& c : captures_) {
    if (c.id != id) continue;
    MOECCL_TRY(cuda::check(d.cuStreamWaitEvent(stream, c.last.get(), 0), kWhat));
    return id;
  }
  if (!graph_mixing_) return id;
  for (const cuda::EventOwner* event : {&event_, &replayed_})
    MOECCL_TRY(cuda::check(d.cuStreamWaitEvent(stream, event->get(), kExternal), kWhat));
  return id;
}

Status PersistentKernel::note_captured(cuda::Stream stream, uint64_t capture) {
  auto* c = std::find_if(captures_.begin(), captures_.end() - 1, [&](const Capture& x) { return x.id == capture; });
  c->id = 0;
  const cuda::Driver& d = *cuda::driver();
  constexpr const char* kWhat = "the order of operations in a graph";
  if (graph_mixing_) MOECCL_TRY(cuda::check(d.cuEventRecordWithFlags(replayed_.get(), stream, kExternal), kWhat));
  MOECCL_TRY(cuda::check(d.cuEventRecord(c->last.get(), stream), kWhat));
  c->id = capture;
  std::rotate(captures_.begin(), c, c + 1);
  return {};
}

Status PersistentKernel::launch(const Operation& op, cuda::Stream stream, uint64_t* number) {
  const cuda::Current current(engine_.context());
  const std::lock_guard lock(mutex_);
  MOECCL_ASSIGN_OR_RETURN(Placed * placed, place(op));
  WalkArgs a = program_of(*placed, number == nullptr);
  fill(op, a);
  const uint64_t next = number == nullptr ? 0 : launched() + 1;
  if (number != nullptr) {
    transport::Board& board = fabric_->own->board();
    a.completed = reinterpret_cast<uint64_t*>(&board.progress.walked);
    a.took_ns = reinterpret_cast<uint64_t*>(&board.walks.ns[next % transport::kWalkTimes]);
    a.number = next;
  }
  MOECCL_ASSIGN_OR_RETURN(const uint64_t capture, before_launch(stream, next));
  MOECCL_TRY(start(op, a, stream));
  if (number == nullptr) {
    placed->captured = true;
    if (proxy_ != nullptr) proxy_->captured();
    return after_launch(stream, 0, capture);
  }
  *number = next;
  launched_.store(next, std::memory_order_release);
  fabric_->own->board().progress.walks_called.store(next);
  if (proxy_ != nullptr) proxy_->wake();
  return after_launch(stream, next, 0);
}

Status PersistentKernel::launch(std::span<const Message> messages, cuda::Stream stream, uint64_t* number) {
  const cuda::Current current(engine_.context());
  const std::lock_guard lock(mutex_);
  const uint64_t next = number == nullptr ? 0 : messages_launched_ + 1;
  moeccl::cuda::MessagesArgs a{};
  MOECCL_ASSIGN_OR_RETURN(const uint32_t n_works,
                          messages_->fill(messages, engine_.context(), next, messages_ended(), a));
  a.header = reinterpret_cast<WalkHeader*>(memory_.data());
  a.report = &report();
  a.pairs = reinterpret_cast<const moeccl::cuda::MessagePair*>(memory_.data() + pairs_at());
  a.left = reinterpret_cast<uint32_t*>(memory_.data() + left_at());
  a.timeout_ns = static_cast<uint64_t>(fabric_->timeout_ms) * 1'000'000;
  if (number != nullptr) {
    a.ended = reinterpret_cast<uint64_t*>(pinned_.data() + kMessagesEndedAt);
    a.begun = a.ended + 1;
    a.channel_ended = a.ended + 2;
    a.number = next;
  }
  MOECCL_ASSIGN_OR_RETURN(const uint64_t capture, before_launch(stream, next));
  void* parameters[] = {&a};
  const unsigned blocks = std::clamp(n_works, 1u, most_blocks_);
  MOECCL_TRY(cuda::check(cuda::driver()->cuLaunchKernel(engine_.function("moeccl_messages"), blocks, 1, 1, kThreads, 1,
                                                        1, 0, stream, parameters, nullptr),
                         "launching messages"));
  if (number != nullptr) *number = messages_launched_ = next;
  return after_launch(stream, next, capture);
}

uint64_t PersistentKernel::begun() const { return std::atomic_ref(report().begun).load(std::memory_order_relaxed); }

uint64_t PersistentKernel::messages_ended() const {
  // Acquire: pairs with the release in run_messages() on the device; below, with the one in message_done().
  return load_from_device(std::atomic_ref(*reinterpret_cast<uint64_t*>(pinned_.data() + kMessagesEndedAt)));
}
uint64_t PersistentKernel::messages_begun() const {
  auto* const ended = reinterpret_cast<uint64_t*>(pinned_.data() + kMessagesEndedAt);
  return std::atomic_ref(ended[1]).load(std::memory_order_relaxed);
}
uint64_t PersistentKernel::messages_ended(uint32_t peer, bool sends) const {
  auto* const ended = reinterpret_cast<uint64_t*>(pinned_.data() + kMessagesEndedAt) + 2;
  return load_from_device(std::atomic_ref(ended[2 * size_t{peer} + (sends ? 1 : 0)]));
}

Result<uint64_t> PersistentKernel::before_launch(cuda::Stream stream, uint64_t number) {
  if (number == 0) return follow_captured(stream);
  const cuda::Driver& d = *cuda::driver();
  constexpr const char* kWhat = "the order of operations on two streams";
  if (any_launch_ && StreamName(stream) != last_stream_)
    MOECCL_TRY(cuda::check(d.cuStreamWaitEvent(stream, event_.get(), 0), kWhat));
  if (graph_mixing_ && has_captured()) MOECCL_TRY(cuda::check(d.cuStreamWaitEvent(stream, replayed_.get(), 0), kWhat));
  return uint64_t{0};
}

Status PersistentKernel::after_launch(cuda::Stream stream, uint64_t number, uint64_t capture) {
  if (number == 0) {
    if (!replays_.has_value() && beside_others(*fabric_)) replays_.emplace();
    has_captured_.store(true, std::memory_order_release);
    return note_captured(stream, capture);
  }
  any_launch_ = true;
  last_stream_ = StreamName(stream);
  return cuda::check(cuda::driver()->cuEventRecord(event_.get(), stream), "the order of operations on two streams");
}

bool PersistentKernel::would_wait(cuda::Stream stream) {
  const std::lock_guard lock(mutex_);
  const bool other_stream = any_launch_ && last_stream_ != StreamName(stream);
  const bool replays = graph_mixing_ && has_captured();
  if (!other_stream && !replays) return false;
  const cuda::Current current(engine_.context());
  const auto runs = [](cuda::Event e) { return cuda::driver()->cuEventQuery(e) == cuda::kNotReady; };
  if (other_stream && runs(event_.get())) return true;
  if (!replays || !runs(replayed_.get())) return false;
  // The driver does not say on which stream the replay runs. A stream without work is another one. A caller's stream
  // with work may be the one, and occupies its hardware queue without the wait, too.
  const bool own = stream == engine_.stream() || stream == message_stream();
  return own || cuda::driver()->cuStreamQuery(stream) != cuda::kNotReady;
}

Status PersistentKernel::device_state() {
  return cuda::check(watch_->ask(event_.get()), "the persistent kernel's device");
}

void PersistentKernel::stop() {
  std::atomic_ref(report().stop).store(moeccl::cuda::kWalkStop, std::memory_order_relaxed);
}
void PersistentKernel::expire(uint64_t number, bool messages) {
  const std::atomic_ref word(report().stop);
  uint64_t before = word.load(std::memory_order_relaxed);
  const uint64_t late = moeccl::cuda::walk_expired(number, messages);
  while (before != moeccl::cuda::kWalkStop && !word.compare_exchange_weak(before, late, std::memory_order_relaxed)) {
  }
}

Status PersistentKernel::failure() const { return failure_of(report(), *fabric_, engine_.context()); }

}  // namespace moeccl::exec
