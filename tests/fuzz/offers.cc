// SPDX-License-Identifier: Apache-2.0
// What a peer says about its connections before there are any: the offers of RDMA and of a net plugin, with the rows
// behind them (queue pairs, handles).
#include "transport/verbs/offer.h"

#include <algorithm>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "transport/netplugin/connecting.h"

using namespace moeccl;
using namespace moeccl::transport;

namespace {

void verbs_offer(std::span<const std::byte> bytes) {
  const auto offer = verbs::read_offer(bytes, 1);
  if (!offer.ok()) {
    FUZZ_CHECK(!offer.status().message().empty());
    return;
  }
  FUZZ_CHECK(!offer->rails.empty() && offer->rails.size() <= verbs::kMaxRails && offer->n_queues >= 1);
  FUZZ_CHECK(offer->queues.empty() || offer->queues.size() == offer->rails.size() * offer->n_queues);
  for (size_t rail = 0; rail < offer->rails.size() && !offer->queues.empty(); ++rail)
    for (uint32_t q = 0; q < offer->n_queues; ++q) FUZZ_CHECK(offer->queue(rail, q).number <= 0xffffff);
  // What is read and written again says the same.
  std::vector<std::byte> again = verbs::write_offer(*offer), row = verbs::write_row(offer->queues);
  again.insert(again.end(), row.begin(), row.end());
  const auto second = verbs::read_offer(again, 1);
  FUZZ_CHECK(second.ok() && verbs::write_offer(*second) == verbs::write_offer(*offer));
}

void plugin_offer(std::span<const std::byte> bytes) {
  netplugin::Offer offer;
  if (!offer.read(bytes)) return;
  FUZZ_CHECK(!offer.rails.empty());
  FUZZ_CHECK(std::all_of(offer.rails.begin(), offer.rails.end(), [](double weight) { return weight > 0; }));
  FUZZ_CHECK(offer.handles.empty() || offer.handles.size() == 1 + offer.rails.size());
  netplugin::Offer second;
  FUZZ_CHECK(second.read(offer.write()) && second.write() == offer.write() && second.handles.empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  data[0] % 2 == 0 ? verbs_offer(bytes) : plugin_offer(bytes);
  return 0;
}
