// SPDX-License-Identifier: Apache-2.0
// Memory of the emulated CUDA device that NICs of the fake libibverbs reach: which way is chosen and why, which data
// takes which way, what is flushed, and that nothing is left. link_contract_test.cc tests what links on it promise.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "src/driver/ibv_abi.h"
#include "src/exec/cuda/stream_engine.h"
#include "src/world/network.h"
#include "tests/support/cuda_device.h"
#include "tests/support/emulated_memory.h"
#include "tests/support/fake_verbs.h"
#include "tests/support/network_fabrics.h"
#include "transport/cuda_net/cuda_net.h"

namespace moeccl::tests {
namespace {

using transport::DeviceMemory;
using transport::PutState;
using transport::cuda_net::CudaNet;

constexpr size_t kBytes = 4 << 20;

void land_all() { FakeVerbs::get().control().flush_device(); }

class DeviceMemoryOverVerbs : public OverFakeVerbs {
 protected:
  void SetUp() override {
    OverFakeVerbs::SetUp();
    ASSERT_EQ(driver::cuda::driver()->cuCtxGetCurrent(&context_), 0);
    allow("dmabuf");
    on_flush(nullptr);
  }
  // Sets the device's answer about NICs; null: none.
  static void allow(const char* words) {
    words == nullptr ? unsetenv("MOECCL_TEST_CUDA_RDMA") : setenv("MOECCL_TEST_CUDA_RDMA", words, 1);
  }
  static void on_flush(void (*flush)()) {
    void* const library = dlopen(std::getenv("MOECCL_CUDA_DRIVER"), RTLD_NOW | RTLD_NOLOAD);
    reinterpret_cast<void (*)(void (*)())>(dlsym(library, "moeccl_emulated_on_flush"))(flush);
    dlclose(library);
  }
  // Returns the way that an endpoint finds, or why there is none.
  std::string way(const transport::Network& network = fake_verbs::kNetworks[0]) {
    const EmulatedMemory landing(context_, kBytes), source(context_, kBytes);
    transport::NetworkOptions o;
    o.host_of = {0, 1};
    auto endpoint = network.open(o);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status().message();
    if (!endpoint.ok()) return "";
    const auto way = (*endpoint)->register_device({context_, {landing.device(), kBytes}, {source.device(), kBytes}});
    EXPECT_EQ(fake().counts().device_regions > before_.device_regions, way.ok());
    (*endpoint)->forget_device();
    EXPECT_EQ(fake().counts().device_regions, before_.device_regions);
    return way.ok() ? *way : way.status().message();
  }

  moeccl::testing::CudaDevice device_{0};
  driver::cuda::Context context_ = nullptr;
};

TEST_F(DeviceMemoryOverVerbs, IsReachedByDmabufElseByPeermemElseNot) {
  EXPECT_EQ(way(), "dma-buf");
  EXPECT_EQ(way(fake_verbs::kNetworks[1]), "dma-buf") << "of two rails";
  fake().control().set_device_memory(false, true);
  EXPECT_EQ(way(), "nvidia-peermem") << "the NIC's driver takes no dma-buf";
  fake().control().set_device_memory(true, true);
  allow("peermem");
  EXPECT_EQ(way(), "nvidia-peermem") << "the GPU's driver gives none";
  fake().control().set_device_memory(false, false);
  std::string why = way();
  EXPECT_TRUE(has(why, "no dma-buf: the CUDA driver gives no dma-buf")) << why;
  EXPECT_TRUE(has(why, "no nvidia-peermem") && has(why, "modprobe nvidia_peermem")) << why;
  allow("dmabuf");
  why = way();
  EXPECT_TRUE(has(why, "mlx5_0:1: the NIC's driver takes no dma-buf: Operation not supported")) << why;
  allow(nullptr);
  EXPECT_TRUE(has(way(), "no GPUDirect RDMA")) << way();
}

TEST_F(DeviceMemoryOverVerbs, IsRegisteredByPiecesOfTwoGigabytes) {
  constexpr size_t kBig = (size_t{5} << 30) + 100;
  auto* const big = static_cast<std::byte*>(device_.allocate(kBig));
  ASSERT_NE(big, nullptr);
  const EmulatedMemory source(context_, kBytes);
  transport::NetworkOptions o;
  o.host_of = {0, 1};
  auto endpoint = fake_verbs::kNetworks[0].open(o);
  ASSERT_TRUE(endpoint.ok());
  ASSERT_TRUE((*endpoint)->register_device({context_, {big, kBig}, {source.device(), kBytes}}).ok());
  EXPECT_EQ(fake().counts().device_regions, before_.device_regions + 4) << "three of the landing, one of the source";
  (*endpoint)->forget_device();
  device_.release(big);
}

// Two ranks, each with a stream, staging on the device and links of CudaNet.
class Ranks {
 public:
  Ranks(driver::cuda::Context context, const transport::Network& network, bool direct = true) {
    std::vector<std::unique_ptr<CudaNet>> nets;
    for (EmulatedMemory& m : staging) m = EmulatedMemory(context, kBytes);
    fabrics.emplace(network, 2, kBytes, [&](exec::Fabric& f) {
      streams.push_back(std::move(*exec::StreamEngine::create(context, 0)));
      CudaNet::Staging s;
      s.context = context;
      s.stream = streams.back()->stream();
      s.own = f.own->memory(f.rank);
      s.staging_bytes = kBytes;
      s.device_staging = staging[f.rank].device();
      s.most_put_bytes = kBytes / 2;
      s.n_ranks = 2;
      nets.push_back(std::move(*CudaNet::create(s)));
      f.arrivals = nets.back().get();
      if (direct) f.device_memory = *nets.back()->device_memory();
    });
    EXPECT_TRUE(fabrics->status.ok()) << fabrics->status.message();
    for (const uint32_t r : {0u, 1u}) {
      exec::Fabric& f = (*fabrics)[r];
      EXPECT_TRUE(nets[r]->use(direct).ok());
      nets[r]->set_engine(std::move(f.engine));
      f.links[1 - r] = nets[r]->wrap(1 - r, std::move(f.links[1 - r]));
      f.engine = std::move(nets[r]);
      f.engine->begin();
    }
  }
  ~Ranks() {
    for (auto& s : streams) (void)s->synchronize();
    for (const uint32_t r : {0u, 1u}) (*fabrics)[r].engine->end();
  }
  exec::Fabric& operator[](uint32_t r) { return (*fabrics)[r]; }

