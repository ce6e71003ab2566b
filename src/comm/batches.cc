// SPDX-License-Identifier: Apache-2.0
#include "src/comm/batches.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "src/comm/cuda_stream.h"

namespace moeccl::comm {

exec::PersistentKernel* kernel_of(const Call& c) {
  if (c.operation != nullptr) return c.runner().kernel();
  exec::PersistentKernel* const kernel = c.runner().on_device() ? c.comm->kernel() : nullptr;
  return kernel != nullptr && kernel->moves_messages(c.message.peer) ? kernel : nullptr;
}

std::vector<exec::Message> Batch::messages() const {
  std::vector<exec::Message> all;
  for (const Call& c : calls) all.push_back(c.message);
  return all;
}

Status Batch::note_earlier_work() {
  std::set<const Communicator*> seen;
  for (const Call& c : calls) {
    if (!c.runner().on_device() || !seen.insert(c.comm).second) continue;
    MOECCL_ASSIGN_OR_RETURN(auto work, earlier_work(*c.comm, stream));
    if (work != nullptr) earlier.push_back(std::move(work));
  }
  return {};
}

void Batch::take_turns() {
  for (Call& c : calls) {
    const bool known = std::any_of(turns.begin(), turns.end(), [&](const Turn& t) { return t.comm == c.comm; });
    if (!known && is_queued()) {
      turns.push_back({c.comm, c.comm->queue_ticket(is_launched())});
      holds.push_back(c.comm->hold());
    } else if (!known) {
      turns.push_back({c.comm, c.comm->take_ticket()});
    }
    if (exec::PersistentKernel* kernel = kernel_of(c); kernel != nullptr && !is_launched())
      c.promise = kernel->promise();
  }
}

namespace {

// A stream of a group's calls; null: this thread.
struct Place {
  Stream* stream = nullptr;
  std::shared_ptr<Batch> batch;
  bool walks = false;     // it is a CUDA stream, and the persistent kernel runs all calls
  bool in_order = true;   // see Batch
  bool captured = false;  // the stream is being captured
  bool alone = true;      // its calls do not run together with those of another stream
  // All calls are messages of this communicator. One launch moves them.
  Communicator* exchanges = nullptr;

  bool at_once() const { return walks && in_order && alone; }
  // Returns whether the stream may wait on the device for launches on other streams. A stream that waits occupies a
  // hardware queue, which another rank may need for the kernel that this one waits for (decision 115). In a graph there
  // are no such waits.
  bool may_wait() const { return captured || stream->as_cuda()->may_wait(); }
};

struct Places {
  std::vector<Place> all;
  std::vector<size_t> at;  // [calls] each call's place
};

Result<Places> places_of(const std::vector<Call>& calls) {
  Places places;
  for (const Call& c : calls) {
    const auto known =
        std::find_if(places.all.begin(), places.all.end(), [&](const Place& p) { return p.stream == c.stream; });
    places.at.push_back(static_cast<size_t>(known - places.all.begin()));
    if (known == places.all.end()) {
      places.all.push_back({.stream = c.stream, .batch = std::make_shared<Batch>()});
      places.all.back().walks = c.stream != nullptr && c.stream->as_cuda() != nullptr;
      places.all.back().exchanges = c.operation == nullptr ? c.comm : nullptr;
    }
    Place& p = places.all[places.at.back()];
    const exec::PersistentKernel* const kernel = kernel_of(c);
    p.walks = p.walks && kernel != nullptr && p.exchanges == (c.operation == nullptr ? c.comm : nullptr);
    p.in_order = p.in_order && kernel != nullptr && !kernel->has_promised();
  }
  for (Place& p : places.all) {
    if (!p.walks) continue;
    MOECCL_ASSIGN_OR_RETURN(p.captured, p.stream->as_cuda()->capturing());
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    Place& p = places.all[places.at[i]];
    if (!p.walks || !p.in_order || p.captured) continue;
    p.in_order = !kernel_of(calls[i])->would_wait(p.stream->as_cuda()->stream()) || p.may_wait();
  }
  return places;
}

// Joins the batches of streams that share a communicator, unless the device runs all of them at once.
void join(Places& places, const std::vector<Call>& calls) {
  std::map<Communicator*, std::set<size_t>> of;
  for (size_t i = 0; i < calls.size(); ++i) of[calls[i].comm].insert(places.at[i]);
  // A launch of messages ends when the peers' come, which may wait for another launch of the same group.
  const auto beside = [&](size_t i) {
    return places.all[i].exchanges == nullptr && places.all[i].at_once() && places.all[i].may_wait();
  };
  // A stream that is joined to another one does not run at once any more, which may join further ones to it.
  for (bool joined = true; joined;) {
    joined = false;
    for (const auto& [comm, own] : of) {
      if (own.size() == 1 || std::all_of(own.begin(), own.end(), beside)) continue;
      const std::shared_ptr<Batch> kept = places.all[*own.begin()].batch;
      for (const size_t i : own) {
        const std::shared_ptr<Batch> left = places.all[i].batch;
        joined = joined || left != kept;
        for (Place& p : places.all) {
          if (p.batch != left) continue;
          p.batch = kept;
          p.alone = false;
        }
      }
    }
  }
}

// An abort of one of the batch's communicators calls the meeting off.
void arrange_meeting(Batch& batch) {
  batch.meeting = std::make_shared<Meeting>(batch.others.size());
  std::set<const Communicator*> told;
  for (const Call& c : batch.calls)
    if (told.insert(c.comm).second) c.comm->meetings().add(batch.meeting);
}

}  // namespace

Result<Batches> batches_of(std::vector<Call>& calls) {
  MOECCL_ASSIGN_OR_RETURN(Places places, places_of(calls));
  join(places, calls);
  Batches batches;
  for (const Place& p : places.all) {
    if (std::find(batches.begin(), batches.end(), p.batch) == batches.end()) {
      batches.push_back(p.batch);
      p.batch->stream = p.stream;
      p.batch->launchable = p.walks;
      p.batch->in_order = p.in_order;
      p.batch->captured = p.walks && p.captured;
      continue;
    }
    p.batch->launchable = p.batch->captured = false;
    // If a call has no stream, this thread runs the calls, and streams wait for it.
    p.batch->others.push_back(p.stream == nullptr ? std::exchange(p.batch->stream, nullptr) : p.stream);
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    Batch& batch = *places.all[places.at[i]].batch;
    batch.calls.push_back(std::move(calls[i]));
    batch.places.push_back(i);
  }
  for (const auto& b : batches)
    if (!b->others.empty()) arrange_meeting(*b);
  return batches;
}

namespace {

// Launches a call on the caller's stream, or all messages of the batch with its first call, unless an earlier call of
// the batch has failed. In a capture this becomes a node of the graph.
void launch(Batch& batch, const Call& c) {
  if (!batch.launched.ok() || (batch.has_messages() && &c != &batch.calls.front())) return;
  uint64_t number = 0;
  uint64_t* const to = batch.captured ? nullptr : &number;
  exec::PersistentKernel& kernel = *kernel_of(c);
  const driver::cuda::Stream stream = batch.stream->as_cuda()->stream();
  batch.launched =
      batch.has_messages() ? kernel.launch(batch.messages(), stream, to) : kernel.launch(*c.operation, stream, to);
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
  for (const auto& batch : batches) {
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
