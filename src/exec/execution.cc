#include "src/exec/execution.h"

#include <algorithm>

#include "src/base/clock.h"

namespace moeccl::exec {

using plan::Buffer;
using plan::Step;
using plan::StepKind;
using plan::When;

Execution::Execution(Fabric& fabric, const Operation& op)
    : Task(fabric),
      op_(op),
      scratch_(fabric.execution),
      lanes_(scratch_.lanes),
      peers_(scratch_.peers),
      srcs_(scratch_.srcs),
      scales_(scratch_.scales) {}

Progress Execution::poll() {
  switch (phase_) {
    case Phase::kNew:
      sequence_ = ++fabric().sequence;
      half_ = (sequence_ & 1) * fabric().half_bytes;
      fabric().history = extend_history(fabric().history, op_.signature);
      history_ = fabric().history;
      tag_ = static_cast<uint32_t>(history_ >> 32);
      fabric().recorder.begin(sequence_, op_.signature, now_ns());
      phase_ = Phase::kEnter;
      [[fallthrough]];
    case Phase::kEnter:
      if (!enter()) return Progress::kBlocked;
      publish();
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

// Staging halves, entries and AllToAllv rows alternate, so a rank may enter operation k only when everyone has finished
// k - 2. A peer that is known to have entered k - 1 has.
bool Execution::enter() {
  Fabric& f = fabric();
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank || f.entered[p] + 1 >= sequence_) continue;
    // Acquire: pairs with the release in finish(); the peer's reads of our staging are over.
    const uint64_t done = f.link(p).board().progress.completed.load(std::memory_order_acquire);
    f.entered[p] = std::max(f.entered[p], std::min(done + 1, sequence_));
    if (f.entered[p] + 1 < sequence_) {
      waiting_peer_ = p;
      return false;
    }
  }
  return true;
}

void Execution::publish() {
  Fabric& f = fabric();
  if (is_v()) {
    transport::BlockWord* row = f.own->blocks(sequence_);
    for (uint32_t p = 0; p < f.n_ranks; ++p) {
      row[p].count.store(op_.send_counts[p], std::memory_order_relaxed);
      row[p].displacement.store(op_.send_displs[p], std::memory_order_relaxed);
    }
  }
  const bool in_heap = f.in_heap(op_.input), out_heap = f.in_heap(op_.output);
  const auto place = [&](const void* p, bool heap) {
    return heap ? static_cast<uint64_t>(static_cast<const std::byte*>(p) - f.heap) : reinterpret_cast<uint64_t>(p);
  };
  transport::Entry& e = f.own->board().entries[sequence_ % transport::kEntries];
  e.signature.store(pack(op_.signature, (in_heap ? kInputInHeap : 0) | (out_heap ? kOutputInHeap : 0)),
                    std::memory_order_relaxed);
  e.count.store(op_.signature.count, std::memory_order_relaxed);
  e.plan.store(op_.signature.plan, std::memory_order_relaxed);
  e.input.store(place(op_.input, in_heap), std::memory_order_relaxed);
  e.output.store(place(op_.output, out_heap), std::memory_order_relaxed);
  uint64_t most = 0;
  for (const uint64_t c : op_.send_counts) most = std::max(most, c);
  for (const uint64_t c : op_.recv_counts) most = std::max(most, c);
  e.max_block.store(most, std::memory_order_relaxed);
  e.history.store(history_, std::memory_order_relaxed);
  // Release: pairs with the acquire in check_entry() and agree(); the fields and the AllToAllv row are visible there.
  e.seq.store(sequence_, std::memory_order_release);
}

const transport::Entry& Execution::entry_of(uint32_t peer) const {
  return fabric().link(peer).board().entries[sequence_ % transport::kEntries];
}

Signature Execution::read_signature(const transport::Entry& e, uint64_t& flags) {
  const uint64_t packed = e.signature.load(std::memory_order_relaxed);
  Signature s;
  s.op = static_cast<moecclOp_t>(packed >> 56);
  s.type = static_cast<moecclDataType_t>(packed >> 48 & 0xff);
  s.reduce = static_cast<uint8_t>(packed >> 40 & 0xff);
  flags = packed >> 32 & 0xff;
  s.root = static_cast<uint32_t>(packed);
  s.count = e.count.load(std::memory_order_relaxed);
  s.plan = e.plan.load(std::memory_order_relaxed);
  return s;
}

Status Execution::check_entry(uint32_t peer) {
  const transport::Entry& e = entry_of(peer);
  uint64_t flags = 0;
  const Signature theirs = read_signature(e, flags);
  const Signature& ours = op_.signature;
  const bool same = pack(theirs, 0) == pack(ours, 0) && theirs.count == ours.count && theirs.plan == ours.plan;
  if (same && e.history.load(std::memory_order_relaxed) == history_) return {};
  return find_difference(peer);
}

// Entries stay for some operations, so the first of these that differed can still be named.
Status Execution::find_difference(uint32_t peer) {
  const uint32_t me = fabric().rank, low = std::min(me, peer), high = std::max(me, peer);
  const uint64_t first = sequence_ < transport::kEntries ? 1 : sequence_ - transport::kEntries + 1;
  for (uint64_t s = first; s <= sequence_; ++s) {
    const transport::Entry& mine = fabric().own->board().entries[s % transport::kEntries];
    const transport::Entry& other = fabric().link(peer).board().entries[s % transport::kEntries];
    if (other.seq.load(std::memory_order_acquire) != s || mine.seq.load(std::memory_order_relaxed) != s) continue;
    uint64_t flags = 0;
    const Signature ours = read_signature(mine, flags), theirs = read_signature(other, flags);
    if (pack(ours, 0) == pack(theirs, 0) && ours.count == theirs.count && ours.plan == theirs.plan) continue;
    return Status(moecclMismatch, describe_difference(low, me == low ? ours : theirs, high, me == low ? theirs : ours));
  }
  return error(moecclMismatch,
               "ranks {} and {} disagree on the operation, count, type, operator, root or order of an operation "
               "some before {} #{}",
               low, high, op_name(op_.signature.op), sequence_);
}

Status Execution::check_blocks(uint32_t peer) {
  const uint64_t sends = fabric().link(peer).blocks(sequence_)[fabric().rank].count.load(std::memory_order_relaxed);
  if (sends == op_.recv_counts[peer]) return {};
  return error(moecclMismatch,
               "ranks disagree on the split sizes of alltoallv: rank {} sends {} elements, rank {} expects {}", peer,
               sends, fabric().rank, op_.recv_counts[peer]);
}

// All ranks look at all entries, so all choose alike.
Progress Execution::agree() {
  Fabric& f = fabric();
  for (; agreed_ < f.n_ranks; ++agreed_) {
    if (agreed_ == f.rank) {
      all_reachable_ = all_reachable_ && f.in_heap(op_.input) && f.in_heap(op_.output);
      continue;
    }
    const transport::Entry& e = f.link(agreed_).board().entries[sequence_ % transport::kEntries];
    if (e.seq.load(std::memory_order_acquire) != sequence_) {
      waiting_peer_ = agreed_;
      return Progress::kBlocked;
    }
    if (Status s = check_entry(agreed_); !s.ok()) return fail(std::move(s));
    if (is_v()) {
      if (Status s = check_blocks(agreed_); !s.ok()) return fail(std::move(s));
    }
    f.entered[agreed_] = std::max(f.entered[agreed_], sequence_);
    uint64_t flags = 0;
    (void)read_signature(e, flags);
    all_reachable_ = all_reachable_ && flags == (kInputInHeap | kOutputInHeap);
  }
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
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].done = choice.program->lanes[i].steps.empty();
  stream_output_ = binding_.count * op_.element_bytes * plan::out_blocks(op_.signature.op, fabric().n_ranks) >
                   kernels::stream_threshold_bytes();
  if (choice.program->touches_peers) {
    fabric().own->board().progress.uses_buffers_of_operation.store(sequence_, std::memory_order_seq_cst);
  }
  fabric().recorder.chose(choice.algorithm);
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
    const transport::Entry& e = f.link(p).board().entries[sequence_ % transport::kEntries];
    if (e.seq.load(std::memory_order_acquire) != sequence_) {
      waiting_peer_ = p;
      return false;
    }
    most = std::max(most, e.max_block.load(std::memory_order_relaxed));
  }
  const uint64_t chunk = std::max<uint64_t>(1, binding_.chunking.chunk);
  largest_block_ = most;
  const uint64_t left = most - std::min(most, moved_);
  rest_follows_ = op_.for_rest != nullptr && moved_ == 0 && left > chunk;
  binding_.chunking.n_chunks =
      rest_follows_ ? 1 : static_cast<uint32_t>(std::max<uint64_t>(1, (left + chunk - 1) / chunk));
  chunks_known_ = true;
  return true;
}

