// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/walk_failure.h"

#include <algorithm>
#include <atomic>

#include "kernels/cuda/tables_args.h"
#include "src/base/device_order.h"
#include "src/exec/cuda/urgent_stream.h"
#include "src/exec/message.h"
#include "src/exec/operation.h"

namespace moeccl::exec {

using moeccl::cuda::WalkFailure;
using moeccl::cuda::WalkReport;

namespace {

uint64_t load(const uint64_t& word) {
  return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_relaxed);
}

Signature signature_of(const moeccl::cuda::WalkEntry& e) {
  return unpack(load(e.signature), load(e.count), load(e.plan));
}

// Returns why an update on the device left no tables.
Status no_tables(const std::string& what, moeccl::cuda::TableFault fault, uint64_t rank, uint64_t value) {
  switch (fault) {
    case moeccl::cuda::TableFault::kTokens:
      return error(
          moecclInvalidArgument,
          "{} found its routing empty: rank {} counts {} tokens in n_tokens_device, more than the n_tokens rows "
          "of its topk_index",
          what, rank, value);
    case moeccl::cuda::TableFault::kWeights:
      return error(moecclMismatch,
                   "{} found its routing empty: topk_weight must be NULL on all ranks or on none, and rank {} differs",
                   what, rank);
    default:
      return error(moecclInvalidArgument,
                   "{} found its routing empty: topk_index[{}] of rank {} names an expert that does not exist, or one "
                   "twice",
                   what, value, rank);
  }
}

// Returns what else may keep a peer on the same device from coming, or "".
std::string beside(driver::cuda::Context context) {
  return is_shared(context) ? format("; ranks share the device: {}", held_up()) : "";
}

Status message_failure(WalkFailure kind, const WalkReport& r, const Fabric& fabric, driver::cuda::Context context) {
  Message m;
  m.peer = static_cast<uint32_t>(load(r.peer));
  m.bytes = load(r.expected);
  m.is_send = load(r.step) != 0;
  switch (kind) {
    case WalkFailure::kMessageSize:
      return sizes_differ(m.peer, load(r.seen), fabric.rank, m.bytes);
    case WalkFailure::kMessageType:
      return types_differ(m.peer, load(r.seen), fabric.rank, load(r.own.signature));
    case WalkFailure::kMessageStopped:
      return error(moecclAborted, "{} was ended on the device", m.describe());
    default:
      return error(moecclTimeout, "{} did not finish within {} ms on the device: rank {} did not {} it{}", m.describe(),
                   fabric.timeout_ms, m.peer, m.is_send ? "receive" : "send", beside(context));
  }
}

}  // namespace

Status failure_of(const WalkReport& r, const Fabric& fabric, driver::cuda::Context context) {
  // Acquire: pairs with the release in walk_fail() on the device.
  const auto kind = static_cast<WalkFailure>(load_from_device(std::atomic_ref(const_cast<uint64_t&>(r.kind))));
  if (kind == WalkFailure::kNone) return {};
  const Signature own = signature_of(r.own);
  const uint64_t peer = load(r.peer);
  const std::string what =
      format("{} (count {}, operation {} of the persistent kernel)", op_name(own.op), own.count, load(r.seq));
  const std::string where = format("lane {}, step {}, chunk {}", load(r.lane), load(r.step), load(r.chunk));
  const uint32_t me = fabric.rank;
  if (kind >= WalkFailure::kMessageLate) return message_failure(kind, r, fabric, context);
  if (kind == WalkFailure::kMismatch && peer < fabric.n_ranks) {
    const auto other = static_cast<uint32_t>(peer);
    const Signature theirs = signature_of(r.entry);
    const bool differ = pack(own, 0) != pack(theirs, 0) || own.count != theirs.count || own.plan != theirs.plan;
    if (load(r.entry.seq) == load(r.seq) && differ) {
      return Status(moecclMismatch, describe_difference(std::min(me, other), me < other ? own : theirs,
                                                        std::max(me, other), me < other ? theirs : own));
    }
    return error(moecclMismatch,
                 "rank {} and rank {} disagree on the operation, count, type, operator, root or order of an "
                 "operation earlier than {}",
                 std::min(me, other), std::max(me, other), what);
  }
  if (kind == WalkFailure::kSplits && peer < fabric.n_ranks) {
    const bool sends = load(r.step) == 0;
    const uint64_t theirs = load(r.seen), ours = load(r.expected);
    return error(moecclMismatch,
                 "ranks disagree on the split sizes of alltoallv: rank {} sends {} elements, rank {} expects {}",
                 sends ? me : static_cast<uint32_t>(peer), sends ? ours : theirs,
                 sends ? static_cast<uint32_t>(peer) : me, sends ? theirs : ours);
  }
  if (kind == WalkFailure::kNoTables && load(r.step) != 0)
    return no_tables(what, static_cast<moeccl::cuda::TableFault>(load(r.step)), load(r.expected), load(r.chunk));
  if (kind == WalkFailure::kNoTables) {
    return error(
        moecclInvalidUsage,
        "{} of a graph found its routing empty, because the routing's last update failed: update it before the "
        "graph is replayed",
        what);
  }
  if (kind == WalkFailure::kBeside) {
    return error(moecclInvalidUsage,
                 "a graph's replay ran beside operation {} of the persistent kernel, and one of the two is {} (count "
                 "{}): order them, because a call on a host stream or on no stream is launched later by a thread "
                 "(docs/cuda.md)",
                 load(r.seq), op_name(own.op), own.count);
  }
  if (kind == WalkFailure::kStopped) return error(moecclAborted, "{} was ended on the device ({})", what, where);
  const std::string whom =
      peer < fabric.n_ranks ? format("rank {}", peer) : std::string("its own blocks, which have not all started");
  return error(moecclTimeout,
               "{} did not finish within {} ms on the device; it waits in {} for {} (number {}, seen {}){}", what,
               fabric.timeout_ms, where, whom, load(r.expected), load(r.seen), beside(context));
}

}  // namespace moeccl::exec
