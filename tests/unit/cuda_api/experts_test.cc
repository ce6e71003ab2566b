// SPDX-License-Identifier: Apache-2.0
// Replicated experts on CUDA memory give the bits of host memory: placements that change at every call, several
// replicas on a rank, ranks without slots, odd sizes and none. Also popularity and the shared expert.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

struct World {
  int n;
  RankMode mode;
  const char* topology;
  bool ipc = true;
};
std::ostream& operator<<(std::ostream& out, const World& w) {
  return out << w.n << mode_name(w.mode) << (w.ipc ? "" : "_staged_in_host_memory");
}

// The placement of one step. Every rank draws the same one.
struct Drawn {
  Drawn(std::mt19937_64& random, int n_ranks, int n_experts) {
    std::vector<int32_t> all;
    for (int r = 0; r < n_ranks; ++r) counts.push_back(static_cast<int32_t>(random() % 5));
    counts.back() += n_experts;  // every expert has a slot
    for (const int32_t n : counts) first.push_back(first.back() + static_cast<size_t>(n));
    for (size_t s = 0; s < first.back(); ++s) {
      const auto e = static_cast<int32_t>(random() % static_cast<uint64_t>(n_experts + 1)) - 1;
      experts.push_back(s < static_cast<size_t>(n_experts) ? static_cast<int32_t>(s) : e);
    }
    std::shuffle(experts.begin(), experts.end(), random);
    given.n_experts = n_experts;
    given.slot_counts = counts.data();
    given.slot_expert = experts.data();
  }
  size_t slots(int rank) const { return static_cast<size_t>(counts[static_cast<size_t>(rank)]); }
  int32_t expert(int rank, size_t slot) const { return experts[first[static_cast<size_t>(rank)] + slot]; }
  std::vector<int32_t> counts, experts;
  std::vector<size_t> first{0};
  moecclPlacement_t given = MOECCL_PLACEMENT_INIT;
};

class CudaExperts : public ::testing::TestWithParam<World> {
 protected:
  // Runs body(rank, comm, device, stream) on every rank.
  template <class Body>
  void run(Body&& body) const {
    const World w = GetParam();
    RankOptions options = device_options(w.mode);
    options.config.topology = w.topology;
    options.config.staging_bytes = 512 << 10;  // several chunks at the larger sizes
    const Setting ipc("MOECCL_CUDA_IPC", w.ipc ? "1" : "0");
    run_on_devices(w.n, options, body);
  }
};

std::vector<char> floats(std::mt19937_64& random, size_t n, bool integers) {
  std::vector<float> v(n);
  for (float& f : v)
    f = integers ? static_cast<float>(static_cast<int>(random() % 13) - 6)
                 : static_cast<float>(static_cast<int64_t>(random() % 2000) - 1000) / 7.0f;
  std::vector<char> bytes(n * sizeof(float));
  std::memcpy(bytes.data(), v.data(), bytes.size());
  return bytes;
}

constexpr size_t kCounts[] = {0, 1, 257, 5001, 20'003};

TEST_P(CudaExperts, ReplicasAreSummedToTheBitsOfHostMemory) {
  run([&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    std::mt19937_64 shared(test_seed()), own(test_seed() * 7 + static_cast<uint64_t>(rank));
    // By default, host and CUDA memory may run different plans. Sums are then of integers, which are exact in any
    // order.
    for (const char* name : {static_cast<const char*>(nullptr), "flat", "nodes"}) {
      const bool nodes = name != nullptr && name[0] == 'n';
      if (nodes && GetParam().topology == nullptr) continue;
      MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpExpertAllReduce, name), comm);
      for (int step = 0; step < 6; ++step) {
        const Drawn p(shared, GetParam().n, 6);
        const size_t count = kCounts[static_cast<size_t>(step) % std::size(kCounts)];
        const bool in_place = step % 3 == 0;
        const moecclRedOp_t op = step % 2 == 0 ? moecclSum : moecclAvg;
        set_note(std::string(name == nullptr ? "auto" : name) + ", step " + std::to_string(step));
        // Never empty, because the pointers of a rank without slots also tell which kind of memory the call uses.
        const std::vector<char> send = floats(own, p.slots(rank) * count + 1, name == nullptr);
        std::vector<char> want(send.size(), 0x5a);
        if (in_place) want = send;
        DeviceBuffer d_send(device, send.size()), d_recv(device, want.size());
        void* s = step % 4 == 1 ? nullptr : stream;
        d_send.put(send);
        d_recv.put(want);
        MOECCL_ASSERT_COMM_OK(moecclExpertAllReduce(in_place ? want.data() : send.data(), want.data(), count,
                                                    moecclFloat32, op, &p.given, comm, nullptr),
                              comm);
        MOECCL_ASSERT_COMM_OK(
            moecclExpertAllReduce(in_place ? d_recv.data() : d_send.data(), d_recv.data(), count, moecclFloat32, op,
                                  &p.given, comm, reinterpret_cast<moecclStream_t>(s)),
            comm);
        ASSERT_EQ(d_recv.get(s), want) << (name == nullptr ? "auto" : name) << ", step " << step;
      }
    }
  });
}

