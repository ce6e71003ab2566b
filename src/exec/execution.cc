// SPDX-License-Identifier: Apache-2.0
#include "src/exec/execution.h"

#include <algorithm>
#include <numeric>

#include "src/base/clock.h"
#include "src/base/log.h"

namespace moeccl::exec {

using plan::Buffer;
using plan::Step;
using plan::StepKind;
using plan::When;

namespace {

// For smaller chunks, searching the plan does not pay.
constexpr uint64_t kLandBytes = 16 << 10;
// The bytes that sockets hold for a rank that does not look at all of them for several polls.
constexpr uint64_t kAwaitOneBytes = 64 << 10;
// The time after a failure that peers get to notice it and to stop using this rank's buffers. A waiting peer looks
// every millisecond, and others look between two steps. Memory cannot be taken away from peers that are threads of this
// process, and a step may copy a whole block.
constexpr int64_t kStoresEnd_ns = 100'000'000, kThreadsEnd_ns = 1'000'000'000;

}  // namespace

Execution::Execution(Fabric& fabric, const Operation& op)
    : AgreedTask(fabric, op),
      scale_(op.scale),
      scratch_(fabric.execution),
      lanes_(scratch_.lanes),
      peers_(scratch_.peers),
      srcs_(scratch_.srcs),
      scales_(scratch_.scales),
      landings_(scratch_.landings),
      copies_(scratch_.copies),
      posted_(scratch_.posted) {}

Execution::Execution(const AgreedTask& begun, const Operation& op) : Execution(begun.fabric(), op) {
  continue_from(begun);
}

Progress Execution::poll() {
  switch (phase_) {
    case Phase::kNew:
      if (!entered_) begin();
      traffic_class_ = traffic_class(op_.signature.op, op_.priority);
      engine_use_.begin(fabric().engine.get(), traffic_class_);
      half_ = (sequence_ & 1) * fabric().half_bytes;
      phase_ = Phase::kEnter;
      [[fallthrough]];
    case Phase::kEnter:
      if (!entered_) {
        if (const Progress p = enter(); p != Progress::kMoved) return p;
        publish();
      }
      if (op_.if_reachable != nullptr) {
        phase_ = Phase::kAgree;
        return agree();
      }
      choose(op_.choice);
      return run();
    case Phase::kAgree:
      return agree();
    case Phase::kRun:
      return run();
  }
  return Progress::kBlocked;
}

// The plan for buffers that peers can reach runs only if all buffers of all ranks can be reached. A single "no" decides
// for all ranks, so a rank that knows of one need not hear the others.
Progress Execution::agree() {
  Fabric& f = fabric();
  all_reachable_ = all_reachable_ && input_in_heap_ && output_in_heap_;
  for (; all_reachable_ && agreed_ < f.n_ranks; ++agreed_) {
    if (agreed_ == f.rank) continue;
    if (!has_published(agreed_)) {
      waiting_peer_ = agreed_;
      return Progress::kBlocked;
    }
    if (Status s = check_entry(agreed_); !s.ok()) return fail(std::move(s));
    if (is_v()) {
      if (Status s = check_blocks(agreed_); !s.ok()) return fail(std::move(s));
    }
    f.entered[agreed_] = std::max(f.entered[agreed_], sequence_);
    uint64_t flags = 0;
    (void)read_signature(entry_of(agreed_), flags);
    all_reachable_ = flags == (kInputInHeap | kOutputInHeap);
  }
  ran_in_heap_ = all_reachable_;
  choose(all_reachable_ ? *op_.if_reachable : op_.choice);
  return run();
}

void Execution::choose(const Choice& choice) {
  choice_ = choice;
  binding_ = op_.binding;
  binding_.chunking = choice.chunking;
  binding_.element_bytes = static_cast<uint32_t>(op_.element_bytes);
  if (binding_.slot_elements == 0) {
    const uint64_t slot = (choice.chunking.chunk * op_.element_bytes + 63) / 64 * 64;
    binding_.slot_elements = slot / op_.element_bytes;
  }
  // Until all entries are seen, an AllToAllv runs as if it had one chunk.
  chunks_known_ = !is_v();
  if (is_v()) {
    binding_.chunking.n_chunks = 1;
    bind_blocks(0);
  }
  lanes_.assign(choice.program->lanes.size(), LaneState{});
  peers_.assign(fabric().n_ranks, PeerBuffers{});
  posted_.clear();
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].done = choice.program->lanes[i].steps.empty();
  uint64_t elements_out = binding_.count * plan::out_blocks(op_.signature.op, fabric().n_ranks);
  if (is_v()) elements_out = std::reduce(op_.recv_counts.begin(), op_.recv_counts.end());
  stream_output_ = elements_out * op_.element_bytes > fabric().stream_from_bytes;
  if (choice.program->touches_peers) {
    fabric().own->board().progress.uses_buffers_of_operation.store(sequence_, std::memory_order_seq_cst);
  }
  const bool moves_rows = !binding_.rows.empty() || !binding_.sums.empty();
  awaits_one_ = lanes_.size() == 1 && !moves_rows && elements_out * op_.element_bytes <= kAwaitOneBytes;
  fabric().recorder.chose(record_, choice.algorithm);
  if (op_.signature.op == moecclOpTensorAllToAll && op_.measured != nullptr && !fabric().cuda)
    trace_.begin(choice.chunking.n_chunks, now_ns());
  find_landings();
  phase_ = Phase::kRun;
}