Progress Execution::run() {
  const plan::Program& program = *choice_.program;
  bool moved = false, all_done = true;
  // With several lanes the first ready one wins after every step: lanes stand in order of urgency (the network first).
  const bool several = program.lanes.size() > 1;
  for (size_t i = 0; i < program.lanes.size();) {
    if (lanes_[i].done) {
      ++i;
      continue;
    }
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
  if (all_done && std::all_of(lanes_.begin(), lanes_.end(), [](const LaneState& l) { return l.done; })) return finish();
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
      const Progress p = step(s, state.chunk);
      if (p == Progress::kFailed) return p;
      if (p == Progress::kBlocked) return stopped();
    }
    ++state.pc;
    moved = true;
    if (one_step && active && s.kind != StepKind::kSignal && s.kind != StepKind::kWait) break;
  }
  return Progress::kMoved;
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

// The rest of an AllToAllv, with the program for large blocks.
void Execution::begin_rest() {
  rest_follows_ = false;
  const uint64_t done = binding_.chunking.chunk;
  choose(*op_.for_rest);
  bind_blocks(done);
  (void)last_chunk_known();  // all entries have been seen
}

Progress Execution::finish() {
  Fabric& f = fabric();
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
  if (choice_.program->touches_peers) {
    f.own->board().progress.uses_buffers_of_operation.store(0, std::memory_order_release);
  }
  // Release: pairs with the acquire in enter(); our reads and writes of peers' memory are over.
  f.own->board().progress.completed.store(sequence_, std::memory_order_release);
  const int64_t now = now_ns();
  if (op_.measured != nullptr) {
    op_.measured->ns.store(static_cast<double>(now - f.recorder.newest_start_ns()), std::memory_order_relaxed);
    op_.measured->wire_bytes.store(wire_bytes_, std::memory_order_relaxed);
  }
  f.recorder.end(now, false);
  return Progress::kDone;
}

