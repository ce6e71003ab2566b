// SPDX-License-Identifier: Apache-2.0
// An estimate of how fast a host reaches the others, for use until it has been measured.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>

namespace moeccl::transport {

// Returns the uplink rate of the slowest host. rates: [n_ranks], the uplink of each rank's host as that rank offers it;
// a host's first rank counts.
inline double slowest_uplink(std::span<const uint32_t> host_of, std::span<const double> rates) {
  std::map<uint32_t, double> of_host;
  for (uint32_t r = 0; r < host_of.size(); ++r) of_host.emplace(host_of[r], rates[r]);
  return std::min_element(of_host.begin(), of_host.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->second;
}

}  // namespace moeccl::transport