// AllToAllv: the number of chunks follows from the largest block of any rank.
bool Execution::last_chunk_known() {
  if (chunks_known_) return true;
  Fabric& f = fabric();
  uint64_t most = 0;
  for (const uint64_t c : op_.send_counts) most = std::max(most, c);
  for (const uint64_t c : op_.recv_counts) most = std::max(most, c);
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank) continue;
    if (!has_published(p)) {
      waiting_peer_ = p;
      return false;
    }
    // The value is a peer's word. A block larger than any memory is a lie, and its chunks could not even be counted.
    const uint64_t block = entry_of(p).max_block.load(std::memory_order_relaxed);
    most = std::max(most, std::min(block, kMostBytes / op_.element_bytes));
  }
  const uint64_t chunk = std::max<uint64_t>(1, binding_.chunking.chunk);
  largest_block_ = most;
  const uint64_t left = most - std::min(most, moved_);
  rest_follows_ = op_.for_rest != nullptr && moved_ == 0 && left > chunk;
  binding_.chunking.n_chunks =
      rest_follows_ ? 1 : static_cast<uint32_t>(std::clamp<uint64_t>((left + chunk - 1) / chunk, 1, UINT32_MAX));
  chunks_known_ = true;
  return true;
}

void Execution::find_landings() {
  Fabric& f = fabric();
  landings_.clear();
  const plan::Program& program = *choice_.program;
  if (f.engine == nullptr || f.cuda || is_v() || !binding_.rows.empty() || !binding_.sums.empty() ||
      binding_.chunking.chunk * op_.element_bytes < kLandBytes) {
    return;
  }
  std::vector<uint8_t>& readers = scratch_.slot_readers;
  readers.assign(program.n_slots + program.n_part_slots, 0);
  for (const plan::Ref& ref : program.srcs) {
    if (ref.buffer != Buffer::kStaging || ref.rank != f.rank) continue;
    readers[ref.index] = static_cast<uint8_t>(std::min(2, readers[ref.index] + 1));
  }
  for (const plan::Lane& lane : program.lanes) {
    for (size_t i = 1; i < lane.steps.size(); ++i) {
      const Step &wait = lane.steps[i - 1], &s = lane.steps[i];
      if (wait.kind != StepKind::kWait || wait.peer == f.rank || s.kind != StepKind::kCopy || s.when != When::kEvery)
        continue;
      if (f.link(wait.peer).landings() == nullptr) continue;
      const plan::Ref& src = program.srcs[s.first_src];
      if (src.buffer != Buffer::kStaging || src.rank != f.rank || s.dst.buffer != Buffer::kOutput ||
          s.dst.rank != f.rank || src.parts != s.dst.parts)
        continue;
      if (src.parts == 1 ? readers[src.index] != 1 : !worth_landing(src)) continue;
      landings_.push_back({&s, wait.peer});
      for (uint32_t c = 0; c < program.depth; ++c) land(landings_.back(), c);
    }
  }
}

