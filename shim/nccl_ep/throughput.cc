// SPDX-License-Identifier: Apache-2.0
// High throughput: rows lie densely, one for each token and rank (flat) or for each choice (expert-major).
#include <numeric>
#include <optional>

#include "shim/nccl_ep/handle.h"

namespace moeccl::shim::ep {
namespace {

// The rows that the program's tensors have: all, or the first ones where the rest is dropped.
size_t kept_rows(const Handle& h) { return std::min(h.n_rows, h.group->most_rows()); }

ncclResult_t needs_choices(const char* function, Handle& h) {
  if (h.routed->agreed) return h.count();
  return fail(ncclInvalidUsage, std::string(function) +
                                    ": the handle has no choices, or its last update has failed: call "
                                    "ncclEpUpdateHandle before");
}

// Checks that a tensor has room for the rows, or, where the program sizes tensors for any choices, for the most.
ncclResult_t check_rows(const Tensors& tensors, const Handle& h, const Tensor& t, bool any_choices) {
  const Group& g = *h.group;
  const size_t least = any_choices && !g.eager() ? g.most_rows() : kept_rows(h);
  if (t.rows() >= least) return ncclSuccess;
  return tensors.refuse(t, "has " + std::to_string(t.rows()) + " rows: give " + std::to_string(least) +
                               (g.eager() ? ", which layout_info->recv_total_counter of the update told"
                                          : ", the group's max_recv_tokens_per_rank"));
}

// Calls body(row of `pairs`, the row that it is in expert-major order or else itself, place among the row's choices,
// column of the choice at its token) for each choice that this rank's experts get.
template <class Body>
void each_choice(const Handle& h, const moecclRoutingInfo_t& pairs, const Body& body) {
  const auto k = static_cast<size_t>(h.top_k);
  std::vector<int64_t> next = h.offsets;
  for (size_t row = 0; row < pairs.n_rows; ++row) {
    const int64_t begin = pairs.choice_offsets[row], end = pairs.choice_offsets[row + 1];
    for (int64_t c = begin; c < end; ++c) {
      const int32_t local = pairs.choice_expert[c];
      size_t column = 0;
      while (h.routed->received[row * k + column] != h.group->first_expert() + local) ++column;
      const size_t at = next.empty() ? row : static_cast<size_t>(next[static_cast<size_t>(local)]++);
      body(row, at, static_cast<size_t>(c - begin), column);
    }
  }
}

ncclResult_t check_window(const Tensors& tensors, const Handle& h, const Tensor& t) {
  if (h.group->config.zero_copy != NCCL_EP_ZERO_COPY_ON || t.in_window) return ncclSuccess;
  return tensors.refuse(t, "is in no window, which the group's zero_copy asks for: give win_hdl");
}

// Rows and their weights are of one set: a rank that gets none may give empty tensors, but then both.
ncclResult_t check_both_empty(const Tensors& tensors, const Tensor& rows, const Tensor& weights) {
  if ((rows.elements() == 0) == (weights.elements() == 0)) return ncclSuccess;
  return tensors.refuse(weights, "is " + shape_text(weights.sizes) + " and " + rows.name + " " +
                                     shape_text(rows.sizes) + ": give both with rows, or both empty");
}

struct Received {
  Tensor weights, choices;
};

ncclResult_t read_received(const Tensors& tensors, const Handle& h, const DispatchCall& call, Received* r) {
  MOECCL_EP_TRY(tensors.read("outputs->topk_weights", call.outputs.topk_weights, &r->weights));
  MOECCL_EP_TRY(tensors.read("outputs->topk_idx", call.outputs.topk_idx, &r->choices));
  if (call.config.pass_direction != NCCL_EP_FWD_PASS) {
    MOECCL_EP_TRY(tensors.refuse_if_given(r->weights, "in the backward pass"));
    return tensors.refuse_if_given(r->choices, "in the backward pass");
  }
  if (!r->weights) return tensors.refuse(r->weights, "is NULL: the forward pass needs it");
  if (h.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR) {
    MOECCL_EP_TRY(tensors.check(r->weights, {ncclFloat32}, {Tensors::kAny}));
    return tensors.refuse_if_given(r->choices, "in the expert-major layout, where a row's place names its expert");
  }
  if (!r->choices) return tensors.refuse(r->choices, "is NULL: the flat layout needs it");
  const auto k = static_cast<size_t>(h.top_k);
  MOECCL_EP_TRY(tensors.check(r->weights, {ncclFloat32}, {Tensors::kAny, k}));
  return tensors.check(r->choices, {ncclInt64, ncclInt32}, {r->weights.rows(), k});
}

// Tells the experts' ranks the weights, and the program which experts its rows are for.
ncclResult_t write_received(Handle& h, const Received& to, const Tensor& weights, ncclEpExpertIdKind_t kind,
                            const Place& at) {
  const auto k = static_cast<size_t>(h.top_k);
  std::vector<float> mine(h.routed->n_tokens * k), got;
  MOECCL_EP_TRY(at.read(mine.data(), weights.data, mine.size() * sizeof(float)));
  MOECCL_EP_TRY(h.exchange(mine.data(), &got));
  moecclRouting_t pairs = nullptr;
  moecclRoutingInfo_t info;
  MOECCL_EP_TRY(h.by_pairs(&pairs, &info));
  const bool expert_major = h.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
  const int64_t base = kind == NCCL_EP_EXPERT_ID_GLOBAL ? h.group->first_expert() : 0;
  const size_t width = expert_major ? 1 : k, kept = kept_rows(h);
  std::vector<float> out(h.n_rows * width, 0.0f);
  std::vector<int64_t> choices(expert_major ? 0 : out.size(), -1);
  each_choice(h, info, [&](size_t row, size_t place, size_t nth, size_t column) {
    const float weight = got[row * k + column];
    if (expert_major) {
      out[place] = weight;
      return;
    }
    out[row * k + nth] = weight;
    choices[row * k + nth] = base + h.routed->received[row * k + column] - h.group->first_expert();
  });
  MOECCL_EP_TRY(at.put(to.weights.data, out.data(), kept * width * sizeof(float)));
  if (expert_major) return ncclSuccess;
  choices.resize(kept * k);
  MOECCL_EP_TRY(at.put_counts(to.choices, choices));
  // Rows beyond the last have no choices, which is -1 in either type.
  const size_t rest = (to.choices.rows() - kept) * k, word = type_size(to.choices.type);
  MOECCL_EP_TRY(at.fill(static_cast<char*>(to.choices.data) + kept * k * word, 0xff, rest * word));
  return at.fill(static_cast<char*>(to.weights.data) + kept * k * sizeof(float), 0, rest * sizeof(float));
}

// grad_weights[tokens][k] of the rows' own, which lie as dispatch wrote the weights.
ncclResult_t return_weights(Handle& h, const Tensor& weights, const Tensor& out, const Place& at) {
  const auto k = static_cast<size_t>(h.top_k);
  Routed& r = *h.routed;
  const bool expert_major = h.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
  const size_t width = expert_major ? 1 : k, kept = kept_rows(h);
  std::vector<float> given(kept * width);
  MOECCL_EP_TRY(at.read(given.data(), weights.data, given.size() * sizeof(float)));
  given.resize(h.n_rows * width, 0.0f);  // of rows that were dropped
  if (r.pairs_version != r.version) MOECCL_EP_TRY(h.exchange(nullptr, nullptr));
  moecclRouting_t pairs = nullptr;
  moecclRoutingInfo_t info;
  MOECCL_EP_TRY(h.by_pairs(&pairs, &info));
  std::vector<float> send(2 * info.n_rows * k + 1, 0.0f), back(2 * r.n_tokens * k + 1);
  each_choice(h, info, [&](size_t row, size_t place, size_t nth, size_t column) {
    send[(2 * row + 1) * k + column] = expert_major ? given[place] : given[row * k + nth];
  });
  MOECCL_EP_TRY(from_moeccl(moecclDispatchBackward(pairs, send.data(), back.data(), nullptr)));
  std::vector<float> sums(r.n_tokens * k);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = back[(2 * (i / k) + 1) * k + r.first[i]];
  // A choice that is none has no gradient, unless it names an expert again.
  for (size_t i = 0; i < sums.size(); ++i)
    if (r.index[i / k * k + r.first[i]] < 0) sums[i] = 0;
  return at.put(out.data, sums.data(), sums.size() * sizeof(float));
}

}  // namespace

ncclResult_t dispatch_throughput(Handle& h, const DispatchCall& call) {
  const Group& g = *h.group;
  const Tensors tensors("ncclEpDispatch", g.comm);
  const bool forward = call.config.pass_direction == NCCL_EP_FWD_PASS;
  Rows rows;
  Received received;
  Tensor weights;
  std::optional<Place> place;
  const auto take_over = [&] {
    MOECCL_EP_TRY(needs_choices(tensors.function(), h));
    MOECCL_EP_TRY(read_rows(tensors, h, call, &rows));
    MOECCL_EP_TRY(tensors.read("inputs->topk_weights", call.inputs.topk_weights, &weights));
    MOECCL_EP_TRY(read_received(tensors, h, call, &received));
    MOECCL_EP_TRY(check_rows(tensors, h, rows.out, true));
    MOECCL_EP_TRY(tensors.check(rows.in, {}, {h.routed->n_tokens, rows.in.sizes[1]}));
    if (forward) {
      if (!weights) return tensors.refuse(weights, "is NULL: the forward pass needs it");
      MOECCL_EP_TRY(tensors.check(weights, {ncclFloat32}, {h.routed->n_tokens, static_cast<size_t>(h.top_k)}));
      MOECCL_EP_TRY(check_both_empty(tensors, rows.out, received.weights));
      MOECCL_EP_TRY(check_rows(tensors, h, received.weights, false));
    } else {
      MOECCL_EP_TRY(tensors.refuse_if_given(weights, "in the backward pass"));
    }
    MOECCL_EP_TRY(check_window(tensors, h, rows.out));
    place.emplace(tensors.function(), g.member.shares_device != 0, call.stream,
                  std::initializer_list<const Tensor*>{&rows.in, &rows.out});
    return forward || !place->on_device() ? place->wait() : ncclSuccess;
  };
  if (const ncclResult_t refused = take_over(); refused != ncclSuccess)
    return h.refuse(tensors.function(), refused, opening_of_dispatch(h, call.config.pass_direction), call.stream);
  const Place& at = *place;
  h.rows_on_device = at.on_device();
  if (forward) MOECCL_EP_TRY(write_received(h, received, weights, call.layout_info.recv_topk_idx_kind, at));
  moecclRouting_t routing = nullptr;
  MOECCL_EP_TRY(h.routing(h.shape(rows.row_bytes, rows.type, rows.scale_bytes), nullptr, &routing));
  const size_t kept = kept_rows(h);
  const bool drops = kept < h.n_rows;
  // A rank without rows says by a pointer that its memory is of the other ranks' kind.
  void *out = rows.out.data, *out_scales = rows.out_scales.data;
  if (drops || out == nullptr) MOECCL_EP_TRY(h.rows.take(tensors.function(), at, h.n_rows * rows.row_bytes, &out));
  if (rows.scale_bytes > 0 && (drops || out_scales == nullptr))
    MOECCL_EP_TRY(h.scales.take(tensors.function(), at, h.n_rows * rows.scale_bytes, &out_scales));
  MOECCL_EP_TRY(move_rows(routing, rows, out, out_scales, at));
  if (drops) {
    MOECCL_EP_TRY(at.copy(rows.out.data, out, kept * rows.row_bytes));
    MOECCL_EP_TRY(at.copy(rows.out_scales.data, out_scales, kept * rows.scale_bytes));
  }
  for (Scratch* s : {&h.rows, &h.scales}) s->used(at);
  return ncclSuccess;
}

ncclResult_t combine_throughput(Handle& h, const CombineCall& call) {
  const Group& g = *h.group;
  const Tensors tensors("ncclEpCombine", g.comm);
  const bool forward = call.config.pass_direction == NCCL_EP_FWD_PASS;
  const auto k = static_cast<size_t>(h.top_k);
  Sums sums;
  Tensor weights, weights_out;
  std::optional<Place> place;
  const auto take_over = [&] {
    MOECCL_EP_TRY(needs_choices(tensors.function(), h));
    MOECCL_EP_TRY(read_sums(tensors, h, call, &sums));
    MOECCL_EP_TRY(tensors.read("inputs->topk_weights", call.inputs.topk_weights, &weights));
    if (forward) MOECCL_EP_TRY(tensors.refuse_if_given(weights, "in the forward pass"));
    MOECCL_EP_TRY(check_rows(tensors, h, sums.in, false));
    if (!forward) {
      MOECCL_EP_TRY(tensors.need("inputs->topk_weights", call.inputs.topk_weights, &weights));
      MOECCL_EP_TRY(tensors.need("outputs->topk_weights", call.outputs.topk_weights, &weights_out));
      MOECCL_EP_TRY(tensors.check(weights, {ncclFloat32},
                                  h.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? std::vector<size_t>{Tensors::kAny}
                                                                          : std::vector<size_t>{Tensors::kAny, k}));
      MOECCL_EP_TRY(check_both_empty(tensors, sums.in, weights));
      MOECCL_EP_TRY(check_rows(tensors, h, weights, false));
      MOECCL_EP_TRY(tensors.check(weights_out, {ncclFloat32}, {h.routed->n_tokens, k}));
    }
    MOECCL_EP_TRY(check_window(tensors, h, sums.in));
    place.emplace(tensors.function(), g.member.shares_device != 0, call.stream,
                  std::initializer_list<const Tensor*>{&sums.in, &sums.out});
    return forward && place->on_device() ? ncclSuccess : place->wait();
  };
  if (const ncclResult_t refused = take_over(); refused != ncclSuccess)
    return h.refuse(tensors.function(), refused, opening_of_combine(h, call.config.pass_direction), call.stream);
  const Place& at = *place;
  if (!forward) MOECCL_EP_TRY(return_weights(h, weights, weights_out, at));
  moecclRouting_t routing = nullptr;
  MOECCL_EP_TRY(h.routing(h.shape(sums.row_bytes, sums.type, 0), nullptr, &routing));
  const size_t kept = kept_rows(h);
  void* in = sums.in.data;
  if (kept < h.n_rows || in == nullptr)
    MOECCL_EP_TRY(h.rows.take(tensors.function(), at, h.n_rows * sums.row_bytes, &in));
  if (kept < h.n_rows) {  // rows that were dropped add nothing
    MOECCL_EP_TRY(at.copy(in, sums.in.data, kept * sums.row_bytes));
    MOECCL_EP_TRY(at.fill(static_cast<char*>(in) + kept * sums.row_bytes, 0, (h.n_rows - kept) * sums.row_bytes));
  }
  // The program has applied the weights already.
  MOECCL_EP_TRY(from_moeccl(moecclDispatchBackward(routing, in, sums.out.data, at.moeccl_stream())));
  h.rows.used(at);
  return ncclSuccess;
}

}  // namespace moeccl::shim::ep
