// SPDX-License-Identifier: Apache-2.0
#include "src/exec/agreed_task.h"

#include <algorithm>

#include "src/base/device_order.h"
#include "src/base/ticks.h"

namespace moeccl::exec {

// A rank that agrees with the root of its operation agrees with every other rank that does. If two ranks differ, one of
// them or the root of one therefore notices.
void AgreedTask::take_number() {
  Fabric& f = fabric();
  sequence_ = ++f.sequence;
  const Signature& s = op_.signature;
  f.compare_with[sequence_ % transport::kEntries] = plan::rooted(s.op) && s.root != f.rank ? s.root : Fabric::kAll;
  f.history = extend_history(f.history, op_.signature);
  history_ = f.history;
  tag_ = static_cast<uint32_t>(history_ >> 32);
}

void AgreedTask::note_begin() {
  if (record_ != 0) return;
  record_ = fabric().recorder.begin(sequence_, op_);
  began_ = fabric().recorder.newest_began();
}

void AgreedTask::continue_from(const AgreedTask& begun) {
  eager_ = begun.eager_;
  sequence_ = begun.sequence_;
  record_ = begun.record_;
  began_ = begun.began_;
  history_ = begun.history_;
  tag_ = begun.tag_;
  entered_ = begun.entered_;
  input_in_heap_ = begun.input_in_heap_;
  output_in_heap_ = begun.output_in_heap_;
  heap_detached_ = begun.heap_detached_;
}

// Staging halves, entries and AllToAllv rows alternate, so a rank may enter operation k only once all ranks have
// finished k - 2. A peer that is known to have entered k - 1 has finished k - 2.
Progress AgreedTask::enter() {
  Fabric& f = fabric();
  const uint64_t before = sequence_ - 2;
  uint32_t with = kNobody;
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank || f.entered[p] + 1 >= sequence_) continue;
    if (f.finished[p] + 2 < sequence_) {
      // Acquire: pairs with the release in end(); the peer's reads of our staging are over.
      f.finished[p] = load_from_device(f.link(p).board().progress.completed);
      if (f.finished[p] + 2 < sequence_) {
        waiting_peer_ = p;
        return Progress::kBlocked;
      }
    }
    // The peer has sent nothing since (no rank signals a broadcast's root), but the history it had then can be
    // compared. A difference is found here at the latest.
    if (f.entered[p] < before) {
      if (with == kNobody) with = f.compare_with[before % transport::kEntries];
      if (with != Fabric::kAll && with != p) continue;
      const uint64_t last = std::min(f.finished[p], sequence_ - 1);  // that both have finished
      if (history_at_end(p, last) != own_history(last)) return fail(find_difference(p));
      f.entered[p] = last;
    }
  }
  const bool due = f.ballot.at != 0 && sequence_ == f.ballot.at + Ballot::kHeardAfter;
  return !due || hear_votes() ? Progress::kMoved : Progress::kBlocked;
}

// Where not all ranks meet, most would learn of a difference only in a later operation. A rank that sends one operation
// after another is ahead of its peers, which have published nothing yet. After one look in vain, it therefore looks
// again only when all ranks have met.
Status AgreedTask::look_around() {
  Fabric& f = fabric();
  if (f.met + 1 != sequence_) return {};
  const uint32_t with = f.compare_with[sequence_ % transport::kEntries];
  for (uint32_t p = with == Fabric::kAll ? 0 : with; p < (with == Fabric::kAll ? f.n_ranks : with + 1); ++p) {
    if (p == f.rank || f.entered[p] >= sequence_) continue;
    if (!has_published(p)) return {};
    if (entry_of(p).history.load(std::memory_order_relaxed) != history_) return find_difference(p);
    f.entered[p] = sequence_;
  }
  f.met = sequence_;
  return {};
}

// All ranks have finished operation k = sequence_ - 2, so their entries have arrived or are on their way. They stay
// until this rank has finished sequence_.
bool AgreedTask::hear_votes() {
  Fabric& f = fabric();
  std::vector<uint64_t> words(f.n_ranks, f.ballot.word);
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank) continue;
    if (!has_published(p, f.ballot.at)) {
      waiting_peer_ = p;
      return false;
    }
    const transport::Entry& e = entry_of(p, f.ballot.at);
    const auto op = static_cast<moecclOp_t>(e.signature.load(std::memory_order_relaxed) >> 56);
    words[p] = (plan::facts(op).private_sizes ? e.count : e.max_block).load(std::memory_order_relaxed);
  }
  f.ballot.heard(words);
  return true;
}

