// SPDX-License-Identifier: Apache-2.0
#include "src/comm/collective.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "src/base/data_type.h"
#include "src/base/hash.h"
#include "src/comm/cuda_stream.h"
#include "src/driver/cuda.h"

namespace moeccl::comm {
namespace {

using plan::reduces;
using plan::rooted;

// Return true if this rank's send (recv) buffer is used at all.
bool reads_send(const CollectiveCall& c, uint32_t rank) {
  return !plan::root_gives(c.op) || static_cast<uint32_t>(c.root) == rank;
}
bool writes_recv(const CollectiveCall& c, uint32_t rank) {
  return !plan::root_takes(c.op) || static_cast<uint32_t>(c.root) == rank;
}

Status check_reduce(Communicator& comm, const CollectiveCall& c, exec::Operation& op, bool* scaled) {
  using kernels::ReduceOp;
  // Avg is a sum followed by a division. A sum of fp16 or fp8 may be out of range where the average is not, and plans
  // store partial sums in the type, so these divide each rank's Input first, as NCCL does for all floats.
  static constexpr ReduceOp kBuiltIn[] = {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMax, ReduceOp::kMin,
                                          ReduceOp::kSum};
  static_assert(std::size(kBuiltIn) == MOECCL_NUM_REDUCTIONS && moecclProd == 1 && moecclMax == 2 && moecclMin == 3);
  *scaled = c.reduce < 0 || c.reduce >= MOECCL_NUM_REDUCTIONS;
  if (!*scaled) {
    op.reduce = kBuiltIn[c.reduce];
    if (c.reduce == moecclAvg) {
      *scaled = c.type == moecclFloat16 || c.type == moecclFloat8e4m3 || c.type == moecclFloat8e5m2;
      if (*scaled)
        op.scale.f32 = 1.0F / static_cast<float>(comm.n_ranks());
      else
        op.divisor = comm.n_ranks();
    }
  } else {
    const std::optional<PreMul> made = comm.premuls().find(c.reduce);
    if (!made)
      return bad(c.op, "op", format("{}", c.reduce),
                 "a built-in operator or one of moecclRedOpCreatePreMulSum of this communicator");
    if (made->type != c.type)
      return bad(c.op, "type", type_name(c.type),
                 format("{}, the type of the operator's scalar", type_name(made->type)));
    op.scale = made->scalar;
    op.scale_at = made->scalar_at;
  }
  op.signature.reduce =
      static_cast<uint8_t>(c.reduce < MOECCL_NUM_REDUCTIONS && c.reduce >= 0 ? c.reduce : exec::kPreMulSum);
  return {};
}

// Returns true if a piece of send shares a byte with a piece of recv, for an AllToAllv with these sizes.
bool pieces_overlap(const CollectiveCall& c, const exec::Operation& op) {
  struct Piece {
    uint64_t begin, end;
    bool received;
  };
  std::vector<Piece> pieces;
  const auto add = [&](const void* base, uint64_t at, uint64_t count, bool received) {
    const uint64_t begin = reinterpret_cast<uint64_t>(base) + at * op.element_bytes;
    if (count > 0) pieces.push_back({begin, begin + count * op.element_bytes, received});
  };
  for (size_t r = 0; r < op.send_counts.size(); ++r) {
    add(c.send, op.send_displs[r], op.send_counts[r], false);
    add(c.recv, op.recv_displs[r], op.recv_counts[r], true);
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  uint64_t ends[2] = {};  // how far the pieces so far reach, by Piece::received
  for (const Piece& p : pieces) {
    if (p.begin < ends[p.received ? 0 : 1]) return true;
    ends[p.received ? 1 : 0] = std::max(ends[p.received ? 1 : 0], p.end);
  }
  return false;
}

Status check_overlap(const Communicator& comm, const CollectiveCall& c, const exec::Operation& op, uint64_t in_bytes,
                     uint64_t out_bytes) {
  if (!reads_send(c, comm.rank()) || !writes_recv(c, comm.rank())) return {};
  if (!overlap(c.send, in_bytes, c.recv, out_bytes)) return {};
  if (plan::facts(c.op).private_sizes && !pieces_overlap(c, op)) return {};
  const auto* send = static_cast<const std::byte*>(c.send);
  const auto* recv = static_cast<const std::byte*>(c.recv);
  const uint64_t own = c.count * op.element_bytes * comm.rank();
  // For in-place calls: the position of a rank's single block within the buffer of all ranks' blocks.
  const bool one_in = plan::facts(c.op).in == plan::Blocks::kOne, one_out = plan::facts(c.op).out == plan::Blocks::kOne;
  const bool never = plan::facts(c.op).private_sizes || plan::facts(c.op).in == plan::Blocks::kGroups;
  const bool in_place = !never && (one_in == one_out ? send == recv : one_in ? send == recv + own : recv == send + own);
  if (in_place) return {};
  return error(
      moecclInvalidArgument, "{}: send and recv overlap, {}: give separate buffers", exec::op_name(c.op),
      never ? "but this operation has no in-place form" : "but not as the in-place form does (see the header)");
}

Status check_sizes(moecclOp_t op, const char* name, const size_t* counts, const size_t* displs, uint32_t n,
                   uint64_t most) {
  for (uint32_t r = 0; r < n; ++r) {
    if (counts[r] <= most && displs[r] <= most) continue;
    return bad(op, name, format("{} elements at {} for rank {}", counts[r], displs[r], r), "sizes that fit in memory");
  }
  return {};
}

Status copy_splits(const Communicator& comm, const CollectiveCall& c, exec::Operation& op, uint64_t* send_bytes,
                   uint64_t* recv_bytes) {
  if (c.send_counts == nullptr) return bad(c.op, "send_counts", "NULL", "an array of one count per rank");
  if (c.send_displs == nullptr) return bad(c.op, "send_displs", "NULL", "an array of one displacement per rank");
  if (c.recv_counts == nullptr) return bad(c.op, "recv_counts", "NULL", "an array of one count per rank");
  if (c.recv_displs == nullptr) return bad(c.op, "recv_displs", "NULL", "an array of one displacement per rank");
  const uint32_t n = comm.n_ranks();
  for (std::vector<uint64_t>* v : {&op.send_counts, &op.send_displs, &op.recv_counts, &op.recv_displs}) v->resize(n);
  uint64_t all_bits = 0, send_end = 0, recv_end = 0;
  for (uint32_t r = 0; r < n; ++r) {
    const uint64_t sends = op.send_counts[r] = c.send_counts[r], send_at = op.send_displs[r] = c.send_displs[r];
    const uint64_t recvs = op.recv_counts[r] = c.recv_counts[r], recv_at = op.recv_displs[r] = c.recv_displs[r];
    all_bits |= sends | send_at | recvs | recv_at;
    if (sends > 0) send_end = std::max(send_end, sends + send_at);
    if (recvs > 0) recv_end = std::max(recv_end, recvs + recv_at);
  }
  constexpr uint64_t kFits = kMostBufferBytes / 16;  // below this, a count plus a displacement fits for any type
  if (all_bits >= kFits) {
    const uint64_t most = kMostBufferBytes / op.element_bytes / 2;
    MOECCL_TRY(check_sizes(c.op, "send_counts", c.send_counts, c.send_displs, n, most));
    MOECCL_TRY(check_sizes(c.op, "recv_counts", c.recv_counts, c.recv_displs, n, most));
  }
  *send_bytes = send_end * op.element_bytes;
  *recv_bytes = recv_end * op.element_bytes;
  if (c.send_counts[comm.rank()] != c.recv_counts[comm.rank()]) {
    return bad(c.op, "recv_counts of this rank for itself", format("{}", c.recv_counts[comm.rank()]),
               format("{}, what it sends itself", c.send_counts[comm.rank()]));
  }
  return {};
}

// Updates a prepared call's operation for a call like it. *ready stays false if the call needs a full check.
Status renew(Communicator& comm, PreparedCall& prepared, const CollectiveCall& c, bool* ready) {
  exec::Operation& op = prepared.operation;
  uint64_t in_bytes = prepared.in_bytes, out_bytes = prepared.out_bytes;
  if (plan::facts(c.op).private_sizes) {
    if (prepared.tried && (op.ran = comm.still_small()) == nullptr) return {};
    MOECCL_TRY(copy_splits(comm, c, op, &in_bytes, &out_bytes));
  }
  if ((in_bytes > 0 && c.send == nullptr) || (out_bytes > 0 && c.recv == nullptr)) return {};
  const auto shift = [](const CollectiveCall& call) {
    return reinterpret_cast<uint64_t>(call.recv) - reinterpret_cast<uint64_t>(call.send);
  };
  const bool same_shift =
      !plan::facts(c.op).private_sizes && shift(c) == shift(prepared.call);  // the same in-place form
  *ready = same_shift || !overlap(c.send, in_bytes, c.recv, out_bytes);
  op.input = c.send;
  op.output = c.recv;
  return {};
}

// Called after the operation has run, to keep what prepare_collective() prepared.
void keep(const Communicator& comm, PreparedCall& prepared, const CollectiveCall& c, uint64_t plans) {
  const exec::Operation& op = prepared.operation;
  const bool eager = comm.runs_eagerly(op);
  prepared.tried = eager && !static_cast<const PlanSlot*>(op.keep.get())->tried.empty();
  if (!eager || op.scaled || !comm.runs_on_host() || (prepared.tried && !plan::facts(c.op).private_sizes)) return;
  prepared.plans = plans;
  prepared.call = c;
  const uint64_t block_bytes = c.count * op.element_bytes;
  const bool reads = reads_send(c, comm.rank()), writes = writes_recv(c, comm.rank());
  prepared.in_bytes = reads ? block_bytes * plan::in_blocks(c.op, comm.n_ranks()) : 0;
  prepared.out_bytes = writes ? block_bytes * plan::out_blocks(c.op, comm.n_ranks()) : 0;
}

// Prepares an AllToAllv on the persistent kernel, whatever its size, because no rank knows the others' sizes. The
// kernel knows all sizes before its first step, so the plan for the rest of large blocks runs at once.
Status prepare_splits(Communicator& comm, exec::Operation& op) {
  const PlanKey key{op.signature.op, 0, 0, static_cast<uint32_t>(op.element_bytes), false, false};
  MOECCL_ASSIGN_OR_RETURN(const std::shared_ptr<PlanSlot> cached, comm.cuda()->kernel_side()->selector().get(key));
  op.runner = &comm.cuda()->kernel_side()->runner();
  comm.attach(op, cached, 0, false);
  if (op.for_rest == nullptr) return {};
  op.choice = *std::exchange(op.for_rest, nullptr);
  op.choice.program_hash = hash_combine(op.choice.plan_hash, 1);
  return {};
}

}  // namespace

Status check_count(const plan::LevelTree& tree, moecclOp_t op, uint64_t count, uint64_t element_bytes) {
  const uint32_t groups = tree.n_tensor_groups();
  const uint64_t blocks =
      std::max(plan::in_blocks(op, tree.n_ranks, groups), plan::out_blocks(op, tree.n_ranks, groups));
  if (plan::facts(op).private_sizes || fits_in_memory(count, element_bytes, blocks)) return {};
  return bad(op, "count", format("{}", count), "a size that fits in memory");
}

Status prepare_collective(Communicator& comm, const CollectiveCall& c, exec::Operation& op) {
  MOECCL_TRY(comm.usable());
  op.element_bytes = moecclTypeSize(c.type);
  if (op.element_bytes == 0) return bad(c.op, "type", format("{}", static_cast<int>(c.type)), "a moecclDataType_t");
  if (rooted(c.op) && (c.root < 0 || static_cast<uint32_t>(c.root) >= comm.n_ranks())) {
    return bad(c.op, "root", format("{}", c.root), format("a rank from 0 to {}", comm.n_ranks() - 1));
  }
  // A prepared call's memory held another operation before.
  op.signature = {};
  for (std::vector<uint64_t>* v : {&op.send_counts, &op.send_displs, &op.recv_counts, &op.recv_displs}) v->clear();
  op.signature.op = c.op;
  op.signature.type = c.type;
  op.signature.count = c.count;
  bool scaled = false;
  if (reduces(c.op)) MOECCL_TRY(check_reduce(comm, c, op, &scaled));
  uint64_t in_bytes = 0, out_bytes = 0;
  if (plan::facts(c.op).private_sizes) {
    op.signature.count = 0;  // private to each rank
    MOECCL_TRY(copy_splits(comm, c, op, &in_bytes, &out_bytes));
  } else {
    MOECCL_TRY(check_count(comm.tree(), c.op, c.count, op.element_bytes));
    const uint32_t groups = comm.tree().n_tensor_groups();
    in_bytes = c.count * op.element_bytes * plan::in_blocks(c.op, comm.n_ranks(), groups);
    out_bytes = c.count * op.element_bytes * plan::out_blocks(c.op, comm.n_ranks(), groups);
  }
  if (in_bytes > 0 && c.send == nullptr && reads_send(c, comm.rank()))
    return bad(c.op, "send", "NULL", format("{} bytes", in_bytes));
  if (out_bytes > 0 && c.recv == nullptr && writes_recv(c, comm.rank()))
    return bad(c.op, "recv", "NULL", format("{} bytes", out_bytes));
  MOECCL_TRY(check_overlap(comm, c, op, in_bytes, out_bytes));
  op.input = c.send;
  op.output = c.recv;
  const void* const reads = in_bytes > 0 && reads_send(c, comm.rank()) ? c.send : nullptr;
  const void* const writes = out_bytes > 0 && writes_recv(c, comm.rank()) ? c.recv : nullptr;
  if (reads == nullptr && writes == nullptr) comm.hint(c.send, c.recv);
  MOECCL_ASSIGN_OR_RETURN(op.runner, comm.place(reads, writes, {in_bytes, out_bytes}));
  if (op.scale_at != nullptr && !op.on_device())
    return bad(c.op, "op", "an operator whose scalar is CUDA memory", "buffers of CUDA memory with it");
  if (plan::facts(c.op).private_sizes && op.on_device() && comm.cuda()->kernel_side() != nullptr)
    return prepare_splits(comm, op);
  const bool in_place = c.op == moecclOpAllToAll && c.send == c.recv && in_bytes > 0;
  return comm.prepare(op, rooted(c.op) ? static_cast<uint32_t>(c.root) : 0, scaled, in_place);
}

Status or_break_off(Communicator& comm, Stream* stream, Status prepared) {
  const Code code = prepared.code();
  if (code != moecclInternalError && code != moecclOutOfMemory && code != moecclSystemError) return prepared;
  const CudaStream* cuda = stream != nullptr ? stream->as_cuda() : nullptr;
  // A capture that has failed is an error here.
  const Result<bool> captured = cuda != nullptr ? cuda->capturing() : Result<bool>(false);
  if (captured.ok() && !captured.value()) comm.break_off(prepared);
  return prepared;
}

Status run_collective(Communicator& comm, const CollectiveCall& call) {
  return comm.in_turn([&](PreparedCalls& calls) -> Status {
    PreparedCall& prepared = calls.of(call);
    const uint64_t plans = comm.selector().version();
    if (prepared.is(call, plans) && comm.is_usable()) {
      bool ready = false;
      MOECCL_TRY(renew(comm, prepared, call, &ready));
      if (ready) return exec::run_eager(comm.fabric(), prepared.operation);
    }
    prepared.plans = 0;
    prepared.operation.reset();
    comm.hint(static_cast<Stream*>(nullptr));
    MOECCL_TRY(or_break_off(comm, nullptr, prepare_collective(comm, call, prepared.operation)));
    exec::Operation& op = prepared.operation;
    const Status status = comm.run(op);
    // A trial may have run another plan, with which the others may not go on.
    if (op.signature.plan == static_cast<const PlanSlot*>(op.keep.get())->signature) keep(comm, prepared, call, plans);
    return status;
  });
}

Status prepare_message(Communicator& comm, const void* data, size_t count, moecclDataType_t type, int peer,
                       bool is_send, exec::Message& message) {
  MOECCL_TRY(comm.usable());
  const char* name = is_send ? "send" : "recv";
  const size_t element = moecclTypeSize(type);
  if (element == 0)
    return error(moecclInvalidArgument, "{}: type is {}: give a moecclDataType_t", name, static_cast<int>(type));
  if (peer < 0 || static_cast<uint32_t>(peer) >= comm.n_ranks()) {
    return error(moecclInvalidArgument, "{}: peer is {}: give a rank from 0 to {}", name, peer, comm.n_ranks() - 1);
  }
  if (!fits_in_memory(count, element, 1)) {
    return error(moecclInvalidArgument, "{}: count is {}: give a size that fits in memory", name, count);
  }
  if (data == nullptr && count > 0)
    return error(moecclInvalidArgument, "{}: buffer is NULL: give {} bytes", name, count * element);
  message = {static_cast<uint32_t>(peer),
             static_cast<std::byte*>(const_cast<void*>(data)),
             count * element,
             is_send,
             nullptr,
             type,
             comm.priority_of(moecclOpSendRecv)};
  if (count == 0) comm.hint(data, nullptr);
  MOECCL_ASSIGN_OR_RETURN(message.runner, comm.place(count > 0 ? data : nullptr, nullptr, {message.bytes}));
  return {};
}

Status create_premul(Communicator& comm, const void* scalar, moecclDataType_t type, moecclRedOp_t* op) {
  const size_t bytes = moecclTypeSize(type);
  if (scalar == nullptr) return error(moecclInvalidArgument, "scalar is NULL: give the address of one element");
  if (op == nullptr) return error(moecclInvalidArgument, "op is NULL: give the address of a moecclRedOp_t");
  if (bytes == 0) return error(moecclInvalidArgument, "type is {}: give a moecclDataType_t", static_cast<int>(type));
  MOECCL_TRY(comm.check_reach({scalar}));
  PreMul p;
  p.type = type;
  if (!comm.runs_on_host() && driver::cuda::pointed(scalar).on_device()) {
    p.scalar_at = scalar;
  } else {
    p.scalar = kernels::scalar_from(scalar, type);
  }
  *op = comm.premuls().add(p);
  return {};
}

Status destroy_premul(Communicator& comm, moecclRedOp_t op) {
  if (comm.premuls().remove(op)) return {};
  return error(moecclInvalidArgument, "op is {}: give an operator of moecclRedOpCreatePreMulSum that was not destroyed",
               op);
}

}  // namespace moeccl::comm