// Returns whether `src`, a part of a slot, has only one reader. Programs of many small parts are not searched.
bool Execution::worth_landing(const plan::Ref& src) {
  if (binding_.chunking.chunk * op_.element_bytes / src.parts < kLandBytes) return false;
  const auto reads = [&](const plan::Ref& ref) {
    return ref.buffer == Buffer::kStaging && ref.rank == src.rank && ref.index == src.index &&
           (ref.parts != src.parts || ref.part == src.part || choice_.program->holds_part(ref));
  };
  return std::count_if(choice_.program->srcs.begin(), choice_.program->srcs.end(), reads) == 1;
}

void Execution::land(const LandingStep& l, uint32_t chunk) {
  if (chunk >= binding_.chunking.n_chunks) return;
  const uint64_t length = governing(*l.copy);
  const plan::Range src = range(choice_.program->srcs[l.copy->first_src], length, chunk);
  const plan::Range dst = range(l.copy->dst, length, chunk);
  const uint64_t bytes = std::min(src.length, dst.length) * op_.element_bytes;
  std::byte* const to = address(l.copy->dst, dst);
  // In place, the bytes that would be overwritten may not have been sent yet.
  const auto* input = static_cast<const std::byte*>(op_.input);
  const uint64_t input_bytes = binding_.count * op_.element_bytes * plan::in_blocks(op_.signature.op, fabric().n_ranks);
  if (input != nullptr && to < input + input_bytes && input < to + bytes) return;
  fabric().link(l.peer).landings()->land(half_ + src.offset * op_.element_bytes, bytes, to);
}

Result<bool> Execution::landed(const Step& s, uint32_t chunk) {
  for (const LandingStep& l : landings_) {
    if (l.copy != &s) continue;
    const plan::Range src = range(choice_.program->srcs[s.first_src], governing(s), chunk);
    MOECCL_ASSIGN_OR_RETURN(const bool there,
                            fabric().link(l.peer).landings()->landed(half_ + src.offset * op_.element_bytes));
    land(l, chunk + choice_.program->depth);
    return there;
  }
  return false;
}

Progress Execution::run() {
  const plan::Program& program = *choice_.program;
  bool moved = false, all_done = true;
  // With several lanes, the first ready lane wins after every step: lanes are in order of urgency (the network first).
  const bool several = program.lanes.size() > 1;
  for (size_t i = 0; i < program.lanes.size();) {
    if (lanes_[i].done) {
      ++i;
      continue;
    }
    lane_ = i;
    const Progress p = run_lane(program.lanes[i], lanes_[i], several);
    if (p == Progress::kFailed) return p;
    if (p == Progress::kMoved) {
      moved = true;
      if (several && i > 0) {
        i = 0;
        all_done = true;
        continue;
      }
      if (several) continue;
    }
    if (!lanes_[i].done) all_done = false;
    ++i;
  }
  if (trickled_) moved = true;
  trickled_ = false;
  if (all_done && std::all_of(lanes_.begin(), lanes_.end(), [](const LaneState& l) { return l.done; }) &&
      all_sources_taken())
    return finish();
  return moved ? Progress::kMoved : Progress::kBlocked;
}

Progress Execution::run_lane(const plan::Lane& lane, LaneState& state, bool one_step) {
  bool moved = false;
  const auto stopped = [&] { return moved ? Progress::kMoved : Progress::kBlocked; };
  while (!state.done) {
    if (state.pc == lane.steps.size()) {
      if (!last_chunk_known()) return stopped();
      state.pc = 0;
      state.done = ++state.chunk == binding_.chunking.n_chunks;
      moved = true;
      continue;
    }
    const Step& s = lane.steps[state.pc];
    bool active = s.when == When::kEvery || (s.when == When::kFirst && state.chunk == 0);
    if (s.when == When::kLast) {
      if (!last_chunk_known()) return stopped();
      active = state.chunk + 1 == binding_.chunking.n_chunks;
    }
    if (active) {
      if (!posted_.empty() && !sources_allow(s)) return stopped();
      merged_ = 0;
      const Progress p = trace_.on() ? traced_step(s, state.chunk) : step(s, state.chunk);
      if (p == Progress::kFailed) return p;
      if (p == Progress::kBlocked) return stopped();
      state.pc += merged_;
    }
    ++state.pc;
    moved = true;
    if (one_step && active && s.kind != StepKind::kSignal && s.kind != StepKind::kWait) break;
  }
  return Progress::kMoved;
}