TEST_P(CudaExperts, GradientsAreCollectedAndWeightsPlaced) {
  run([&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    std::mt19937_64 shared(test_seed() * 3);
    for (int step = 0; step < 6; ++step) {
      const Drawn p(shared, GetParam().n, 5), next(shared, GetParam().n, 5);
      const size_t count = kCounts[static_cast<size_t>(step) % std::size(kCounts)], size = sizeof(uint16_t);
      const size_t shard = moecclExpertShard(count, GetParam().n), shards = 5 * shard * size + 1;
      const size_t before = p.slots(rank) * count * size + 1, after = next.slots(rank) * count * size + 1;
      set_note("step " + std::to_string(step));
      std::vector<char> slots(before), want_shards(shards, 0x11), want_slots(after, 0x22), want_sums(shards, 0x11);
      for (size_t s = 0; s < p.slots(rank); ++s)
        for (size_t i = 0; i < count; ++i) {
          const auto v = static_cast<uint16_t>(p.expert(rank, s) * 1009 + static_cast<int>(i) + step);
          std::memcpy(&slots[(s * count + i) * size], &v, size);
        }
      DeviceBuffer d_slots(device, before), d_shards(device, shards), d_placed(device, after), d_sums(device, shards);
      d_slots.put(slots);
      d_shards.put(want_shards);
      d_placed.put(want_slots);
      d_sums.put(want_sums);
      auto* s = reinterpret_cast<moecclStream_t>(stream);
      MOECCL_ASSERT_COMM_OK(
          moecclCollectGradients(slots.data(), want_shards.data(), count, moecclBfloat16, &p.given, comm, nullptr),
          comm);
      MOECCL_ASSERT_COMM_OK(
          moecclPlaceWeights(want_shards.data(), want_slots.data(), count, moecclBfloat16, &next.given, comm, nullptr),
          comm);
      // Both run the same plan, which adds in the same order.
      const char* const name = GetParam().topology != nullptr && step % 2 == 0 ? "nodes" : "direct";
      MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpReduceGradients, name), comm);
      MOECCL_ASSERT_COMM_OK(moecclReduceGradients(slots.data(), want_sums.data(), count, moecclBfloat16, moecclSum,
                                                  &p.given, comm, nullptr),
                            comm);
      MOECCL_ASSERT_COMM_OK(
          moecclReduceGradients(d_slots.data(), d_sums.data(), count, moecclBfloat16, moecclSum, &p.given, comm, s),
          comm);
      EXPECT_EQ(d_sums.get(stream), want_sums) << "step " << step;
      // The second call follows the first on the stream, and the host waits for neither.
      MOECCL_ASSERT_COMM_OK(
          moecclCollectGradients(d_slots.data(), d_shards.data(), count, moecclBfloat16, &p.given, comm, s), comm);
      MOECCL_ASSERT_COMM_OK(
          moecclPlaceWeights(d_shards.data(), d_placed.data(), count, moecclBfloat16, &next.given, comm, s), comm);
      EXPECT_EQ(d_placed.get(stream), want_slots) << "step " << step;
      EXPECT_EQ(d_shards.get(stream), want_shards) << "step " << step;
    }
  });
}

