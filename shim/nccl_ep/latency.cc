// SPDX-License-Identifier: Apache-2.0
// Low latency: received rows have places, by expert or by source rank, in a tensor with room for all that could come.
// Routings bring them densely, and from there they are copied to their places. The choices are read at each dispatch.
#include <algorithm>
#include <optional>

#include "shim/nccl_ep/handle.h"

namespace moeccl::shim::ep {
namespace {

bool by_rank(const Handle& h) { return h.layout == NCCL_EP_LAYOUT_RANK_MAJOR; }

struct Received {
  Tensor counts, weights_in, weights, choices;
};

ncclResult_t read_received(const Tensors& tensors, const Handle& h, const DispatchCall& call, Received* r) {
  const Group& g = *h.group;
  Tensor other;
  MOECCL_EP_TRY(tensors.read("inputs->topk_weights", call.inputs.topk_weights, &r->weights_in));
  MOECCL_EP_TRY(tensors.read("outputs->topk_weights", call.outputs.topk_weights, &r->weights));
  MOECCL_EP_TRY(tensors.read("outputs->topk_idx", call.outputs.topk_idx, &r->choices));
  const size_t n = static_cast<size_t>(g.n_ranks()), k = static_cast<size_t>(h.top_k);
  if (by_rank(h)) {
    MOECCL_EP_TRY(tensors.read("layout_info->src_rank_counters", call.layout_info.src_rank_counters, &r->counts));
    MOECCL_EP_TRY(tensors.read("layout_info->expert_counters", call.layout_info.expert_counters, &other));
    MOECCL_EP_TRY(tensors.refuse_if_given(other, "in the rank-major layout"));
    for (const Tensor* t : {&r->weights_in, &r->weights, &r->choices})
      if (!*t) return tensors.refuse(*t, "is NULL: the rank-major layout needs it");
    const std::vector<size_t> places = {n, g.config.max_dispatch_tokens_per_rank, k};
    MOECCL_EP_TRY(tensors.check(r->weights_in, {ncclFloat32}, {h.topk_idx.rows(), k}));
    MOECCL_EP_TRY(tensors.check(r->weights, {ncclFloat32}, places));
    MOECCL_EP_TRY(tensors.check(r->choices, {ncclInt32}, places));
    return r->counts ? tensors.check(r->counts, {ncclInt32}, {n}) : ncclSuccess;
  }
  constexpr const char* kWhy = "in the expert-major layout, where ncclEpCombine takes the weights";
  MOECCL_EP_TRY(tensors.read("layout_info->src_rank_counters", call.layout_info.src_rank_counters, &other));
  for (const Tensor* t : {&r->weights_in, &r->weights, &r->choices, &other})
    MOECCL_EP_TRY(tensors.refuse_if_given(*t, kWhy));
  MOECCL_EP_TRY(tensors.need("layout_info->expert_counters", call.layout_info.expert_counters, &r->counts));
  return tensors.check(r->counts, {ncclInt32}, {static_cast<size_t>(g.n_local())});
}

// Finds the places of the routing's rows, and counts those of each expert or source rank. Rows of masked ranks get
// none.
std::vector<int64_t> find_places(Handle& h, const moecclRoutingInfo_t& info) {
  const Group& g = *h.group;
  const size_t most = g.config.max_dispatch_tokens_per_rank, n_ranks = static_cast<size_t>(g.n_ranks());
  const size_t room = by_rank(h) ? most : n_ranks * most;
  std::vector<int64_t> counts(by_rank(h) ? n_ranks : static_cast<size_t>(info.n_local_experts));
  h.runs.clear();
  size_t expert = 0;
  for (size_t row = 0; row < info.n_rows; ++row) {
    const auto source = static_cast<size_t>(info.row_source[row]);
    while (!by_rank(h) && static_cast<int64_t>(row) >= info.expert_offsets[expert + 1]) ++expert;
    if (g.active[source] == 0) continue;
    const size_t block = by_rank(h) ? source : expert;
    const size_t slot = block * room + static_cast<size_t>(counts[block]++);
    Handle::Run* const last = h.runs.empty() ? nullptr : &h.runs.back();
    if (last != nullptr && last->dense + last->n == row && last->slot + last->n == slot)
      ++last->n;
    else
      h.runs.push_back({row, slot, 1});
  }
  h.n_dense = info.n_rows;
  return counts;
}

char* at_row(void* base, size_t row, size_t row_bytes) { return static_cast<char*>(base) + row * row_bytes; }

// Tells the program the choices and weights of the rows in the rank-major layout, in the order of the choices at their
// token. Places without a row have choices of -1.
ncclResult_t write_choices(Handle& h, const Received& to, ncclEpExpertIdKind_t kind, const Place& at) {
  const auto k = static_cast<size_t>(h.top_k);
  const Group& g = *h.group;
  std::vector<float> mine(h.routed->n_tokens * k), got;
  MOECCL_EP_TRY(at.read(mine.data(), to.weights_in.data, mine.size() * sizeof(float)));
  MOECCL_EP_TRY(h.exchange(mine.data(), &got));
  std::vector<float> weights(to.weights.elements());
  std::vector<int64_t> choices(weights.size(), -1);
  const int first = g.first_expert(), n_local = g.n_local();
  for (const Handle::Run& run : h.runs)
    for (size_t i = 0; i < run.n * k; ++i) {
      const int32_t expert = h.routed->received[run.dense * k + i];
      weights[run.slot * k + i] = got[run.dense * k + i];
      if (expert >= first && expert < first + n_local)
        choices[run.slot * k + i] = kind == NCCL_EP_EXPERT_ID_GLOBAL ? expert : expert - first;
    }
  MOECCL_EP_TRY(at.put(to.weights.data, weights.data(), weights.size() * sizeof(float)));
  return at.put_counts(to.choices, choices);
}

ncclResult_t not_while_staged(const Handle& h, const char* function) {
  if (!h.rest) return ncclSuccess;
  return fail(ncclInvalidUsage, std::string(function) +
                                    ": the handle's last operation was send_only: call ncclEpComplete before the next");
}

ncclResult_t no_backward(const char* function, ncclEpPassDir_t direction) {
  if (direction == NCCL_EP_FWD_PASS) return ncclSuccess;
  return fail(
      ncclInvalidUsage,
      std::string(function) + ": low-latency mode has no backward pass: use a group of NCCL_EP_ALGO_HIGH_THROUGHPUT");
}

// Reads weights[tokens][k] as MoECCL takes them: each counts at the column that stands for its choice.
ncclResult_t read_weights(const Tensors& tensors, const Routed& r, const CombineCall& call, const Place& at,
                          std::vector<float>* out) {
  const auto k = static_cast<size_t>(r.top_k);
  Tensor weights;
  MOECCL_EP_TRY(tensors.need("outputs->topk_weights", call.outputs.topk_weights, &weights));
  MOECCL_EP_TRY(tensors.check(weights, {ncclFloat32}, {r.n_tokens, k}));
  MOECCL_EP_TRY(at.wait());
  std::vector<float> given(r.n_tokens * k);
  MOECCL_EP_TRY(at.read(given.data(), weights.data, given.size() * sizeof(float)));
  out->assign(given.size() + 1, 0.0f);  // not empty, so that all ranks give weights
  for (size_t i = 0; i < given.size(); ++i) (*out)[i / k * k + r.first[i]] += given[i];
  return ncclSuccess;
}

// Does the rest of an operation: now, or in ncclEpComplete after a call that only sends.
ncclResult_t finish(Handle& h, bool later, cudaStream_t stream, std::function<ncclResult_t(cudaStream_t)> rest) {
  if (!later) return rest(stream);
  h.rest = std::move(rest);
  return ncclSuccess;
}

}  // namespace

ncclResult_t dispatch_latency(Handle& h, const DispatchCall& call) {
  const Group& g = *h.group;
  const Tensors tensors("ncclEpDispatch", g.comm);
  Rows rows;
  Received received;
  std::optional<Place> place;
  const auto take_over = [&] {
    MOECCL_EP_TRY(no_backward(tensors.function(), call.config.pass_direction));
    MOECCL_EP_TRY(not_while_staged(h, tensors.function()));
    if (!h.topk_idx)
      return fail(ncclInvalidUsage, "ncclEpDispatch: the handle has no choices yet: call ncclEpUpdateHandle before");
    MOECCL_EP_TRY(read_rows(tensors, h, call, &rows));
    MOECCL_EP_TRY(tensors.check(rows.in, {}, {h.topk_idx.rows(), rows.in.sizes[1]}));
    MOECCL_EP_TRY(read_received(tensors, h, call, &received));
    const bool in_window = by_rank(h) && (rows.out.in_window || rows.out_scales.in_window);
    if (g.config.zero_copy == NCCL_EP_ZERO_COPY_ON && !in_window)
      return tensors.refuse(rows.out, "is in no window, or not rank-major, which the group's zero_copy asks for");
    place.emplace(tensors.function(), g.member.shares_device != 0, call.stream,
                  std::initializer_list<const Tensor*>{&rows.in, &rows.out});
    MOECCL_EP_TRY(place->wait());
    return h.choose(h.topk_idx, *place);
  };
  if (const ncclResult_t refused = take_over(); refused != ncclSuccess)
    return h.refuse(tensors.function(), refused, Handle::Opening::kHost, call.stream);
  const Place& at = *place;
  h.rows_on_device = at.on_device();
  moecclRouting_t routing = nullptr;
  moecclRoutingInfo_t info;
  MOECCL_EP_TRY(h.routing(h.shape(rows.row_bytes, rows.type, rows.scale_bytes), nullptr, &routing));
  MOECCL_EP_TRY(h.info(routing, &info));
  // Everything but the rows is written before they move, so that no host waits for them.
  const std::vector<int64_t> counts = find_places(h, info);
  h.dispatched = h.routed->version;
  if (received.counts) MOECCL_EP_TRY(at.put_counts(received.counts, counts));
  if (by_rank(h)) MOECCL_EP_TRY(write_choices(h, received, call.layout_info.recv_topk_idx_kind, at));
  void *dense = nullptr, *dense_scales = nullptr;
  MOECCL_EP_TRY(h.rows.take(tensors.function(), at, h.n_dense * rows.row_bytes, &dense));
  if (rows.scale_bytes > 0)
    MOECCL_EP_TRY(h.scales.take(tensors.function(), at, h.n_dense * rows.scale_bytes, &dense_scales));
  MOECCL_EP_TRY(move_rows(routing, rows, dense, dense_scales, at));
  for (Scratch* s : {&h.rows, &h.scales}) s->used(at);
  const bool shares = g.member.shares_device != 0;
  return finish(h, call.config.send_only != 0, call.stream, [=, &h](cudaStream_t stream) {
    const Place on("ncclEpDispatch", shares, stream, {&rows.in, &rows.out});
    for (const Handle::Run& run : h.runs) {
      MOECCL_EP_TRY(on.copy(at_row(rows.out.data, run.slot, rows.row_bytes), at_row(dense, run.dense, rows.row_bytes),
                            run.n * rows.row_bytes));
      if (rows.scale_bytes == 0) continue;
      MOECCL_EP_TRY(on.copy(at_row(rows.out_scales.data, run.slot, rows.scale_bytes),
                            at_row(dense_scales, run.dense, rows.scale_bytes), run.n * rows.scale_bytes));
    }
    for (Scratch* s : {&h.rows, &h.scales}) s->used(on);
    return ncclSuccess;
  });
}

ncclResult_t combine_latency(Handle& h, const CombineCall& call) {
  const Group& g = *h.group;
  const Tensors tensors("ncclEpCombine", g.comm);
  Sums sums;
  std::vector<float> mine;
  std::optional<Place> place;
  const auto take_over = [&] {
    MOECCL_EP_TRY(no_backward(tensors.function(), call.config.pass_direction));
    MOECCL_EP_TRY(not_while_staged(h, tensors.function()));
    if (h.dispatched == 0 || h.dispatched != h.routed->version)
      return fail(ncclInvalidUsage, "ncclEpCombine: the handle has dispatched nothing yet: call ncclEpDispatch before");
    MOECCL_EP_TRY(read_sums(tensors, h, call, &sums));
    place.emplace(tensors.function(), g.member.shares_device != 0, call.stream,
                  std::initializer_list<const Tensor*>{&sums.in, &sums.out});
    if (!by_rank(h)) return read_weights(tensors, *h.routed, call, *place, &mine);
    return place->on_device() ? ncclSuccess : place->wait();
  };
  if (const ncclResult_t refused = take_over(); refused != ncclSuccess)
    return h.refuse(tensors.function(), refused, opening_of_combine(h, NCCL_EP_FWD_PASS), call.stream);
  const Place& at = *place;
  moecclRouting_t routing = nullptr;
  MOECCL_EP_TRY(h.routing(h.shape(sums.row_bytes, sums.type, 0), by_rank(h) ? nullptr : mine.data(), &routing));
  void* dense = nullptr;
  MOECCL_EP_TRY(h.rows.take(tensors.function(), at, h.n_dense * sums.row_bytes, &dense));
  size_t placed = 0;
  for (const Handle::Run& run : h.runs) placed += run.n;
  if (placed < h.n_dense) MOECCL_EP_TRY(at.fill(dense, 0, h.n_dense * sums.row_bytes));
  for (const Handle::Run& run : h.runs)
    MOECCL_EP_TRY(at.copy(at_row(dense, run.dense, sums.row_bytes), at_row(sums.in.data, run.slot, sums.row_bytes),
                          run.n * sums.row_bytes));
  const moecclStream_t stream = at.moeccl_stream();
  MOECCL_EP_TRY(from_moeccl(by_rank(h) ? moecclDispatchBackward(routing, dense, sums.out.data, stream)
                                       : moecclCombine(routing, dense, sums.out.data, stream)));
  h.rows.used(at);
  // The sums are under way; nothing is left to do but to come back here.
  return finish(h, call.config.send_only != 0, call.stream, [](cudaStream_t) { return ncclSuccess; });
}

}  // namespace moeccl::shim::ep