// On a paced link, the bytes travel after the signal, at the times that the link reports.
Progress Execution::traced_step(const Step& s, uint32_t chunk) {
  const int64_t from = now_ns();
  const Progress p = step(s, chunk);
  if (p != Progress::kMoved || s.kind == StepKind::kWait) return p;
  const uint32_t peer = s.kind == StepKind::kSignal ? s.peer : s.dst.rank;
  const bool paced = fabric().paced[peer] != 0;
  const plan::LaneKind lane = peer == fabric().rank ? plan::LaneKind::kCopy : choice_.program->lanes[lane_].kind;
  if (s.kind != StepKind::kSignal) {
    if (!paced) trace_.note(lane, chunk, from, now_ns());
  } else if (paced) {
    const transport::Crossing on_wire = fabric().link(peer).pace()->crossing();
    if (on_wire.end_ns > on_wire.start_ns) trace_.note(lane, chunk, on_wire.start_ns, on_wire.end_ns);
  }
  return p;
}

void Execution::bind_blocks(uint64_t done) {
  moved_ = done;
  const std::vector<uint64_t>* given[4] = {&op_.send_displs, &op_.send_counts, &op_.recv_displs, &op_.recv_counts};
  const uint64_t* bound[4];
  for (int i = 0; i < 4; ++i) {
    bound[i] = given[i]->data();
    if (done == 0) continue;
    blocks_left_[i] = *given[i];
    for (uint64_t& v : blocks_left_[i]) v = i % 2 == 0 ? v + done : v - std::min(v, done);
    bound[i] = blocks_left_[i].data();
  }
  binding_.in_offset = bound[0];
  binding_.in_length = bound[1];
  binding_.out_offset = bound[2];
  binding_.out_length = bound[3];
}

// Runs the rest of an AllToAllv with the program for large blocks.
void Execution::begin_rest() {
  rest_follows_ = false;
  const uint64_t done = binding_.chunking.chunk;
  choose(*op_.for_rest);
  bind_blocks(done);
  (void)last_chunk_known();  // all entries have been seen
}

// A failing peer returns its buffers to their owner, which may write to them or free them at once. Data that this rank
// has read there since is worthless, and data that it wrote there is lost.
Status Execution::check_buffers() {
  Fabric& f = fabric();
  if (choice_.program->touches_peers) {
    // Orders all reads above before the reads of the states below.
    std::atomic_thread_fence(std::memory_order_acquire);
    for (uint32_t p = 0; p < f.n_ranks; ++p) {
      if (p != f.rank && peers_[p].known && !still_runs(p)) MOECCL_TRY(check_peer_state(*this, p));
    }
  }
  const bool detached = output_in_heap_ && op_.output != nullptr && f.shared_heap != nullptr &&
                        f.shared_heap->n_detached() != heap_detached_ && f.shared_heap->is_detached(op_.output);
  if (!detached) return {};
  return error(moecclRemoteError,
               "the memory of {} #{}'s output was taken out of its peers' reach while it ran, because an operation of "
               "another communicator failed there while a peer could still write: use memory apart from that one's",
               op_name(op_.signature.op), sequence_);
}

Progress Execution::finish() {
  Fabric& f = fabric();
  if (Status s = check_buffers(); !s.ok()) return fail(std::move(s));
  for (const auto& t : choice_.program->totals) {
    const uint32_t times = t.once ? 1 : binding_.chunking.n_chunks;
    const size_t i = static_cast<size_t>(t.peer) * transport::kSigsPerPeer + t.sig;
    f.sent[i] += t.sent * times;
    f.awaited[i] += t.awaited * times;
  }
  if (rest_follows_) {
    begin_rest();
    return Progress::kMoved;
  }
  if (choice_.program->touches_peers && !f.publish_completed) {
    f.own->board().progress.uses_buffers_of_operation.store(0, std::memory_order_release);
  }
  if (trace_.on()) op_.measured->lanes.set(trace_.take());
  engine_use_.end();
  return end(wire_bytes_);
}