// As in the paper's optimizer: its state, and therefore the shards, are in host memory, and the slots are on the
// device.
TEST_P(CudaExperts, ShardsMayBeInPageLockedHostMemory) {
  run([&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    std::mt19937_64 shared(test_seed() * 13), own(test_seed() * 17 + static_cast<uint64_t>(rank));
    for (const size_t count : {size_t{257}, size_t{20'003}}) {
      const Drawn p(shared, GetParam().n, 5), next(shared, GetParam().n, 5);
      const size_t shards = 5 * moecclExpertShard(count, GetParam().n) * sizeof(float);
      const std::vector<char> slots = floats(own, p.slots(rank) * count + 1, true);
      std::vector<char> want(shards, 0), want_slots(next.slots(rank) * count * sizeof(float) + 1, 0x22);
      DeviceBuffer d_slots(device, slots.size()), d_placed(device, want_slots.size());
      d_slots.put(slots);
      d_placed.put(want_slots);
      void* const locked = device.lock(shards);
      std::memset(locked, 0, shards);
      auto* s = reinterpret_cast<moecclStream_t>(stream);
      MOECCL_ASSERT_COMM_OK(
          moecclReduceGradients(slots.data(), want.data(), count, moecclFloat32, moecclSum, &p.given, comm, nullptr),
          comm);
      MOECCL_ASSERT_COMM_OK(
          moecclReduceGradients(d_slots.data(), locked, count, moecclFloat32, moecclSum, &p.given, comm, s), comm);
      device.synchronize(stream);
      EXPECT_EQ(std::memcmp(locked, want.data(), shards), 0) << "count " << count;
      MOECCL_ASSERT_COMM_OK(
          moecclPlaceWeights(want.data(), want_slots.data(), count, moecclFloat32, &next.given, comm, nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclPlaceWeights(locked, d_placed.data(), count, moecclFloat32, &next.given, comm, s),
                            comm);
      EXPECT_EQ(d_placed.get(stream), want_slots) << "count " << count;
      all_have_ended(comm);
      device.end_lock(locked);
    }
  });
}

TEST_P(CudaExperts, PopularityAndTheSharedExpert) {
  run([&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    std::mt19937_64 own(test_seed() * 5 + static_cast<uint64_t>(rank));
    constexpr int kExperts = 11;
    const size_t n_choices = rank == 0 ? 0 : 37 * static_cast<size_t>(rank);
    std::vector<int32_t> topk(n_choices + 1);
    for (int32_t& e : topk) e = static_cast<int32_t>(own() % (kExperts + 1)) - 1;
    std::vector<int64_t> want(kExperts), got(kExperts);
    DeviceBuffer d_topk(device, topk.size() * 4), d_counts(device, kExperts * 8);
    device.upload(d_topk.data(), topk.data(), topk.size() * 4);
    auto* s = reinterpret_cast<moecclStream_t>(stream);
    MOECCL_ASSERT_COMM_OK(moecclExpertPopularity(topk.data(), n_choices, kExperts, want.data(), comm, nullptr), comm);
    for (moecclStream_t on : {static_cast<moecclStream_t>(nullptr), s}) {
      MOECCL_ASSERT_COMM_OK(moecclExpertPopularity(static_cast<const int32_t*>(d_topk.data()), n_choices, kExperts,
                                                   static_cast<int64_t*>(d_counts.data()), comm, on),
                            comm);
      device.download(got.data(), d_counts.data(), kExperts * 8, stream);
      EXPECT_EQ(got, want);
    }
    // Rank 0 has no expert. Values are integers, so that the order of the AllReduce's sums does not matter.
    const auto n_local = static_cast<size_t>(rank),
               n_total = static_cast<size_t>(GetParam().n * (GetParam().n - 1) / 2);
    if (n_total == 0) return;
    for (const size_t count : {size_t{1}, size_t{333}}) {
      const std::vector<char> experts = floats(own, n_local * count + 1, true);
      std::vector<char> mean(count * 4, 0x33);
      DeviceBuffer d_experts(device, experts.size()), d_mean(device, mean.size());
      d_experts.put(experts);
      d_mean.put(mean);
      MOECCL_ASSERT_COMM_OK(
          moecclSharedExpert(experts.data(), n_local, n_total, mean.data(), count, moecclFloat32, comm, nullptr), comm);
      MOECCL_ASSERT_COMM_OK(
          moecclSharedExpert(d_experts.data(), n_local, n_total, d_mean.data(), count, moecclFloat32, comm, s), comm);
      const std::vector<char> on_device = d_mean.get(stream);
      for (size_t i = 0; i < count; ++i) {
        float a, b;
        std::memcpy(&a, &mean[i * 4], 4);
        std::memcpy(&b, &on_device[i * 4], 4);
        EXPECT_NEAR(a, b, 1e-5f) << "the sum's plan is another: only its order differs";
      }
    }
  });
}

TEST_P(CudaExperts, TheTensorExchangeGivesTheSameBytesByEveryAlgorithm) {
  run([&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    moecclTensorGroups_t g{};
    g.size = sizeof(g);
    MOECCL_ASSERT_COMM_OK(moecclTensorGroups(comm, &g), comm);
    // The ranks of a group pass the same data.
    std::mt19937_64 of_group(test_seed() * 11 + static_cast<uint64_t>(g.group));
    for (const size_t count : {size_t{0}, size_t{1}, size_t{999}, size_t{70'001}}) {
      std::vector<char> in(count * static_cast<size_t>(g.n_groups) * 2 + 1), want(in.size());
      for (char& b : in) b = static_cast<char>(of_group());
      DeviceBuffer d_in(device, in.size()), d_out(device, in.size()), d_back(device, in.size());
      d_in.put(in);
      MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(in.data(), want.data(), count, moecclBfloat16, comm, nullptr), comm);
      for (const char* name : {"baseline", "o1", "o2", "o3", "lean", "auto"}) {
        set_note(std::string(name) + ", count " + std::to_string(count));
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpTensorAllToAll, name), comm);
        d_out.put(std::vector<char>(in.size(), 0x5a));
        d_back.put(in);
        auto* s = reinterpret_cast<moecclStream_t>(stream);
        MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(d_in.data(), d_out.data(), count, moecclBfloat16, comm, s), comm);
        MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(d_out.data(), d_back.data(), count, moecclBfloat16, comm, s), comm);
        want.back() = 0x5a;
        EXPECT_EQ(d_out.get(stream), want) << name << ", rank " << rank << ", count " << count;
        EXPECT_EQ(d_back.get(stream), in) << name << ", rank " << rank << ", count " << count;
      }
      MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpTensorAllToAll, nullptr), comm);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CudaExperts,
                         ::testing::Values(World{1, RankMode::kThreads, nullptr},
                                           World{4, RankMode::kThreads, "node:2 gpu:2"},
                                           World{3, RankMode::kProcesses, nullptr},
                                           World{5, RankMode::kMixed, "node:2 gpu:2+3"},
                                           World{4, RankMode::kProcesses, "node:2 gpu:2", false}));

// A rank's choices of one expert in CUDA memory.
struct Choices {
  static constexpr size_t kChoices = 20'000;
  static constexpr int kExperts = 3;
  Choices(CudaDevice& its_device, int32_t expert)
      : device(its_device), topk(its_device, kChoices * 4), counts(its_device, kExperts * 8) {
    const std::vector<int32_t> all(kChoices, expert);
    device.upload(topk.data(), all.data(), kChoices * 4);
  }
  moecclResult_t count(moecclComm_t comm, void* stream) {
    return moecclExpertPopularity(static_cast<const int32_t*>(topk.data()), kChoices, kExperts,
                                  static_cast<int64_t*>(counts.data()), comm, as_stream(stream));
  }
  std::vector<int64_t> counted(void* stream) {
    std::vector<int64_t> all(kExperts);
    device.download(all.data(), counts.data(), kExperts * 8, stream);
    return all;
  }
  CudaDevice& device;
  DeviceBuffer topk, counts;
};

TEST(CudaPopularity, ReadsTheChoicesInTheStreamsOrder) {
  run_on_devices(2, device_options(RankMode::kThreads, 60'000, 20'000),
                 [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
                   Choices old(device, 0), chosen(device, 2);
                   uint64_t* const word = device.make_word();
                   all_have_ended(comm);
                   device.hold(stream, word, 1);
                   device.copy(old.topk.data(), chosen.topk.data(), Choices::kChoices * 4, stream);
                   std::thread later([&] {
                     usleep(200'000);
                     std::atomic_ref(*word).store(1);
                   });
                   MOECCL_EXPECT_COMM_OK(old.count(comm, stream), comm);
                   later.join();
                   EXPECT_EQ(old.counted(stream), (std::vector<int64_t>{0, 0, 2 * Choices::kChoices}));
                   all_have_ended(comm);
                   device.end_word(word);
                 });
}

// The legacy default stream waits for all blocking streams of the device, also for another rank's, and a copy of memory
// that is not page-locked holds up other threads' copies.
TEST(CudaPopularity, WaitsForNoOtherRanksStream) {
  run_on_devices(2, device_options(RankMode::kThreads, 60'000, 10'000),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void*) {
                   Choices own(device, rank);
                   void* const blocking = device.make_stream(0);
                   all_have_ended(comm);
                   if (rank == 0) usleep(300'000);
                   for (int i = 0; i < 2; ++i) MOECCL_EXPECT_COMM_OK(own.count(comm, blocking), comm);
                   const int64_t n = Choices::kChoices;
                   EXPECT_EQ(own.counted(blocking), (std::vector<int64_t>{n, n, 0}));
                   all_have_ended(comm);
                   device.end_stream(blocking);
                 });
}

// A kernel adds up 64 tensors, and more need several launches. In place, the rank's own buffer is among the last of
// them.
TEST(CudaExpertsLimits, AnyNumberOfReplicasIsAddedUp) {
  RankOptions options{.mode = RankMode::kThreads, .deadline_ms = 60'000, .init = false};
  run_ranks(
      1,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 1, device, options);
        ASSERT_NE(comm, nullptr);
        for (const size_t slots : {size_t{64}, size_t{65}, size_t{128}, size_t{200}}) {
          const std::vector<int32_t> expert(slots, 0);
          moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
          p.n_experts = 1;
          p.slots_per_rank = static_cast<int32_t>(slots);
          p.slot_expert = expert.data();
          constexpr size_t kCount = 37;
          std::vector<float> values(slots * kCount), sum(kCount), got(slots * kCount);
          for (size_t i = 0; i < values.size(); ++i) {
            values[i] = static_cast<float>(static_cast<int>(i * 7 % 13) - 6);
            sum[i % kCount] += values[i];
          }
          DeviceBuffer buffer(device, values.size() * sizeof(float)), shard(device, kCount * sizeof(float));
          device.upload(buffer.data(), values.data(), values.size() * sizeof(float));
          MOECCL_ASSERT_COMM_OK(
              moecclReduceGradients(buffer.data(), shard.data(), kCount, moecclFloat32, moecclSum, &p, comm, nullptr),
              comm);
          device.download(got.data(), shard.data(), kCount * sizeof(float), nullptr);
          EXPECT_TRUE(std::equal(sum.begin(), sum.end(), got.begin())) << slots << " slots, reduced";
          MOECCL_ASSERT_COMM_OK(
              moecclExpertAllReduce(buffer.data(), buffer.data(), kCount, moecclFloat32, moecclSum, &p, comm, nullptr),
              comm);
          device.download(got.data(), buffer.data(), got.size() * sizeof(float), nullptr);
          for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], sum[i % kCount]) << slots << " slots, " << i;
          std::vector<float> host(values.size());
          EXPECT_EQ(
              moecclExpertAllReduce(buffer.data(), host.data(), kCount, moecclFloat32, moecclSum, &p, comm, nullptr),
              moecclInvalidArgument);
        }
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
