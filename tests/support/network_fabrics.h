// SPDX-License-Identifier: Apache-2.0
// Fabrics of n ranks in one process, each as if on its own host, over any network of transport/networks.cc or of a
// test.
#pragma once

#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/table.h"
#include "src/exec/fabric.h"
#include "tests/support/timing.h"
#include "transport/transport.h"

namespace moeccl::tests {

class NetworkFabrics {
 public:
  using Offers = std::vector<std::vector<std::byte>>;
  // Changes the ranks' offers that `reader` gets.
  using Tamper = std::function<void(uint32_t reader, Offers& offers)>;
  // Completes a rank before it connects: its Arrivals and its device memory.
  using Prepare = std::function<void(exec::Fabric&)>;
  explicit NetworkFabrics(const transport::Network& network, uint32_t n, uint64_t staging_bytes = 4 << 20,
                          const Prepare& prepare = {}, const Tamper& tamper = {}) {
    Offers offers(n);
    std::vector<Offers> rows(n);
    std::vector<Status> statuses(n);
    std::latch offered(n);
    for (uint32_t r = 0; r < n; ++r) {
      fabrics_.push_back(make(n, r, staging_bytes));
      if (prepare) prepare(*fabrics_[r]);
    }
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < n; ++r) {
      threads.emplace_back([&, r] {
        auto endpoint = network.open(options(n, r));
        statuses[r] = endpoint.status();
        if (endpoint.ok()) {
          statuses[r] = (*endpoint)->register_memory(memory_of(*fabrics_[r]), {});
          if (statuses[r].ok() && fabrics_[r]->device_memory.context != nullptr)
            statuses[r] = (*endpoint)->register_device(fabrics_[r]->device_memory).status();
          auto offer = statuses[r].ok() ? (*endpoint)->offer() : statuses[r];
          statuses[r] = offer.status();
          if (offer.ok()) offers[r] = std::move(*offer);
          if (offer.ok()) rows[r] = (*endpoint)->rows();
        }
        offered.arrive_and_wait();
        Offers read = offers;
        for (uint32_t p = 0; p < n; ++p)
          if (!rows[p].empty()) read[p].insert(read[p].end(), rows[p][r].begin(), rows[p][r].end());
        if (tamper) tamper(r, read);
        if (statuses[r].ok()) statuses[r] = connect(**endpoint, *fabrics_[r], read);
      });
    }
    for (auto& t : threads) t.join();
    for (const Status& s : statuses)
      if (!s.ok() && status.ok()) status = s;
  }

  Status status;  // the first failure
  exec::Fabric& operator[](uint32_t rank) { return *fabrics_[rank]; }
  std::unique_ptr<exec::Fabric>& slot(uint32_t rank) { return fabrics_[rank]; }
  uint32_t n() const { return static_cast<uint32_t>(fabrics_.size()); }

  // Runs `rank_body` for each rank on its own thread.
  template <class Body>
  void run(Body&& rank_body) {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < n(); ++r) threads.emplace_back([&, r] { rank_body(r, *fabrics_[r]); });
    for (auto& t : threads) t.join();
  }

 private:
  static transport::NetworkOptions options(uint32_t n, uint32_t rank) {
    transport::NetworkOptions o;
    o.rank = rank;
    for (uint32_t r = 0; r < n; ++r) o.host_of.push_back(r);
    o.key[0] = std::byte{42};
    o.timeout_ms = patient_ms(20'000);
    o.deadline = Deadline::after_ms(o.timeout_ms);
    o.same_network.assign(n, true);
    return o;
  }

  static std::unique_ptr<exec::Fabric> make(uint32_t n, uint32_t rank, uint64_t staging_bytes) {
    auto f = std::make_unique<exec::Fabric>(rank, n, staging_bytes);
    f->own = *transport::shm::Segment::create({n, rank, staging_bytes, 4096}, false);
    f->kernels = &kernels::best();
    f->timeout_ms = patient_ms(20'000);
    f->spin_polls = 40;
    return f;
  }

  static transport::LocalMemory memory_of(const exec::Fabric& f) {
    transport::LocalMemory memory = f.own->memory(f.rank);
    if (f.device_memory.context == nullptr) memory.arrivals = f.arrivals;
    return memory;
  }

  static Status connect(transport::Endpoint& endpoint, exec::Fabric& f, const Offers& offers) {
    MOECCL_ASSIGN_OR_RETURN(transport::NetworkLinks made, endpoint.connect(memory_of(f), {}, offers));
    f.links = std::move(made.links);
    f.engine = std::move(made.engine);
    return {};
  }

  std::vector<std::unique_ptr<exec::Fabric>> fabrics_;
};

// Returns whether `done` came true in time, while the fabric's engine makes progress.
inline bool until(exec::Fabric& f, const std::function<bool()>& done, int ms = 20'000) {
  for (const Deadline d = Deadline::after_ms(patient_ms(ms)); !d.passed(); std::this_thread::yield()) {
    if (done()) return true;
    f.engine->progress();
  }
  return false;
}

}  // namespace moeccl::tests
