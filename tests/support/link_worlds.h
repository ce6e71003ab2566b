// SPDX-License-Identifier: Apache-2.0
// The worlds in which links are tested: ranks of one process with links between all of them, over every transport.
// Compiled with MOECCL_TEST_CUDA_LINKS, the links are those of CUDA memory on the emulated driver.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/fabrics.h"
#include "tests/support/fake_verbs.h"
#include "tests/support/network_fabrics.h"
#include "tests/support/shuffled_network.h"
#include "transport/paced/paced_link.h"
#include "transport/tcp/tcp_network.h"
#ifdef MOECCL_TEST_CUDA_LINKS
#include "src/exec/cuda/stream_engine.h"
#include "tests/support/cuda_device.h"
#include "tests/support/emulated_memory.h"
#include "transport/cuda_ipc/cuda_link.h"
#include "transport/cuda_net/cuda_net.h"
#endif

namespace moeccl::tests {

class World {
 public:
  virtual ~World() = default;
  virtual exec::Fabric& operator[](uint32_t rank) = 0;
  virtual void end(uint32_t rank) = 0;  // its links and its engine
  virtual bool network() const = 0;
  // The place where the peers' puts can be read, after settle() following their signal.
  virtual std::byte* staging(uint32_t rank) { return (*this)[rank].own->staging(); }
  virtual void settle(uint32_t, uint32_t) {}
  // Waits until the work on the rank's stream is done.
  virtual void synchronize(uint32_t) {}
  // Packs a room as code on the rank's memory would.
  virtual void pack(uint32_t, std::byte* room, const void* data, size_t bytes) { std::memcpy(room, data, bytes); }
  // Called before a thread other than the test's works for a rank.
  virtual void enter() {}
};

class SharedWorld final : public World {
 public:
  SharedWorld(uint32_t n, bool paced) : fabrics_(n) {
    if (!paced) return;
    uplinks_ = std::vector<transport::PaceWords>(n);
    for (uint32_t r = 0; r < n; ++r) {
      for (uint32_t p = 0; p < n; ++p) {
        if (p == r) continue;
        const transport::paced::PacedUplinks between{{5'000, 2.0}, &uplinks_[r], &uplinks_[p]};
        fabrics_[r].links[p] = std::make_unique<transport::paced::PacedLink>(std::move(fabrics_[r].links[p]), between);
      }
    }
  }
  exec::Fabric& operator[](uint32_t rank) override { return fabrics_[rank]; }
  void end(uint32_t rank) override { fabrics_[rank].links.clear(); }
  bool network() const override { return false; }

 private:
  Fabrics fabrics_;
  std::vector<transport::PaceWords> uplinks_;
};

class NetworkWorld final : public World {
 public:
  NetworkWorld(const transport::Network& network, uint32_t n) : fabrics_(network, n) {}
  const Status& status() const { return fabrics_.status; }
  exec::Fabric& operator[](uint32_t rank) override { return fabrics_[rank]; }
  void end(uint32_t rank) override {
    fabrics_[rank].engine = nullptr;
    fabrics_[rank].links.clear();
  }
  bool network() const override { return true; }

 private:
  NetworkFabrics fabrics_;
};

inline constexpr transport::Network kEncryptedTcp = {"tcp_encrypted", transport::tcp::kCapabilities,
                                                     transport::tcp::probe,
                                                     [](const transport::NetworkOptions& options) {
                                                       transport::NetworkOptions o = options;
                                                       o.encrypt = true;
                                                       return transport::tcp::open(o);
                                                     }};

#ifdef MOECCL_TEST_CUDA_LINKS
// Memory of the emulated device is memory of this process.
class CudaWorld final : public World {
 public:
  // network: connects the ranks, each on a separate host; null: they share one host.
  CudaWorld(uint32_t n, const transport::Network* network, bool direct) : device_(0) {
    const auto* driver = driver::cuda::driver();
    EXPECT_TRUE(device_.ok() && device_.emulated() && driver != nullptr);
    EXPECT_EQ(driver->cuCtxGetCurrent(&context_), 0);
    for (uint32_t r = 0; r < n; ++r) streams_.push_back(std::move(*exec::StreamEngine::create(context_, 0)));
    if (network != nullptr) {
      connect_hosts(n, context_, *network, direct);
    } else {
      here_.emplace(n);
      for (uint32_t r = 0; r < n; ++r) {
        transport::shm::Segment& own = *(*here_)[r].own;
        EXPECT_EQ(driver->cuMemHostRegister_v2(own.base(), own.bytes(), 0), 0);  // streams store signals there
        for (uint32_t p = 0; p < n; ++p) {
          if (p == r) continue;
          transport::cuda_ipc::CudaPeer peer;
          peer.stream = streams_[r]->stream();
          peer.staging = (*here_)[p].own->staging();
          peer.direct = true;
          auto& link = (*here_)[r].links[p];
          link = std::make_unique<transport::cuda_ipc::CudaLink>(std::move(link), std::move(peer));
        }
      }
    }
  }
  ~CudaWorld() override {
    for (auto& s : streams_) (void)s->synchronize();
    for (uint32_t r = 0; here_ && r < here_->n(); ++r)
      (void)driver::cuda::driver()->cuMemHostUnregister((*here_)[r].own->base());
  }
  void pack(uint32_t rank, std::byte* room, const void* data, size_t bytes) override {
    EXPECT_EQ(driver::cuda::driver()->cuMemcpyHtoDAsync_v2(reinterpret_cast<driver::cuda::Pointer>(room), data, bytes,
                                                           streams_[rank]->stream()),
              0);
    synchronize(rank);
  }
  void enter() override { EXPECT_EQ(driver::cuda::driver()->cuCtxSetCurrent(context_), 0); }
  exec::Fabric& operator[](uint32_t rank) override { return here_ ? (*here_)[rank] : (*away_)[rank]; }
  void end(uint32_t rank) override {
    (*this)[rank].engine = nullptr;
    (*this)[rank].links.clear();
  }
  bool network() const override { return away_.has_value(); }
  std::byte* staging(uint32_t rank) override { return here_ ? World::staging(rank) : memory_[rank].seen(); }
  void settle(uint32_t rank, uint32_t from) override {
    if (auto* device = (*this)[rank].link(from).device(); device != nullptr) {
      EXPECT_TRUE(device->settle().ok());
    }
    synchronize(rank);
  }
  void synchronize(uint32_t rank) override { EXPECT_TRUE(streams_[rank]->synchronize().ok()); }

 private:
  void connect_hosts(uint32_t n, driver::cuda::Context context, const transport::Network& network, bool direct) {
    std::vector<std::unique_ptr<transport::cuda_net::CudaNet>> nets;
    memory_.resize(n);
    const auto prepare = [&](exec::Fabric& f) {
      memory_[f.rank] = EmulatedMemory(context, kStaging);
      transport::cuda_net::CudaNet::Staging s;
      s.context = context;
      s.stream = streams_[f.rank]->stream();
      s.own = f.own->memory(f.rank);
      s.staging_bytes = kStaging;
      s.device_staging = memory_[f.rank].device();
      s.most_put_bytes = 2 << 20;
      s.n_ranks = n;
      nets.push_back(std::move(*transport::cuda_net::CudaNet::create(s)));
      f.arrivals = nets.back().get();
      if (direct) f.device_memory = *nets.back()->device_memory();
    };
    away_.emplace(network, n, kStaging, prepare);
    EXPECT_TRUE(away_->status.ok()) << away_->status.message();
    for (uint32_t r = 0; r < n; ++r) {
      exec::Fabric& f = (*away_)[r];
      EXPECT_TRUE(nets[r]->use(direct).ok());
      nets[r]->set_engine(std::move(f.engine));
      for (uint32_t p = 0; p < n; ++p)
        if (p != r && f.links[p] != nullptr) f.links[p] = nets[r]->wrap(p, std::move(f.links[p]));
      f.engine = std::move(nets[r]);
    }
  }

  static constexpr size_t kStaging = 4 << 20;
  moeccl::testing::CudaDevice device_;
  driver::cuda::Context context_ = nullptr;
  std::vector<std::unique_ptr<exec::StreamEngine>> streams_;
  std::vector<EmulatedMemory> memory_;
  std::optional<Fabrics> here_;
  std::optional<NetworkFabrics> away_;
};

inline std::vector<std::string> transports() {
  return {"cuda",
          "cuda_over_tcp",
          "cuda_over_tcp_encrypted",
          "cuda_over_verbs",
          "cuda_over_verbs_dmabuf",
          "cuda_over_verbs_dmabuf_lanes",
          "cuda_over_verbs_dmabuf_unordered",
          "cuda_over_verbs_peermem"};
}
inline std::unique_ptr<World> cuda_world(const std::string& name, uint32_t n) {
  if (name == "cuda") return std::make_unique<CudaWorld>(n, nullptr, false);
  if (name == "cuda_over_tcp") return std::make_unique<CudaWorld>(n, transport::find_network("tcp"), false);
  if (name == "cuda_over_tcp_encrypted") return std::make_unique<CudaWorld>(n, &kEncryptedTcp, false);
  (void)fake_verbs::probe();
  const bool direct = name != "cuda_over_verbs", dmabuf = name.find("dmabuf") != std::string::npos;
  setenv("MOECCL_TEST_CUDA_RDMA", dmabuf ? "dmabuf" : "peermem", 1);
  FakeVerbs::get().control().set_device_memory(dmabuf, !dmabuf);
  FakeVerbs::get().control().set_late_device(direct);
  const size_t which = name.ends_with("lanes") ? 1 : name.ends_with("unordered") ? 2 : 0;
  return std::make_unique<CudaWorld>(n, &fake_verbs::kNetworks[which], direct);
}
#else
inline std::unique_ptr<World> cuda_world(const std::string&, uint32_t) { return nullptr; }
inline std::vector<std::string> transports() {
  std::vector<std::string> names = {"thread", "paced", kShuffledNetwork.name, kEncryptedTcp.name};
  for (const transport::Network& n : transport::networks()) names.emplace_back(n.name);
  for (const transport::Network& n : fake_verbs::kNetworks) names.emplace_back(n.name);
  return names;
}
#endif

inline const transport::Network& network_of(const std::string& name) {
  for (const transport::Network& n : fake_verbs::kNetworks)
    if (name == n.name) return n;
  if (name == kEncryptedTcp.name) return kEncryptedTcp;
  return name == kShuffledNetwork.name ? kShuffledNetwork : *transport::find_network(name);
}

}  // namespace moeccl::tests