void AgreedTask::publish() {
  Fabric& f = fabric();
  // Peers that wait compare it with their own core. Asking costs a tenth of a small operation.
  constexpr uint64_t kNoteCoreEvery = 16;
  if (!f.crowded && (!eager_ || sequence_ % kNoteCoreEvery == 1)) f.note_core();
  uint64_t most = 0, sent = 0, received = 0;
  if (is_v()) {
    transport::BlockWord* row = f.own->blocks(sequence_);
    for (uint32_t p = 0; p < f.n_ranks; ++p) {
      row[p].count.store(op_.send_counts[p], std::memory_order_relaxed);
      row[p].displacement.store(op_.send_displs[p], std::memory_order_relaxed);
      row[p].expects.store(op_.recv_counts[p], std::memory_order_relaxed);
      most = std::max({most, op_.send_counts[p], op_.recv_counts[p]});
      sent += op_.send_counts[p];
      received += op_.recv_counts[p];
    }
  }
  if (f.shared_heap != nullptr) heap_detached_ = f.shared_heap->n_detached();
  // One "no" is enough. Other operations have no least size.
  const bool gains = std::max(sent, received) * op_.element_bytes >= op_.reach_from_bytes;
  input_in_heap_ = reachable(op_.input) && gains;
  output_in_heap_ = reachable(op_.output);
  const auto place = [&](const void* p, bool heap) {
    return heap && p != nullptr ? static_cast<uint64_t>(static_cast<const std::byte*>(p) - f.heap)
                                : reinterpret_cast<uint64_t>(p);
  };
  transport::Entry& e = f.own->board().entries[sequence_ % transport::kEntries];
  e.signature.store(pack(op_.signature, (input_in_heap_ ? kInputInHeap : 0) | (output_in_heap_ ? kOutputInHeap : 0)),
                    std::memory_order_relaxed);
  e.plan.store(op_.signature.plan, std::memory_order_relaxed);
  e.input.store(place(op_.input, input_in_heap_), std::memory_order_relaxed);
  e.output.store(place(op_.output, output_in_heap_), std::memory_order_relaxed);
  const bool votes = f.ballot.at == sequence_;
  const uint64_t word = votes ? f.ballot.word : 0;
  e.count.store(is_v() ? word : op_.signature.count, std::memory_order_relaxed);
  e.max_block.store(is_v() ? most : word, std::memory_order_relaxed);
  e.history.store(history_, std::memory_order_relaxed);
  // Release: pairs with the acquire in has_published(); the fields and the AllToAllv row are visible there.
  e.seq.store(sequence_, std::memory_order_release);
  entered_ = true;
  // Two operations later all ranks wait for a vote in hear_votes(), including those that this operation does not
  // signal.
  if (f.engine != nullptr) f.engine->board_changed(votes);
}

// Only every kTimeEvery-th small operation is timed, because reading the clock takes a tenth of its time.
bool AgreedTask::is_timed() const {
  constexpr uint64_t kTimeEvery = 16;
  if (!eager_ || (op_.ran != nullptr && op_.ran->is_timed) || sequence_ % kTimeEvery == 0) return true;
  return op_.measured != nullptr && op_.measured->ns.load(std::memory_order_relaxed) == 0;
}

Progress AgreedTask::end(uint64_t wire_bytes) {
  Fabric& f = fabric();
  // Acquire: pairs with the store in Fabric::publish_state(); the failure's text is there.
  if (f.own->board().health.state.load(std::memory_order_acquire) != 0) return fail(f.failure());
  const bool all_met = plan::facts(op_.signature.op).meets_all;
  if (!all_met) {
    if (Status s = look_around(); !s.ok()) return fail(std::move(s));
  }
  if (f.publish_completed) {
    f.publish_completed(sequence_);
  } else {
    f.own->board().progress.histories[sequence_ % 2].store(history_, std::memory_order_release);
    // Release: pairs with the acquire in enter(); our reads and writes of peers' memory are over.
    f.own->board().progress.completed.store(sequence_, std::memory_order_release);
  }
  // Everything that this rank received came, directly or through others, from ranks that had entered.
  if (all_met) {
    std::fill(f.entered.begin(), f.entered.end(), sequence_);
    f.met = sequence_;
  }
  if (f.engine != nullptr) f.engine->board_changed(!all_met);
  if (op_.ran != nullptr) op_.ran->largest_block_bytes = largest_block_ * op_.element_bytes;
  if (!is_timed()) {
    f.recorder.end_untimed(record_);
    return Progress::kDone;
  }
  f.recorder.end(record_, false);
  // Clocks of cores may differ, and a rank whose time were 0 would count another number of runs than its peers.
  const int64_t took_ns = std::max<int64_t>(Ticks::to_ns(Ticks::now() - began_), 1);
  if (op_.ran != nullptr && !ran_in_heap_ && !fitted_) op_.ran->took_ns = static_cast<double>(took_ns);
  if (op_.measured == nullptr) return Progress::kDone;
  op_.measured->ns.store(static_cast<double>(took_ns), std::memory_order_relaxed);
  op_.measured->wire_bytes.store(wire_bytes, std::memory_order_relaxed);
  return Progress::kDone;
}

