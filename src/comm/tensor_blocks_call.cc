// SPDX-License-Identifier: Apache-2.0
#include "src/comm/tensor_blocks_call.h"

#include <algorithm>
#include <array>

#include "src/algo/tensor_blocks.h"
#include "src/comm/collective.h"
#include "src/comm/prove_if_asked.h"

namespace moeccl::comm {
namespace {

// What determines a call's plan.
struct Key {
  std::vector<uint64_t> counts;
  uint32_t element_bytes = 1;
  bool cuda = false;
  uint64_t staging_bytes = 0, plans = 0;  // plans: Selector::version()
  friend bool operator==(const Key&, const Key&) = default;
};
// A call's plan. Dispatch, combine and both backward passes of a step use the same counts or their transpose, so the
// plans of the last two kinds of calls are kept.
struct Kept {
  Key key;
  uint64_t in_bytes = 0, out_bytes = 0;
  algo::BoundRows bound;
  exec::Choice choice;
};
using LastTwo = std::array<std::shared_ptr<const Kept>, 2>;  // the latest first

Result<std::vector<uint64_t>> read_counts(const size_t* counts, uint32_t groups, size_t element_bytes) {
  if (counts == nullptr)
    return bad(moecclOpTensorAllToAllv, "counts", "NULL",
               format("{} numbers, one for each pair of groups", groups * groups));
  const uint64_t most = std::min(kMostExpertElements, kMostBufferBytes / element_bytes);
  std::vector<uint64_t> all(counts, counts + size_t{groups} * groups);
  uint64_t sum = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] > most - sum)
      return bad(moecclOpTensorAllToAllv, format("counts[{}]", i).c_str(), format("{}", all[i]),
                 "sizes that fit in memory");
    sum += all[i];
  }
  return all;
}

}  // namespace

Status prepare_tensor_blocks(Communicator& comm, const TensorBlocksCall& call, exec::Operation& op) {
  constexpr moecclOp_t kOp = moecclOpTensorAllToAllv;
  MOECCL_TRY(comm.usable());
  op.element_bytes = moecclTypeSize(call.type);
  if (op.element_bytes == 0) return bad(kOp, "type", format("{}", static_cast<int>(call.type)), "a moecclDataType_t");
  MOECCL_ASSIGN_OR_RETURN(std::vector<uint64_t> counts,
                          read_counts(call.counts, comm.tree().n_tensor_groups(), op.element_bytes));
  MOECCL_ASSIGN_OR_RETURN(op.runner, comm.place(call.send, call.recv));
  const bool cuda = op.on_device();
  const Selector& selector = comm.selector_for(cuda);
  const auto element_bytes = static_cast<uint32_t>(op.element_bytes);
  Key key{std::move(counts), element_bytes, cuda, comm.fabric_for(cuda).half_bytes, selector.version()};
  std::shared_ptr<const void>& place = comm.kept_plan(kOp);
  LastTwo last;
  if (place != nullptr) last = *static_cast<const LastTwo*>(place.get());
  const auto fits = [&](const std::shared_ptr<const Kept>& k) { return k != nullptr && k->key == key; };
  auto kept = fits(last[0]) ? last[0] : last[1];
  if (!fits(kept)) {
    auto made = std::make_shared<Kept>();
    made->key = std::move(key);
    const plan::Reach reach = selector.shape_of(PlanKey{}, false).reach;
    MOECCL_ASSIGN_OR_RETURN(
        const algo::TensorBlocks plan,
        algo::TensorBlocks::make(comm.tree(), {made->key.counts, element_bytes, reach, made->key.staging_bytes}));
    MOECCL_TRY(prove_if_asked(comm.n_ranks(), kOp, plan.name(),
                              [&] { return algo::prove_tensor_blocks(comm.tree(), made->key.counts, reach); }));
    made->in_bytes = plan.input_elements(comm.rank()) * element_bytes;
    made->out_bytes = plan.output_elements(comm.rank()) * element_bytes;
    made->bound = plan.build(comm.rank());
    made->choice = {&made->bound.program, plan.chunking(), plan.name(), plan.hash()};
    kept = std::move(made);
    place = std::make_shared<const LastTwo>(LastTwo{kept, last[0]});
  }
  if (kept->in_bytes > 0 && call.send == nullptr) return bad(kOp, "send", "NULL", format("{} bytes", kept->in_bytes));
  if (kept->out_bytes > 0 && call.recv == nullptr) return bad(kOp, "recv", "NULL", format("{} bytes", kept->out_bytes));
  if (overlap(call.send, kept->in_bytes, call.recv, kept->out_bytes))
    return error(moecclInvalidArgument, "{}: send and recv overlap: give separate buffers", exec::op_name(kOp));
  op.signature.op = kOp;
  op.signature.type = call.type;
  op.signature.plan = kept->choice.plan_hash;
  op.priority = comm.priority_of(kOp);
  op.choice = kept->choice;
  op.binding = kept->bound.binding;
  op.input = call.send;
  op.output = call.recv;
  op.output_bytes = kept->out_bytes;
  op.rows.bytes = std::max(kept->in_bytes, kept->out_bytes);
  op.keep = std::move(kept);
  return {};
}

}  // namespace moeccl::comm