std::string Execution::describe() const {
  std::string where;
  if (phase_ == Phase::kEnter || phase_ == Phase::kAgree) where = format(", at its start, for rank {}", waiting_peer_);
  for (size_t i = 0; phase_ == Phase::kRun && i < lanes_.size(); ++i) {
    const auto& steps = choice_.program->lanes[i].steps;
    if (lanes_[i].done || lanes_[i].pc >= steps.size()) continue;
    const Step& s = steps[lanes_[i].pc];
    where = format(", in step {} of {} ({}{}), chunk {} of {}", lanes_[i].pc, steps.size(),
                   plan::step_kind_name(s.kind), s.kind == StepKind::kWait ? format(" for rank {}", s.peer) : "",
                   lanes_[i].chunk, binding_.chunking.n_chunks);
    break;
  }
  const std::string plan = choice_.algorithm[0] == '\0' ? "" : format(", plan {}", choice_.algorithm);
  return format("{} #{} (count {}{}{})", op_name(op_.signature.op), sequence_, op_.signature.count, plan, where);
}

uint64_t Execution::output_bytes() const {
  if (op_.output_bytes > 0) return op_.output_bytes;
  uint64_t elements = op_.signature.count * plan::out_blocks(op_.signature.op, fabric().n_ranks);
  if (elements == 0 && !is_v()) return ~uint64_t{0};  // not made of blocks: all of the allocation
  for (size_t p = 0; p < op_.recv_counts.size(); ++p)
    elements = std::max(elements, op_.recv_displs[p] + op_.recv_counts[p]);
  return elements * op_.element_bytes;
}

// A step of "direct" copies a block as a whole.
int64_t Execution::longest_step_ns() const {
  uint64_t elements = op_.signature.count;
  for (const auto* counts : {&op_.send_counts, &op_.recv_counts})
    for (const uint64_t n : *counts) elements = std::max(elements, n);
  return static_cast<int64_t>(elements * op_.element_bytes) * kSlowCopy_ns;
}

void Execution::let_go() {
  Fabric& f = fabric();
  if (phase_ == Phase::kRun) {
    for (const LandingStep& l : landings_) f.link(l.peer).landings()->land_nothing();
  }
  engine_use_.end();
  f.recorder.end(record_, true);
  f.own->board().progress.uses_buffers_of_operation.store(0, std::memory_order_release);
}

void Execution::abandon() {
  Fabric& f = fabric();
  if (!entered_) return;
  // A peer that has not announced its use by now sees this rank's failure before it begins; see resolve_peer().
  const auto any_uses = [&](auto&& reaches) {
    for (uint32_t p = 0; p < f.n_ranks; ++p) {
      if (p != f.rank && reaches(f.link(p)) &&
          f.link(p).board().progress.uses_buffers_of_operation.load(std::memory_order_seq_cst) == sequence_)
        return true;
    }
    return false;
  };
  const auto stores_here = [&](transport::Link& l) {
    return output_in_heap_ && op_.output != nullptr && f.shared_heap != nullptr && l.view().heap != nullptr &&
           l.check_peer().ok();
  };
  if (any_uses(stores_here)) {
    wait_for_peers([&] { return any_uses(stores_here); }, kStoresEnd_ns);
    // A peer was stopped or is slow. Whenever it continues, it must not store into memory that belongs to its owner
    // again.
    if (any_uses(stores_here)) {
      const Status s = f.shared_heap->detach(op_.output, output_bytes());
      if (!s.ok()) {
        log(LogLevel::kError, "{}: {} has failed, but a peer that does not answer may still write to its output: {}",
            f.who(), op_name(op_.signature.op), s.message());
      }
    }
  }
  const auto same_process = [](const transport::Link& l) { return l.view().same_process; };
  wait_for_peers([&] { return any_uses(same_process); }, kThreadsEnd_ns + longest_step_ns());
  take_sources_back(f);
}

}  // namespace moeccl::exec
