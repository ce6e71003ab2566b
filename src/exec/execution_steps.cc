// SPDX-License-Identifier: Apache-2.0
// The implementation of each kind of step on the host.
#include <algorithm>

#include "src/algo/tuning.h"
#include "src/base/clock.h"
#include "src/base/device_order.h"
#include "src/exec/execution.h"

namespace moeccl::exec {

using plan::Buffer;
using plan::Range;
using plan::Ref;
using plan::Step;
using plan::StepKind;
using plan::When;

static_assert(algo::tuning::kFar <= transport::kVisibleRing);

Progress Execution::step(const Step& s, uint32_t chunk) {
  switch (s.kind) {
    case StepKind::kWait:
      return wait(s, chunk);
    case StepKind::kSignal:
      return signal(s, chunk);
    case StepKind::kPut:
    case StepKind::kCopy:
      return copy(s, chunk);
    case StepKind::kReduce:
      return reduce(s, chunk);
    case StepKind::kGatherRows:
      return gather_rows(s, chunk);
    case StepKind::kScatterRows:
      return scatter_rows(s, chunk);
    case StepKind::kReduceRows:
      return reduce_rows(s, chunk);
  }
  return fail(error(moecclInternalError, "unknown step kind {}", static_cast<int>(s.kind)));
}

Progress Execution::wait(const Step& s, uint32_t chunk) {
  Fabric& f = fabric();
  if (chunk < s.lag) return Progress::kMoved;
  const bool once = s.when != When::kEvery;
  const uint32_t base = f.awaited[static_cast<size_t>(s.peer) * transport::kSigsPerPeer + s.sig];
  const uint32_t number = base + (once ? 0 : (chunk - s.lag) * s.per_chunk) + s.ordinal + 1;
  const transport::SignalLine& line = f.own->signal(s.peer, s.sig);
  // Acquire: pairs with the release in Link::signal().
  const uint64_t word = load_from_device(line.word);
  if (static_cast<int32_t>(static_cast<uint32_t>(word) - number) < 0) {
    waiting_peer_ = s.peer;
    return Progress::kBlocked;
  }
  if (f.paced[s.peer] && line.visible_ns[number % transport::kVisibleRing].load(std::memory_order_relaxed) > now_ns()) {
    return Progress::kBlocked;
  }
  if (s.peer != f.rank && f.entered[s.peer] < sequence_) {
    Status st = check_tag(s.peer, static_cast<uint32_t>(word >> 32));
    if (st.ok() && is_v()) st = check_blocks(s.peer);
    if (!st.ok()) return fail(std::move(st));
    f.entered[s.peer] = sequence_;
  }
  if (f.cuda && s.peer != f.rank) {
    transport::DeviceSide* const device = f.link(s.peer).device();
    Status st = device == nullptr ? Status() : device->settle();
    if (!st.ok()) return fail(std::move(st));
  }
  return Progress::kMoved;
}

Progress Execution::signal(const Step& s, uint32_t chunk) {
  Fabric& f = fabric();
  const bool once = s.when != When::kEvery;
  const uint32_t number = f.sent[static_cast<size_t>(s.peer) * transport::kSigsPerPeer + s.sig] +
                          (once ? 0 : chunk * s.per_chunk) + s.ordinal + 1;
  if (s.peer == f.rank) {
    f.own->signal(f.rank, s.sig).word.store(static_cast<uint64_t>(tag_) << 32 | number, std::memory_order_release);
    return Progress::kMoved;
  }
  if (f.paced[s.peer] && !f.link(s.peer).pace()->admit(traffic_class_)) {
    waiting_peer_ = s.peer;
    return Progress::kBlocked;
  }
  Status st = f.link(s.peer).signal(s.sig, number, tag_);
  return st.ok() ? Progress::kMoved : fail(std::move(st));
}

uint64_t Execution::governing(const Step& s) const {
  return is_v() ? plan::governing_length(binding_, *choice_.program, s) : binding_.count;
}

Range Execution::range(const Ref& ref, uint64_t length, uint32_t chunk) const {
  Range r = plan::resolve(binding_, *choice_.program, ref, length, chunk);
  if (is_v() && ref.rank != fabric().rank && ref.buffer == Buffer::kInput) {
    // A peer's block for us starts where the peer says; its length was checked against our count. Nothing lies beyond
    // kMostBytes. With this limit, a false value remains a place that address() refuses, instead of wrapping around to
    // a small number.
    const uint64_t start = fabric().link(ref.rank).block(sequence_).displacement.load(std::memory_order_relaxed);
    r.offset = std::min(start, kMostBytes / op_.element_bytes) + moved_ +
               plan::chunk_range(binding_.chunking, length, chunk).offset;
  }
  return r;
}

std::byte* Execution::staging(uint32_t rank) {
  Fabric& f = fabric();
  if (rank == f.rank) return (f.staging != nullptr ? f.staging : f.own->staging()) + half_;
  std::byte* const view = f.link(rank).view().staging;
  return view == nullptr ? nullptr : view + half_;
}

// Finds a peer's buffers from its entry: by address if the peer is a thread of this process, by offset if they are in
// its heap; otherwise they can only be read from. address() checks the heap's bounds at each use.
Status Execution::resolve_peer(uint32_t peer) {
  Fabric& f = fabric();
  PeerBuffers& b = peers_[peer];
  if (b.known) return {};
  // choose() has announced this use: from here on, a failing peer waits for us before it gives its buffers back.
  if (!still_runs(peer)) MOECCL_TRY(check_peer_state(*this, peer));
  if (!has_published(peer))
    return error(moecclInternalError, "rank {}'s buffers are used before it has entered the operation", peer);
  const transport::Entry& e = entry_of(peer);
  uint64_t flags = 0;
  (void)read_signature(e, flags);
  const uint64_t in = e.input.load(std::memory_order_relaxed), out = e.output.load(std::memory_order_relaxed);
  const transport::PeerView& view = f.link(peer).view();
  std::byte* heap = view.heap;
  if (view.same_process && f.heap != nullptr) heap = f.heap;
  const auto in_heap = [&](uint64_t flag, uint64_t place) -> std::byte* {
    if ((flags & flag) != 0 && heap != nullptr && place < (view.same_process ? f.heap_bytes : view.heap_bytes)) {
      return heap + place;
    }
    return (flags & flag) == 0 && view.same_process ? reinterpret_cast<std::byte*>(place) : nullptr;
  };
  b.input = in_heap(kInputInHeap, in);
  b.output = in_heap(kOutputInHeap, out);
  b.input_address = (flags & kInputInHeap) == 0 ? in : 0;
  b.known = true;
  return {};
}

std::byte* Execution::address(const Ref& ref, const Range& r) {
  Fabric& f = fabric();
  const uint64_t offset = r.offset * op_.element_bytes;
  if (ref.buffer == Buffer::kStaging) {
    std::byte* base = staging(ref.rank);
    return base == nullptr ? nullptr : base + offset;
  }
  if (ref.rank == f.rank) {
    // Input is const for the caller; plans write Output only.
    return (ref.buffer == Buffer::kInput ? static_cast<std::byte*>(const_cast<void*>(op_.input))
                                         : static_cast<std::byte*>(op_.output)) +
           offset;
  }
  const PeerBuffers& b = peers_[ref.rank];
  std::byte* base = ref.buffer == Buffer::kInput ? const_cast<std::byte*>(b.input) : b.output;
  if (base == nullptr) return nullptr;
  const transport::PeerView& view = f.link(ref.rank).view();
  if (!view.same_process) {
    // The offset is the peer's word, so stay inside its heap.
    const auto place = static_cast<uint64_t>(base - view.heap);
    const uint64_t end = (r.offset + r.length) * op_.element_bytes;
    if (end > view.heap_bytes || place > view.heap_bytes - end) return nullptr;
  }
  return base + offset;
}

void Execution::account(uint32_t rank, uint64_t bytes, bool stored) {
  if (rank == fabric().rank) return;
  wire_bytes_ += bytes;
  if (!stored) return;
  if (transport::Pace* const pace = fabric().link(rank).pace(); pace != nullptr) pace->wrote(bytes);
  fabric().traffic[rank].add(bytes);
}

Progress Execution::put(uint32_t rank, uint64_t offset, const std::byte* from, uint64_t bytes) {
  transport::PutTurns* const turns = fabric().link(rank).put_turns();
  if (turns != nullptr && !turns->may_put(traffic_class_, bytes)) {
    waiting_peer_ = rank;
    return Progress::kBlocked;
  }
  // Data in the fabric's scratch memory is overwritten by the next packing, so it cannot be posted.
  transport::PostedPuts* const posts = from == fabric().scratch.data() ? nullptr : fabric().link(rank).posted_puts();
  Result<transport::PutState> state =
      posts != nullptr ? posts->post(offset, from, bytes) : fabric().link(rank).put(offset, from, bytes);
  if (!state.ok()) return fail(std::move(state).status());
  if (*state != transport::PutState::kDone) {
    trickled_ = trickled_ || *state == transport::PutState::kMoved;
    waiting_peer_ = rank;
    return Progress::kBlocked;
  }
  packed_ = nullptr;
  if (posts != nullptr && !posts->taken(posts->posted())) posted_.push_back({lane_, rank, posts->posted()});
  wire_bytes_ += bytes;
  fabric().traffic[rank].add(bytes);
  return Progress::kMoved;
}

bool Execution::all_sources_taken() {
  std::erase_if(posted_, [&](const PostedPut& p) { return fabric().link(p.peer).posted_puts()->taken(p.count); });
  if (!posted_.empty()) waiting_peer_ = posted_.front().peer;
  return posted_.empty();
}

// A peer that sees a signal has received everything that was put to it before, so those sources have been read. Any
// other signal, and any store to this rank's memory, may cause a source to be overwritten.
bool Execution::sources_allow(const Step& s) {
  if (s.kind == StepKind::kWait) return true;
  const bool puts = s.dst.rank != fabric().rank && s.dst.buffer == Buffer::kStaging;
  if (s.kind != StepKind::kSignal && puts) return true;
  if (all_sources_taken()) return true;
  return std::none_of(posted_.begin(), posted_.end(), [&](const PostedPut& p) {
    return p.lane == lane_ && (s.kind != StepKind::kSignal || p.peer != s.peer);
  });
}

std::byte* Execution::scratch_for(const Step& s, uint32_t chunk, uint64_t bytes, bool* packed) {
  Fabric& f = fabric();
  if (transport::Rooms* const rooms = f.link(s.dst.rank).rooms(); rooms != nullptr && bytes <= rooms->most()) {
    *packed = false;
    std::byte* const room = rooms->room(bytes);
    if (room == nullptr) waiting_peer_ = s.dst.rank;
    return room;
  }
  *packed = packed_ == &s && packed_chunk_ == chunk;
  if (packed_ != nullptr && !*packed) return nullptr;
  f.scratch.resize(std::max<size_t>(f.scratch.size(), bytes));
  f.scratch_bytes.store(f.scratch.capacity(), std::memory_order_relaxed);
  packed_ = &s;
  packed_chunk_ = chunk;
  return f.scratch.data();
}

Progress Execution::copy(const Step& s, uint32_t chunk) {
  Fabric& f = fabric();
  const kernels::KernelTable& k = *f.kernels;
  const Ref& src_ref = choice_.program->srcs[s.first_src];
  const uint64_t length = governing(s);
  const Range src = range(src_ref, length, chunk), dst = range(s.dst, length, chunk);
  const uint64_t n = std::min(src.length, dst.length), bytes = n * op_.element_bytes;
  if (n == 0) return Progress::kMoved;
  if (!landings_.empty() && s.kind == StepKind::kCopy) {
    const Result<bool> there = landed(s, chunk);
    if (!there.ok()) return fail(there.status());
    if (*there) return Progress::kMoved;
  }
  for (const uint32_t peer : {src_ref.rank, s.dst.rank}) {
    if (peer == f.rank) continue;
    if (Status st = resolve_peer_if_needed(peer, s, src_ref); !st.ok()) return fail(std::move(st));
  }
  std::byte* to = address(s.dst, dst);
  const std::byte* from = address(src_ref, src);
  if (from == nullptr) {
    const PeerBuffers& b = peers_[src_ref.rank];
    if (b.input_address == 0 || src_ref.buffer != Buffer::kInput || f.link(src_ref.rank).reads() == nullptr) {
      return fail(error(moecclRemoteError, "rank {} announced a buffer that cannot be reached from rank {}",
                        src_ref.rank, f.rank));
    }
    account(src_ref.rank, bytes, false);
    Status st = f.link(src_ref.rank).reads()->read(b.input_address + src.offset * op_.element_bytes, to, bytes);
    return st.ok() ? Progress::kMoved : fail(std::move(st).with_context(format("rank {}'s buffer", src_ref.rank)));
  }
  const bool scale = op_.scaled && src_ref.rank == f.rank && src_ref.buffer == Buffer::kInput;
  if (to == nullptr) {
    if (s.dst.buffer != Buffer::kStaging) {
      return fail(error(moecclRemoteError, "rank {} announced a buffer that cannot be reached from rank {}", s.dst.rank,
                        f.rank));
    }
    if (scale) {
      bool packed = false;
      std::byte* scratch = scratch_for(s, chunk, bytes, &packed);
      if (scratch == nullptr) return Progress::kBlocked;
      if (!packed) k.scale_copy[op_.signature.type](scratch, from, n, scale_);
      from = scratch;
    }
    return put(s.dst.rank, half_ + dst.offset * op_.element_bytes, from, bytes);
  }
  account(src_ref.rank, bytes, false);
  account(s.dst.rank, bytes, true);
  if (scale) {
    k.scale_copy[op_.signature.type](to, from, n, scale_);
  } else if (to != from) {
    (!s.read_again && uses_stream(s.dst, bytes) ? k.copy_stream : k.copy)(to, from, bytes);
  }
  return Progress::kMoved;
}

Status Execution::resolve_peer_if_needed(uint32_t peer, const Step& s, const Ref& src) {
  const bool needed =
      (src.rank == peer && src.buffer != Buffer::kStaging) || (s.dst.rank == peer && s.dst.buffer != Buffer::kStaging);
  return needed ? resolve_peer(peer) : Status();
}

Progress Execution::reduce(const Step& s, uint32_t chunk) {
  Fabric& f = fabric();
  const uint64_t length = governing(s);
  const Range dst = range(s.dst, length, chunk);
  if (dst.length == 0) return Progress::kMoved;
  const uint64_t bytes = dst.length * op_.element_bytes;
  srcs_.resize(s.n_srcs);
  if (op_.scaled) scales_.resize(s.n_srcs);
  bool any_scaled = false;
  for (uint32_t i = 0; i < s.n_srcs; ++i) {
    const Ref& ref = choice_.program->srcs[s.first_src + i];
    if (ref.rank != f.rank && ref.buffer != Buffer::kStaging) {
      if (Status st = resolve_peer(ref.rank); !st.ok()) return fail(std::move(st));
    }
    srcs_[i] = address(ref, range(ref, length, chunk));
    if (srcs_[i] == nullptr) {
      return fail(
          error(moecclRemoteError, "rank {} announced a buffer that cannot be reached from rank {}", ref.rank, f.rank));
    }
    account(ref.rank, bytes, false);
    if (op_.scaled) {
      const bool own_input = ref.rank == f.rank && ref.buffer == Buffer::kInput;
      scales_[i] = own_input ? scale_ : unit_scale(op_.signature.type);
      any_scaled = any_scaled || own_input;
    }
  }
  kernels::ReduceArgs args;
  args.dst = address(s.dst, dst);
  args.srcs = srcs_.data();
  args.scales = any_scaled ? scales_.data() : nullptr;
  args.count = dst.length;
  args.n_srcs = s.n_srcs;
  args.divisor = !s.final_reduce ? 0 : s.divisor > 0 ? s.divisor : op_.divisor;
  args.stream = !s.read_again && uses_stream(s.dst, bytes);
  copies_.clear();
  if (s.copies > 0 && f.kernels->reduces_to_many) {
    if (Status st = find_copies(s, dst, length, chunk); !st.ok()) return fail(std::move(st));
  }
  if (!copies_.empty()) {
    args.copies = copies_.data();
    args.n_copies = merged_ = s.copies;
    args.stream = uses_stream(s.dst, bytes);
    for (uint16_t i = 1; i <= s.copies; ++i) args.stream |= !(&s)[i].read_again && uses_stream((&s)[i].dst, bytes);
  }
  // In place, the lines of dst have just been read: a store past the cache would only evict them.
  args.stream = args.stream && std::find(srcs_.begin(), srcs_.end(), args.dst) == srcs_.end();
  f.kernels->reduce[op_.signature.type][static_cast<size_t>(op_.reduce)](args);
  return Progress::kMoved;
}

// A kernel stores either all of its output or none of it past the cache, and only where all destinations have the same
// offset in their cache lines. Data in the staging that another core reads must not stay modified in this core's cache;
// such data is copied separately.
bool Execution::merges(const Step& s, const Range& dst, const Step& move, const std::byte* to) {
  const uint64_t bytes = dst.length * op_.element_bytes;
  if (move.dst.buffer != Buffer::kStaging || move.read_again || !uses_stream(move.dst, bytes)) return true;
  const std::byte* const result = address(s.dst, dst);
  const auto place = [](const std::byte* p) { return reinterpret_cast<uintptr_t>(p) % 64; };
  const bool in_place = std::find(srcs_.begin(), srcs_.end(), result) != srcs_.end();
  return uses_stream(s.dst, bytes) && !in_place && place(to) == place(result);
}

Status Execution::find_copies(const Step& s, const Range& dst, uint64_t length, uint32_t chunk) {
  for (uint16_t i = 0; i < s.copies; ++i) {
    const Step& move = (&s)[1 + i];  // in the same lane: finalize() counted them
    const Range to = range(move.dst, length, chunk);
    if (move.dst.rank != fabric().rank && move.dst.buffer != Buffer::kStaging) {
      MOECCL_TRY(resolve_peer(move.dst.rank));
    }
    std::byte* address_of_copy = to.length == dst.length ? address(move.dst, to) : nullptr;
    if (address_of_copy == nullptr || !merges(s, dst, move, address_of_copy)) {
      copies_.clear();
      return {};
    }
    copies_.push_back(address_of_copy);
  }
  for (uint16_t i = 0; i < s.copies; ++i) account((&s)[1 + i].dst.rank, dst.length * op_.element_bytes, true);
  return {};
}

std::byte* Execution::row_base(const Ref& ref, uint32_t chunk, uint32_t plane) {
  if (ref.buffer == Buffer::kStaging) {
    std::byte* base = staging(ref.rank);
    return base == nullptr ? nullptr : base + plane_base(ref, chunk, plane);
  }
  const bool input = ref.buffer == Buffer::kInput;
  const void* base = plane == 0 ? (input ? op_.input : op_.output) : (input ? op_.scales.input : op_.scales.output);
  return static_cast<std::byte*>(const_cast<void*>(base));
}

template <class Write>
Progress Execution::write_rows(const Step& s, uint32_t chunk, uint32_t plane, uint64_t first, uint64_t count,
                               Write&& write) {
  const uint64_t bytes = count * plane_bytes(plane);
  if (std::byte* const base = row_base(s.dst, chunk, plane); base != nullptr) {
    write(base, first);
    account(s.dst.rank, bytes, true);
    return Progress::kMoved;
  }
  bool packed = false;
  std::byte* scratch = scratch_for(s, chunk, bytes, &packed);
  if (scratch == nullptr) {
    if (plane > 0 && packed_ == nullptr) {  // the earlier planes have been put
      packed_ = &s;
      packed_chunk_ = chunk;
      packed_plane_ = plane;
    }
    return Progress::kBlocked;
  }
  packed_plane_ = plane;
  if (!packed) write(scratch, 0);
  const uint64_t offset = plane_base(s.dst, chunk, plane) + first * plane_bytes(plane);
  return put(s.dst.rank, half_ + offset, scratch, bytes);
}

Progress Execution::gather_rows(const Step& s, uint32_t chunk) {
  const plan::RowBlock& block = binding_.rows[static_cast<size_t>(s.rows) * binding_.chunking.n_chunks + chunk];
  if (block.count == 0) return Progress::kMoved;
  for (uint32_t plane = first_plane(s, chunk); plane < n_planes(); ++plane) {
    kernels::CopyRowsArgs args;
    args.src = row_base(choice_.program->srcs[s.first_src], chunk, plane);
    args.src_index = block.src_index;
    args.src_first = block.src_first;
    args.count = block.count;
    args.row_bytes = plane_bytes(plane);
    if (row_base(s.dst, chunk, plane) == nullptr && args.src_index == nullptr && n_planes() == 1) {  // as they lie
      const uint64_t offset = plan::slot_base(binding_, *choice_.program, s.dst, chunk) + block.dst_first;
      return put(s.dst.rank, half_ + offset * op_.element_bytes,
                 static_cast<const std::byte*>(args.src) + block.src_first * args.row_bytes,
                 block.count * args.row_bytes);
    }
    const auto copy_to = [&](std::byte* base, uint64_t first) {
      args.dst = base;
      args.dst_first = first;
      fabric().kernels->copy_rows(args);
    };
    const Progress p = write_rows(s, chunk, plane, block.dst_first, block.count, copy_to);
    if (p != Progress::kMoved) return p;
  }
  return Progress::kMoved;
}

Progress Execution::scatter_rows(const Step& s, uint32_t chunk) {
  const plan::RowBlock& block = binding_.rows[static_cast<size_t>(s.rows) * binding_.chunking.n_chunks + chunk];
  if (block.count == 0) return Progress::kMoved;
  for (uint32_t plane = 0; plane < n_planes(); ++plane) {
    kernels::CopyRowsArgs args;
    args.src = row_base(choice_.program->srcs[s.first_src], chunk, plane);
    args.dst = row_base(s.dst, chunk, plane);
    args.src_index = block.src_index;
    args.dst_index = block.dst_index;
    args.src_first = block.src_first;
    args.dst_first = block.dst_first;
    args.count = block.count;
    args.row_bytes = plane_bytes(plane);
    args.stream = stream_output_;
    if (block.weights == nullptr) {
      fabric().kernels->copy_rows(args);
    } else {
      fabric().kernels->scale_rows[op_.signature.type]({args, block.weights});
    }
  }
  return Progress::kMoved;
}

Progress Execution::reduce_rows(const Step& s, uint32_t chunk) {
  const plan::SumBlock& block = binding_.sums[static_cast<size_t>(s.rows) * binding_.chunking.n_chunks + chunk];
  if (block.count == 0) return Progress::kMoved;
  if (block.src_first != nullptr) return reduce_stretches(s, chunk, block);
  srcs_.resize(s.n_srcs);
  for (uint32_t plane = first_plane(s, chunk); plane < n_planes(); ++plane) {
    for (uint32_t i = 0; i < s.n_srcs; ++i) srcs_[i] = row_base(choice_.program->srcs[s.first_src + i], chunk, plane);
    kernels::ReduceRowsArgs args;
    args.bases = srcs_.data();
    args.offsets = block.offsets;
    args.terms = block.terms;
    args.weights = block.weights;
    args.dst_index = block.dst_index;
    args.count = block.count;
    args.row_elements = plane_bytes(plane) / moecclTypeSize(op_.signature.type);
    args.grouped = op_.grouped;
    args.stream = uses_stream(s.dst, block.count * plane_bytes(plane));
    const auto sum_to = [&](std::byte* base, uint64_t first) {
      args.dst = base;
      args.dst_first = first;
      fabric().kernels->reduce_rows[op_.signature.type](args);
    };
    const Progress p = write_rows(s, chunk, plane, block.dst_first, block.count, sum_to);
    if (p != Progress::kMoved) return p;
  }
  return Progress::kMoved;
}

Progress Execution::reduce_stretches(const Step& s, uint32_t chunk, const plan::SumBlock& block) {
  srcs_.resize(s.n_srcs);
  for (uint32_t i = 0; i < s.n_srcs; ++i)
    srcs_[i] = row_base(choice_.program->srcs[s.first_src + i], chunk, 0) + block.src_first[i] * op_.element_bytes;
  const uint64_t bytes = block.count * op_.element_bytes;
  kernels::ReduceArgs args;
  args.srcs = srcs_.data();
  args.count = bytes / moecclTypeSize(op_.signature.type);
  args.n_srcs = s.n_srcs;
  args.divisor = s.final_reduce ? s.divisor : 0;
  args.stream = uses_stream(s.dst, bytes);
  return write_rows(s, chunk, 0, block.dst_first, block.count, [&](std::byte* base, uint64_t first) {
    args.dst = base + first * op_.element_bytes;
    fabric().kernels->reduce[op_.signature.type][static_cast<size_t>(op_.reduce)](args);
  });
}

}  // namespace moeccl::exec
