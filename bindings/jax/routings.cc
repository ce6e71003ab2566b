// SPDX-License-Identifier: Apache-2.0
#include "bindings/jax/routings.h"

#include <algorithm>
#include <atomic>

namespace moeccl::jax {

Numbered<Layer>& layers() {
  static auto& all = *new Numbered<Layer>;  // never destroyed, as members()
  return all;
}

void Layer::close() {
  for (const Entry& entry : entries_) moecclRoutingDestroy(entry.routing);
  entries_.clear();
  moe_ = nullptr;
}

Outcome Layer::make(Choices* choices, moecclRouting_t* routing) {
  // One sequence for all layers: a number of another layer is then found on no rank, and all of them make the routing
  // again. Ranks may be at different numbers, because each looks for its own.
  static std::atomic<uint64_t> last{0};
  choices->number = ++last;
  return update(*choices, routing);
}

Outcome Layer::find(const Choices& choices, moecclRouting_t* routing) {
  const auto at = std::find_if(entries_.begin(), entries_.end(),
                               [&](const Entry& entry) { return entry.number == choices.number; });
  if (at == entries_.end()) return update(choices, routing);
  entries_.splice(entries_.begin(), entries_, at);
  *routing = at->routing;
  return {};
}

// Puts the routing first, in the memory of the oldest one if there are enough.
Outcome Layer::update(const Choices& choices, moecclRouting_t* routing) {
  if (moe_ == nullptr) return closed("the layer", "ExpertParallel");
  const bool full = entries_.size() >= shape.routings;
  if (full) {
    entries_.splice(entries_.begin(), entries_, std::prev(entries_.end()));
  } else {
    entries_.push_front({});
  }
  Entry& entry = entries_.front();
  const moecclResult_t result =
      full ? moecclRoutingUpdate(entry.routing, choices.index, choices.weight, choices.n_tokens)
           : moecclRoutingCreate(&entry.routing, moe_, choices.index, choices.weight, choices.n_tokens);
  if (result != moecclSuccess) {
    const Failure failure = failure_of(result, member->comm);
    moecclRoutingDestroy(entry.routing);  // of NULL, if it was not created, this does nothing
    entries_.pop_front();
    return failure;
  }
  entry.number = choices.number;
  *routing = entry.routing;
  return {};
}

}  // namespace moeccl::jax

// Returns the number of a layer for programs; 0 without memory or if the communicator's number is not one.
extern "C" MOECCL_API int64_t moecclJaxAddLayer(int64_t comm, moecclMoe_t moe, size_t row_bytes, size_t top_k,
                                                size_t room, size_t routings) {
  using namespace moeccl::jax;
  try {
    std::shared_ptr<Member> member = members().find(comm);
    if (member == nullptr) return 0;
    return layers().add(std::make_shared<Layer>(std::move(member), moe,
                                                LayerShape{row_bytes, top_k, room, std::max<size_t>(1, routings)}));
  } catch (const std::exception&) {
    return 0;
  }
}

// Frees a layer's routings; the layer itself is the caller's. Waits for the communicator's operations.
extern "C" MOECCL_API void moecclJaxRemoveLayer(int64_t number) {
  using namespace moeccl::jax;
  const std::shared_ptr<Layer> layer = layers().remove(number);
  if (layer == nullptr) return;
  const std::lock_guard lock(layer->member->busy);
  layer->close();
}
