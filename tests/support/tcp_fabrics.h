// SPDX-License-Identifier: Apache-2.0
// Fabrics of n ranks in one process that reach each other over TCP on loopback, each rank as if on its own host.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/table.h"
#include "src/exec/fabric.h"
#include "transport/tcp/mesh.h"
#include "transport/tcp/tcp_engine.h"

namespace moeccl::tests {

// The differences from plain connections. Functions may be empty.
struct TcpWay {
  transport::tcp::Cipher cipher = transport::tcp::Cipher::kNone;
  std::function<void(uint32_t reader, uint32_t of, transport::Nic& nic)> reroute = {};
  std::function<void(transport::tcp::MeshOptions& options)> prepare = {};
};

class TcpFabrics {
 public:
  // arrivals: the Arrivals that learn of puts to each rank; may be null.
  explicit TcpFabrics(uint32_t n, int streams = 1, uint64_t staging_bytes = 4 << 20,
                      transport::Arrivals* arrivals = nullptr, const TcpWay& way = {})
      : statuses(n) {
    using transport::tcp::Mesh;
    std::vector<std::unique_ptr<Mesh>> meshes;
    std::vector<std::vector<transport::Nic>> nics;
    for (uint32_t r = 0; r < n; ++r) {
      transport::tcp::MeshOptions o;
      o.rank = r;
      o.n_ranks = n;
      o.key[0] = std::byte{42};
      o.lost_after_ms = 20'000;
      o.streams_per_rail = streams;
      o.deadline = Deadline::after_ms(20'000);
      o.cipher = way.cipher;
      if (way.prepare) way.prepare(o);
      // 127.0.0.r + 1 is an address of this rank alone, as its host's address would be.
      transport::Nic nic{"lo", *driver::parse_ip_address(format("127.0.0.{}", r + 1)), 8, 0};
      meshes.push_back(std::move(*Mesh::listen(o, {nic})));
      nics.emplace_back(meshes.back()->nics().begin(), meshes.back()->nics().end());
    }
    for (uint32_t r = 0; r < n; ++r) {
      fabrics_.push_back(make(n, r, staging_bytes));
      fabrics_.back()->arrivals = arrivals;
    }
    std::vector<std::vector<std::vector<transport::Nic>>> read(n, nics);  // [reader][of]
    for (uint32_t r = 0; r < n && way.reroute; ++r)
      for (uint32_t p = 0; p < n; ++p) way.reroute(r, p, read[r][p][0]);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < n; ++r) {
      threads.emplace_back([&, r] { statuses[r] = connect(*meshes[r], *fabrics_[r], read[r]); });
    }
    for (auto& t : threads) t.join();
    for (const Status& s : statuses) {
      if (!s.ok()) status = s;
    }
  }
  Status status;                 // the first failure
  std::vector<Status> statuses;  // [n]
  exec::Fabric& operator[](uint32_t rank) { return *fabrics_[rank]; }
  std::unique_ptr<exec::Fabric>& slot(uint32_t rank) { return fabrics_[rank]; }
  uint32_t n() const { return static_cast<uint32_t>(fabrics_.size()); }

 private:
  static std::unique_ptr<exec::Fabric> make(uint32_t n, uint32_t r, uint64_t staging_bytes) {
    auto f = std::make_unique<exec::Fabric>(r, n, staging_bytes);
    f->own = *transport::shm::Segment::create({n, r, staging_bytes, 4096}, false);
    f->kernels = &kernels::best();
    f->timeout_ms = 20'000;
    f->spin_polls = 40;
    return f;
  }
  static Status connect(transport::tcp::Mesh& mesh, exec::Fabric& f,
                        const std::vector<std::vector<transport::Nic>>& nics) {
    std::map<uint32_t, std::vector<transport::Nic>> others;
    for (uint32_t p = 0; p < f.n_ranks; ++p) {
      if (p != f.rank) others[p] = nics[p];
    }
    MOECCL_ASSIGN_OR_RETURN(auto peers, mesh.connect(others));
    MOECCL_ASSIGN_OR_RETURN(auto engine, transport::tcp::TcpEngine::create());
    transport::LocalMemory m = f.own->memory(f.rank);
    m.arrivals = f.arrivals;
    for (auto& p : peers) {
      const uint32_t rank = p.rank;
      MOECCL_ASSIGN_OR_RETURN(f.links[rank], engine->add(m, std::move(p)));
    }
    MOECCL_TRY(engine->start());
    f.engine = std::move(engine);
    return {};
  }

  std::vector<std::unique_ptr<exec::Fabric>> fabrics_;
};

}  // namespace moeccl::tests