// A peer that entered the same operation with other arguments may never signal: look at the entries themselves.
Status Execution::diagnose() {
  Fabric& f = fabric();
  if (phase_ == Phase::kNew || phase_ == Phase::kEnter) return {};
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank) continue;
    const transport::Entry& e = f.link(p).board().entries[sequence_ % transport::kEntries];
    if (e.seq.load(std::memory_order_acquire) != sequence_) continue;
    MOECCL_TRY(check_entry(p));
    if (is_v()) MOECCL_TRY(check_blocks(p));
  }
  return {};
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
  return format("{} #{} (count {}, plan {}{})", op_name(op_.signature.op), sequence_, op_.signature.count,
                choice_.algorithm, where);
}

void Execution::abandon() {
  Fabric& f = fabric();
  f.recorder.end(now_ns(), true);
  f.own->board().progress.uses_buffers_of_operation.store(0, std::memory_order_release);
  if (phase_ != Phase::kRun || !choice_.program->touches_peers) return;
  wait_for_peers([&] {
    for (uint32_t p = 0; p < f.n_ranks; ++p) {
      if (p != f.rank && f.link(p).same_process() &&
          f.link(p).board().progress.uses_buffers_of_operation.load(std::memory_order_seq_cst) == sequence_) {
        return true;
      }
    }
    return false;
  });
}

// A peer that has finished this operation may leave.
bool Execution::needs(uint32_t peer) const {
  return fabric().link(peer).board().progress.completed.load(std::memory_order_acquire) < sequence_;
}

}  // namespace moeccl::exec
