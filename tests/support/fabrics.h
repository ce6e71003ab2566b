// SPDX-License-Identifier: Apache-2.0
// Fabrics of n ranks in one process without a communicator, to test executors alone.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/table.h"
#include "src/exec/fabric.h"
#include "tests/support/timing.h"
#include "transport/shm/shm_link.h"

namespace moeccl::tests {

class Fabrics {
 public:
  explicit Fabrics(uint32_t n, uint64_t staging_bytes = 4 << 20) {
    std::vector<std::shared_ptr<transport::shm::Segment>> segments;
    for (uint32_t r = 0; r < n; ++r) {
      segments.push_back(*transport::shm::Segment::create({n, r, staging_bytes, 4096}, false));
    }
    for (uint32_t r = 0; r < n; ++r) {
      auto f = std::make_unique<exec::Fabric>(r, n, staging_bytes);
      f->own = segments[r];
      f->kernels = &kernels::best();
      f->timeout_ms = patient_ms(20'000);
      f->spin_polls = 40;
      for (uint32_t p = 0; p < n; ++p) {
        if (p == r) continue;
        transport::shm::ShmPeer peer;
        peer.own_rank = r;
        peer.peer_rank = p;
        peer.segment = segments[p];
        peer.same_process = true;
        f->links[p] = std::make_unique<transport::shm::ShmLink>(std::move(peer));
      }
      fabrics_.push_back(std::move(f));
    }
  }
  exec::Fabric& operator[](uint32_t rank) { return *fabrics_[rank]; }
  uint32_t n() const { return static_cast<uint32_t>(fabrics_.size()); }

  // Runs `rank_body` for each rank on its own thread.
  void run(const std::function<void(uint32_t rank, exec::Fabric&)>& rank_body) {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < n(); ++r) threads.emplace_back([&, r] { rank_body(r, *fabrics_[r]); });
    for (auto& t : threads) t.join();
  }

 private:
  std::vector<std::unique_ptr<exec::Fabric>> fabrics_;
};

}  // namespace moeccl::tests