  // Rank 0 puts and signals. Returns true when rank 1 has seen the signal.
  bool send(const EmulatedMemory& from, size_t bytes, uint32_t number) {
    for (bool put = false; !put;) {
      const auto state = (*fabrics)[0].link(1).put(0, from.device(), bytes);
      EXPECT_TRUE(state.ok()) << state.status().message();
      if (!state.ok()) return false;
      put = *state == PutState::kDone;
      (*fabrics)[0].engine->progress();
    }
    EXPECT_TRUE((*fabrics)[0].link(1).signal(0, number, 1).ok());
    for (const Deadline d = Deadline::after_ms(patient_ms(10'000)); !d.passed();) {
      for (const uint32_t r : {0u, 1u}) (*fabrics)[r].engine->progress();
      const uint64_t word = (*fabrics)[1].own->signal(0, 0).word.load(std::memory_order_acquire);
      if (static_cast<uint32_t>(word) == number) return true;
    }
    return false;
  }
  Status settle() { return (*fabrics)[1].link(0).device()->settle(); }

  EmulatedMemory staging[2];
  std::vector<std::unique_ptr<exec::StreamEngine>> streams;
  std::optional<NetworkFabrics> fabrics;
};

TEST_F(DeviceMemoryOverVerbs, GoesFromDeviceToDeviceAndIsThereAfterTheFlush) {
  constexpr size_t kPut = 300'000;
  for (const bool by_call : {false, true}) {
    allow(by_call ? "dmabuf call" : "dmabuf");
    on_flush(by_call ? land_all : nullptr);
    Ranks ranks(context_, fake_verbs::kNetworks[0]);
    fake().control().set_late_device(true);
    const EmulatedMemory source(context_, kBytes);
    const fake::IbvCounts start = fake().counts();
    for (uint32_t number = 1; number <= 20; ++number) {
      std::memset(source.seen(), static_cast<int>(number), kPut);
      ASSERT_TRUE(ranks.send(source, kPut, number)) << number;
      EXPECT_NE(ranks.staging[1].seen()[kPut - 1], static_cast<std::byte>(number)) << "this fake delivers late";
      ASSERT_TRUE(ranks.settle().ok());
      for (const size_t at : {size_t{0}, kPut / 2, kPut - 1})
        ASSERT_EQ(ranks.staging[1].seen()[at], static_cast<std::byte>(number)) << number << " at " << at;
    }
    const fake::IbvCounts end = fake().counts();
    EXPECT_EQ(end.device_bytes_out - start.device_bytes_out, 20 * kPut) << "the NIC reads what it sends there";
    EXPECT_EQ(end.device_bytes_in - start.device_bytes_in, 20 * kPut);
    fake().control().set_late_device(false);
  }
}

TEST_F(DeviceMemoryOverVerbs, IsNotFlushedWhereTheDeviceKeepsTheOrder) {
  allow("dmabuf ordered");
  Ranks ranks(context_, fake_verbs::kNetworks[0]);
  EXPECT_EQ(fake().counts().pairs, before_.pairs + 2) << "one to each peer, none for flushes";
  const EmulatedMemory source(context_, kBytes);
  ASSERT_TRUE(ranks.send(source, 1000, 1));
  const uint64_t requests = fake().counts().requests;
  ASSERT_TRUE(ranks.settle().ok());
  EXPECT_EQ(fake().counts().requests, requests);
}

TEST_F(DeviceMemoryOverVerbs, AFlushThatFailsNamesTheNic) {
  Ranks ranks(context_, fake_verbs::kNetworks[0]);
  const EmulatedMemory source(context_, kBytes);
  ASSERT_TRUE(ranks.send(source, 1000, 1));
  fake().control().fail_next(0, driver::ibv_abi::kRetryExceeded, 129);
  const Status why = ranks.settle();
  EXPECT_TRUE(has(why.message(), "mlx5_0:1 does not read from this GPU's memory") && has(why.message(), "status 12"))
      << why.message();
  EXPECT_FALSE(ranks.settle().ok()) << "and stays so";
}

// Parts of the bounce memory are reused when the NIC has read them, however much is put.
TEST_F(DeviceMemoryOverVerbs, RoomsComeBackWhenTheyWereRead) {
  Ranks ranks(context_, fake_verbs::kNetworks[1]);
  fake().control().set_delay_us(200);
  const EmulatedMemory source(context_, kBytes);
  for (uint32_t number = 1; number <= 30; ++number) ASSERT_TRUE(ranks.send(source, kBytes / 2, number)) << number;
}

TEST_F(DeviceMemoryOverVerbs, ARankThatFailsWhileItPutsEndsWithoutAWait) {
  const EmulatedMemory source(context_, kBytes);  // a stream may still copy from it when the ranks have ended
  Ranks ranks(context_, fake_verbs::kNetworks[0]);
  fake().control().set_delay_us(1000);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(ranks[0].link(1).put(0, source.device(), 100'000).ok());
  ranks[0].publish_state(transport::RankState::kFailed, moecclInvalidArgument, "given up");
  EXPECT_TRUE(ranks[0].link(1).signal(0, 1, 1).ok());
  for (const Deadline d = Deadline::after_ms(patient_ms(5'000)); !d.passed();) {
    ranks[0].engine->progress();
    const auto drained = ranks[0].engine->drained();
    if (drained.ok() && *drained) break;
  }
  EXPECT_TRUE(*ranks[0].engine->drained());
  EXPECT_EQ(ranks[1].own->signal(0, 0).word.load(), 0u);
}

// A link that counts how often it is asked whether the network still reads what was put.
class Asked final : public transport::Link, private transport::PostedPuts {
 public:
  explicit Asked(const transport::Board& board) {
    peer_words_ = {&board, {&block_, &block_}};
    parts_.posted_puts = this;
  }
  const char* name() const override { return "asked"; }
  Result<PutState> put(uint64_t, const void*, size_t) override { return PutState::kDone; }
  Status signal(uint32_t, uint32_t, uint32_t) override { return {}; }
  Status check_peer() override { return {}; }

  static inline uint32_t asked = 0;
  static inline bool read = false;

 private:
  Result<PutState> post(uint64_t, const void*, size_t) override {
    ++posted_;
    return PutState::kDone;
  }
  uint64_t posted() const override { return posted_; }
  bool taken(uint64_t) const override {
    ++asked;
    return read;
  }
  bool reads_sources() const override { return !read; }
  void withdraw() override {}

  transport::BlockWord block_ = {};
  uint64_t posted_ = 0;
};

class NoEngine final : public transport::Engine {
 public:
  void begin() override {}
  void end() override {}
  void progress(uint32_t) override {}
  void board_changed(bool) override {}
  void operation(uint32_t, bool) override {}
};

TEST_F(DeviceMemoryOverVerbs, RoomIsAskedForOnlyWhereSomethingIsLeaving) {
  constexpr uint32_t kRanks = 256;
  const auto board = std::make_unique<transport::Board>();
  const EmulatedMemory source(context_, kBytes);
  const auto stream = std::move(*exec::StreamEngine::create(context_, 0));
  CudaNet::Staging s;
  s.context = context_;
  s.stream = stream->stream();
  s.own.board = board.get();
  s.most_put_bytes = kBytes;
  s.n_ranks = kRanks;
  const auto net = std::move(*CudaNet::create(s));
  ASSERT_TRUE(net->device_memory().ok());
  ASSERT_TRUE(net->use(true).ok());
  net->set_engine(std::make_unique<NoEngine>());
  std::vector<std::unique_ptr<transport::Link>> links;
  for (uint32_t r = 1; r < kRanks; ++r) links.push_back(net->wrap(r, std::make_unique<Asked>(*board)));
  Asked::asked = 0;
  Asked::read = false;
  const auto put = [&](size_t link, size_t bytes) { return *links[link]->put(0, source.device(), bytes); };
  ASSERT_EQ(put(7, kBytes / 4 * 3), PutState::kDone);
  ASSERT_TRUE(links[7]->signal(0, 1, 1).ok());
  ASSERT_TRUE(stream->synchronize().ok());
  net->progress();
  ASSERT_TRUE(*net->drained());
  EXPECT_EQ(put(8, 1000), PutState::kDone);
  EXPECT_EQ(Asked::asked, 0u) << "there is room";
  EXPECT_EQ(put(9, kBytes / 2), PutState::kFull);
  EXPECT_EQ(Asked::asked, 1u);
  Asked::read = true;
  EXPECT_EQ(put(9, kBytes / 2), PutState::kDone);
  ASSERT_TRUE(stream->synchronize().ok());
}

// The result that a communicator's ranks agree on.
struct Agreed {
  comm::NetworkResult of[2];
  Status status[2];

  enum Second { kReached, kNotReached, kNone };
  // second: whether NICs reach rank 1's memory, or it has none because its host stages in host memory.
  Agreed(driver::cuda::Context context, Second second) {
    const Deadline deadline = Deadline::after_ms(patient_ms(10'000));
    bootstrap::RootOptions options;
    options.socket_addr = "127.0.0.1";
    const auto root = std::move(*bootstrap::Root::start(options));
    std::vector<std::byte> host(kBytes + 8192);
    auto* const whole = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(host.data()) + 4095) / 4096 * 4096);
    const EmulatedMemory memory[] = {{context, kBytes}, {context, kBytes}, {context, kBytes}, {context, kBytes}};
    const auto body = [&](uint32_t rank) {
      auto session = std::move(*bootstrap::Session::join(root->id(), static_cast<int>(rank), 2, deadline));
      const comm::HostOfRank host_of_rank[] = {{1, "a"}, {2, "b"}};
      const comm::Hosts hosts(host_of_rank);
      comm::Config config;
      config.timeout_ms = 5000;
      exec::Fabric f(rank, 2, kBytes);
      f.own = *transport::shm::Segment::create({2, rank, kBytes, 4096}, false);
      f.cuda = true;
      std::byte* const landing = rank == 0 || second == kReached ? memory[2 * rank].device() : whole + 1;
      if (rank == 0 || second != kNone)
        f.device_memory = {context, {landing, kBytes}, {memory[2 * rank + 1].device(), kBytes}};
      else
        f.device_memory.why_none = "rank 1: MOECCL_CUDA_IPC=0";
      auto made =
          comm::connect_hosts(*session, &fake_verbs::kNetworks[0], hosts, bootstrap::Key{}, config, f, deadline);
      status[rank] = made.status();
      if (made.ok()) of[rank] = *made;
      f.engine = nullptr;
      session->close();
    };
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  }
};

TEST_F(DeviceMemoryOverVerbs, IsTakenByAllRanksOrByNone) {
  const Agreed all(context_, Agreed::kReached);
  for (const uint32_t r : {0u, 1u}) {
    ASSERT_TRUE(all.status[r].ok()) << all.status[r].message();
    EXPECT_EQ(all.of[r].device, "dma-buf");
    EXPECT_EQ(all.of[r].why_no_device, "");
  }
  for (const auto& [second, why] :
       {std::pair{Agreed::kNotReached, "rank 1: no dma-buf"}, std::pair{Agreed::kNone, "rank 1: MOECCL_CUDA_IPC=0"}}) {
    const Agreed none(context_, second);
    for (const uint32_t r : {0u, 1u}) {
      ASSERT_TRUE(none.status[r].ok()) << none.status[r].message();
      EXPECT_EQ(none.of[r].device, "");
      EXPECT_TRUE(has(none.of[r].why_no_device, why)) << none.of[r].why_no_device;
    }
  }
}

}  // namespace
}  // namespace moeccl::tests
