// SPDX-License-Identifier: Apache-2.0
// Two ranks that connect by TCP over loopback addresses.
#pragma once

#include <memory>
#include <vector>

#include "transport/tcp/mesh.h"

namespace moeccl::transport::tcp {

inline MeshOptions options_of(uint32_t rank, int64_t deadline_ms = 20'000) {
  MeshOptions o;
  o.rank = rank;
  o.n_ranks = 2;
  o.key[5] = std::byte{7};
  o.lost_after_ms = 20'000;
  o.deadline = Deadline::after_ms(deadline_ms);
  return o;
}

inline std::unique_ptr<Mesh> listen(const MeshOptions& o) {
  return std::move(*Mesh::listen(o, {{"lo", *driver::parse_ip_address(format("127.0.0.{}", o.rank + 1)), 8, 0}}));
}

inline std::vector<Nic> nics_of(const Mesh& m) { return {m.nics().begin(), m.nics().end()}; }

}  // namespace moeccl::transport::tcp
