// SPDX-License-Identifier: Apache-2.0
#include "src/comm/batches.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "src/comm/cuda_stream.h"

namespace moeccl::comm {

Batches batches_of(std::vector<Call>& calls) {
  struct Place {
    Stream* stream;
    std::shared_ptr<Batch> batch;
    bool walks, in_order;
  };
  std::vector<Place> places;
  std::vector<size_t> at;  // [calls] each call's place
  for (const Call& c : calls) {
    size_t i = 0;
    while (i < places.size() && places[i].stream != c.stream) ++i;
    if (i == places.size())
      places.push_back(
          {c.stream, std::make_shared<Batch>(), c.stream != nullptr && c.stream->as_cuda() != nullptr, true});
    const exec::PersistentKernel* const kernel = kernel_of(c);
    places[i].walks = places[i].walks && kernel != nullptr;
    places[i].in_order = places[i].in_order && kernel != nullptr && !kernel->has_promised();
    at.push_back(i);
  }
  std::map<Communicator*, std::vector<size_t>> places_of;
  for (size_t i = 0; places.size() > 1 && i < calls.size(); ++i) {
    std::vector<size_t>& known = places_of[calls[i].comm];
    if (std::find(known.begin(), known.end(), at[i]) != known.end()) continue;
    for (const size_t k : known) {
      const std::shared_ptr<Batch> kept = places[k].batch, left = places[at[i]].batch;
      const auto at_once = [](const Place& p) { return p.walks && p.in_order; };
      if (kept == left || (at_once(places[k]) && at_once(places[at[i]]))) continue;
      for (Place& p : places)
        if (p.batch == left) p.batch = kept;
    }
    known.push_back(at[i]);
  }
  Batches batches;
  for (const Place& p : places) {
    if (std::find(batches.begin(), batches.end(), p.batch) == batches.end()) {
      batches.push_back(p.batch);
      p.batch->stream = p.stream;
      p.batch->launchable = p.walks;
      p.batch->in_order = p.in_order;
      continue;
    }
    p.batch->launchable = false;
    // If a call has no stream, this thread runs the calls, and streams wait for it.
    p.batch->others.push_back(p.stream == nullptr ? std::exchange(p.batch->stream, nullptr) : p.stream);
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    places[at[i]].batch->calls.push_back(std::move(calls[i]));
    places[at[i]].batch->places.push_back(i);
  }
  for (const auto& b : batches)
    if (!b->others.empty()) b->meeting = std::make_unique<Meeting>(b->others.size());
  return batches;
}

namespace {

// Launches a call on the caller's stream, unless an earlier one of the batch has failed. In a capture it becomes a node
// of the graph.
void launch(Batch& batch, const Call& c) {
  if (!batch.launched.ok()) return;
  uint64_t number = 0;
  batch.launched =
      kernel_of(c)->launch(*c.operation, batch.stream->as_cuda()->stream(), batch.captured ? nullptr : &number);
  if (batch.launched.ok() && !batch.captured) batch.walks.push_back(number);
}

// Launches the calls of some batches in the order in which they stand in the group, on whatever streams they lie: peers
// may have put them on other streams.
template <class Chosen>
void launch_in_order(const Batches& batches, Chosen&& chosen) {
  std::vector<std::tuple<size_t, Batch*, const Call*>> all;
  for (const auto& batch : batches) {
    for (size_t i = 0; chosen(*batch) && i < batch->calls.size(); ++i)
      all.emplace_back(batch->places[i], batch.get(), &batch->calls[i]);
  }
  std::sort(all.begin(), all.end());
  for (const auto& [place, batch, call] : all) launch(*batch, *call);
}

}  // namespace

Status launch_at_once(Batches& batches) {
  for (auto& batch : batches) {
    if (!batch->launchable) continue;
    MOECCL_ASSIGN_OR_RETURN(batch->captured, batch->stream->as_cuda()->capturing());
    if (batch->captured && !batch->in_order) {
      return error(moecclUnsupported,
                   "operations called earlier on another stream have not been launched yet, so this one cannot be "
                   "captured: wait for them first (moecclStreamSynchronize)");
    }
  }
  launch_in_order(batches, [](const Batch& b) { return b.captured; });
  for (auto& batch : batches) MOECCL_TRY(batch->launched);
  std::erase_if(batches, [](const auto& b) { return b->captured; });
  launch_in_order(batches, [](const Batch& b) { return b.launchable && b.in_order; });
  return {};
}

}  // namespace moeccl::comm