Signature AgreedTask::read_signature(const transport::Entry& e, uint64_t& flags) {
  const uint64_t packed = e.signature.load(std::memory_order_relaxed);
  flags = packed >> 32 & 0xff;
  const bool has_count = !plan::facts(static_cast<moecclOp_t>(packed >> 56)).private_sizes;
  return unpack(packed, has_count ? e.count.load(std::memory_order_relaxed) : 0,
                e.plan.load(std::memory_order_relaxed));
}

Status AgreedTask::check_entry(uint32_t peer) {
  const transport::Entry& e = entry_of(peer);
  uint64_t flags = 0;
  const Signature theirs = read_signature(e, flags);
  const Signature& ours = op_.signature;
  const bool same = pack(theirs, 0) == pack(ours, 0) && theirs.count == ours.count && theirs.plan == ours.plan;
  if (same && e.history.load(std::memory_order_relaxed) == history_) return {};
  return find_difference(peer);
}

// `completed` is in the line that has just been read. Boards received over a network, and devices, leave the words at
// 0.
uint64_t AgreedTask::history_at_end(uint32_t peer, uint64_t sequence) const {
  const auto& progress = fabric().link(peer).board().progress;
  // Acquire: pairs with the release in end(); the next load must not return an older value than that rank had stored.
  const uint64_t history = progress.histories[sequence % 2].load(std::memory_order_acquire);
  // Two operations later, the word is overwritten before `completed` shows it.
  if (history != 0 && progress.completed.load(std::memory_order_relaxed) <= sequence) return history;
  return entry_of(peer, sequence).history.load(std::memory_order_relaxed);
}

// Entries stay for several operations, so the first one that differed can still be named.
Status AgreedTask::find_difference(uint32_t peer) {
  const uint32_t me = fabric().rank, low = std::min(me, peer), high = std::max(me, peer);
  const uint64_t first = sequence_ < transport::kEntries ? 1 : sequence_ - transport::kEntries + 1;
  for (uint64_t s = first; s <= sequence_; ++s) {
    const transport::Entry& mine = fabric().own->board().entries[s % transport::kEntries];
    const transport::Entry& other = entry_of(peer, s);
    if (!has_published(peer, s) || mine.seq.load(std::memory_order_relaxed) != s) continue;
    uint64_t flags = 0;
    const Signature ours = read_signature(mine, flags), theirs = read_signature(other, flags);
    if (pack(ours, 0) == pack(theirs, 0) && ours.count == theirs.count && ours.plan == theirs.plan) continue;
    return Status(moecclMismatch, describe_difference(low, me == low ? ours : theirs, high, me == low ? theirs : ours));
  }
  return error(moecclMismatch,
               "rank {} and rank {} disagree on the operation, count, type, operator, root or order of an operation "
               "earlier than {} #{}",
               low, high, op_name(op_.signature.op), sequence_);
}

Status AgreedTask::check_blocks(uint32_t peer) {
  const transport::BlockWord& block = fabric().link(peer).block(sequence_);
  const uint64_t sends = block.count.load(std::memory_order_relaxed);
  const uint64_t expects = block.expects.load(std::memory_order_relaxed);
  const uint64_t we_expect = op_.recv_counts[peer], we_send = op_.send_counts[peer];
  if (sends == we_expect && expects == we_send) return {};
  const bool gives = sends != we_expect;
  const uint32_t me = fabric().rank;
  return error(moecclMismatch,
               "ranks disagree on the split sizes of alltoallv: rank {} sends {} elements, rank {} expects {}",
               gives ? peer : me, gives ? sends : we_send, gives ? me : peer, gives ? we_expect : expects);
}

Status AgreedTask::check_tag(uint32_t peer, uint32_t tag) {
  // The tag belongs to the newest signal. If the peer has finished this operation and runs the next one, it is the next
  // one's tag; the entry, which stays for several operations, then decides. A peer that has signalled this often
  // without entering this operation has run other operations than this rank.
  if (tag == tag_) return {};
  return has_published(peer) ? check_entry(peer) : find_difference(peer);
}

// A peer that entered the same operation with other arguments may never signal, so this compares the entries
// themselves.
Status AgreedTask::diagnose() {
  Fabric& f = fabric();
  if (!entered_) return {};
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank || !has_published(p)) continue;
    MOECCL_TRY(check_entry(p));
    if (is_v()) MOECCL_TRY(check_blocks(p));
  }
  return {};
}

// A peer that has finished this operation may leave, so it is no longer needed.
bool AgreedTask::needs(uint32_t peer) const {
  return load_from_device(fabric().link(peer).board().progress.completed) < sequence_;
}

}  // namespace moeccl::exec
