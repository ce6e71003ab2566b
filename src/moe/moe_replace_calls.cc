// SPDX-License-Identifier: Apache-2.0
// The calls of a re-placing step once it has begun.
#include "src/base/adopt.h"
#include "src/base/clock.h"
#include "src/base/hash.h"
#include "src/exec/flight.h"
#include "src/moe/moe_replace.h"

namespace moeccl::comm {

Status MoeReplacement::usable(const char* what) const {
  if (routing_ == nullptr) {
    MOECCL_TRY(layer_.host().usable());
    return error(moecclInvalidUsage, "{}: no step has begun: call moecclReplaceBegin after the routing's update", what);
  }
  if (routing_->version_ == routing_version_) return {};
  return error(moecclInvalidUsage, "{}: the routing was updated after moecclReplaceBegin: begin again", what);
}

// Checks the same as usable(), and waits for the lists.
Status MoeReplacement::ready(const char* what) {
  MOECCL_TRY(usable(what));
  const int64_t begun = now_ns();
  if (const Status& made = prepared(); !made.ok()) {
    layer_.host().break_off(made);
    return made;
  }
  if (wait_us_ < 0) wait_us_ = static_cast<double>(now_ns() - begun) / 1000;
  return {};
}

Status MoeReplacement::rows(size_t* n_rows) const {
  MOECCL_TRY(usable("rows of combine's input"));
  *n_rows = n_rows_;
  return {};
}

size_t MoeReplacement::n_choices() const {
  return routing_ == nullptr ? 0 : tokens_of_[layer_.host().rank()] * layer_.config().shape.top_k;
}

Status MoeReplacement::run(moecclOp_t kind, bool weighted, const void* in, void* out, Stream* stream) {
  // The mark shows when ranks came to different placements, or when only some of them combine plainly.
  const MoeCandidate& plan = *candidates_[routing_->chosen_];
  auto op = rows_operation(moe_config_, plan,
                           {kind, weighted, false, tables_.n_chunks(), hash_combine(placement_hash_, number_)});
  const auto buffers = MoeHost::RowBuffers::of(kind, in, out, tokens_of_[layer_.host().rank()], n_rows_);
  MOECCL_ASSIGN_OR_RETURN(const MoeHost::Place place, layer_.host().place(buffers, stream));
  bind_lists(*op, tables_, weighted);
  op->input = in;
  op->output = out;
  op->rows.bytes = std::max<uint64_t>(tokens_of_[layer_.host().rank()], n_rows_) * op->element_bytes;
  op->measured = kind == moecclOpCombine ? &measured_ : &measured_backward_;
  return layer_.host().run(std::move(op), place);
}

Status MoeReplacement::combine(const void* in, void* out, Stream* stream) {
  const int64_t begun = now_ns();
  MOECCL_TRY(ready("re-placing combine"));
  const uint64_t row_bytes = moe_config_.shape.row_bytes, n_tokens = tokens_of_[layer_.host().rank()];
  MOECCL_TRY(
      check_buffers("re-placing combine", {{"in", in, n_rows_, row_bytes}, {"out", out, n_tokens, row_bytes, true}}));
  MOECCL_TRY(combines_plainly() ? routing_->combine(in, out, stream) : run(moecclOpCombine, true, in, out, stream));
  if (stream != nullptr) return {};
  // An operation on a stream has no time yet, because it has not ended: on streams, Eq. 5 alone decides.
  if (combines_plainly()) measured_.ns = routing_->measured_combine_.ns.load();
  times_ = {begin_us_, static_cast<double>(now_ns() - begun) / 1000, routing_->measured_dispatch_.ns / 1e3};
  return {};
}

Status MoeReplacement::combine_backward(const MoeRouting::CombineGradients& g, Stream* stream) {
  constexpr const char* kWhat = "re-placing combine's backward";
  MOECCL_TRY(ready(kWhat));
  if (combines_plainly()) return routing_->combine_backward(g, stream);
  return routing_->combine_gradients(kWhat, g, n_rows_, stream, [&](bool weighted) {
    return run(moecclOpDispatch, weighted, g.grad_out, g.grad_in, stream);
  });
}

// Copies row `from` of `from` to row `to` of `to` for each move, or adds it.
Status MoeReplacement::move_rows(const Moves& moves, const void* from, void* to, bool add, bool on_device) {
  if (moves.empty()) return {};
  std::vector<uint32_t> src, dst;
  for (const auto& m : moves) src.push_back(m.from), dst.push_back(m.to);
  return layer_.host().with_kernels(on_device, [&](const kernels::KernelTable& table) {
    if (!add) {
      kernels::CopyRowsArgs copy;
      copy.dst = to, copy.src = from;
      copy.dst_index = dst.data(), copy.src_index = src.data();
      copy.count = moves.size();
      copy.row_bytes = moe_config_.shape.row_bytes;
      table.copy_rows(copy);
      return;
    }
    std::vector<uint64_t> offsets;
    std::vector<kernels::RowTerm> terms;
    for (size_t i = 0; i < moves.size(); ++i) {
      offsets.push_back(terms.size());
      terms.push_back({dst[i], 0, 0});
      terms.push_back({src[i], 1, 0});
    }
    offsets.push_back(terms.size());
    const void* bases[] = {to, from};
    kernels::ReduceRowsArgs sum;
    sum.dst = to;
    sum.bases = bases;
    sum.offsets = offsets.data();
    sum.terms = terms.data();
    sum.dst_index = dst.data();
    sum.count = moves.size();
    sum.row_elements = moe_config_.shape.row_bytes / moecclTypeSize(moe_config_.type);
    table.reduce_rows[moe_config_.type](sum);
  });
}

Status MoeReplacement::residual(const void* x, const void* dispatched, void* in) {
  MOECCL_TRY(usable("residual"));
  if (!config_.residual)
    return error(moecclInvalidUsage, "the replacement was created without config.residual: set it to 1");
  MOECCL_TRY(needs_buffer("residual", "in", in, n_rows_));
  if (!of_rows_.empty()) MOECCL_TRY(needs_buffer("residual", "dispatched", dispatched, routing_->rows_here()));
  if (!of_tokens_.empty()) MOECCL_TRY(needs_buffer("residual", "x", x, routing_->tokens_here()));
  // Buffers without rows to read may be in any memory.
  MOECCL_ASSIGN_OR_RETURN(const bool on_device,
                          layer_.host().on_device("residual", {{"in", n_rows_ > 0 ? in : nullptr},
                                                               {"dispatched", of_rows_.empty() ? nullptr : dispatched},
                                                               {"x", of_tokens_.empty() ? nullptr : x}}));
  MOECCL_TRY(move_rows(of_rows_, dispatched, in, !moe_config_.shape.expert_major, on_device));
  return move_rows(of_tokens_, x, in, false, on_device);
}

Status MoeReplacement::residual_backward(const void* grad_in, void* grad_dispatched, void* grad_x) {
  MOECCL_TRY(usable("residual's backward"));
  if (!config_.residual)
    return error(moecclInvalidUsage, "the replacement was created without config.residual: set it to 1");
  MOECCL_TRY(needs_buffer("residual's backward", "grad_in", grad_in, n_rows_));
  if (of_rows_.empty()) grad_dispatched = nullptr;
  if (of_tokens_.empty()) grad_x = nullptr;
  MOECCL_ASSIGN_OR_RETURN(const bool on_device,
                          layer_.host().on_device("residual's backward", {{"grad_in", n_rows_ > 0 ? grad_in : nullptr},
                                                                          {"grad_dispatched", grad_dispatched},
                                                                          {"grad_x", grad_x}}));
  const auto back = [](const Moves& moves) {
    Moves mirror;
    for (const auto& m : moves) mirror.push_back({m.to, m.from});
    return mirror;
  };
  if (grad_dispatched) MOECCL_TRY(move_rows(back(of_rows_), grad_in, grad_dispatched, true, on_device));
  if (grad_x) MOECCL_TRY(move_rows(back(of_tokens_), grad_in, grad_x, true, on_device));
  return {};
}

Status MoeReplacement::info(moecclReplaceInfo_t* out) {
  MOECCL_TRY(check_out(out, "info"));
  MOECCL_TRY(ready("replacement info"));
  moecclReplaceInfo_t info = facts_;
  info.n_samples = static_cast<int32_t>(placement_.size());
  info.placement = placement_.data();
  info.n_local = static_cast<int32_t>(local_samples_.size());
  info.local_samples = local_samples_.data();
  info.solve_us = solve_us_;
  info.wait_us = wait_us_;
  info.begin_us = begin_us_;
  info.measured_us = measured_.ns / 1e3;
  exec::copy_text(info.algorithm, candidates_[routing_->chosen_]->name);
  give(info, out);
  return {};
}

}  // namespace moeccl::comm
