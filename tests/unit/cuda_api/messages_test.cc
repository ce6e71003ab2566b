// SPDX-License-Identifier: Apache-2.0
// Send and Recv between ranks of a host: one launch moves the messages of a group, also in graphs.
#include <atomic>
#include <cstring>
#include <random>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

struct MessageWorld {
  int n;
  bool processes;  // each with a device of its own; otherwise threads on one device
};
void PrintTo(const MessageWorld& w, std::ostream* out) { *out << w.n << (w.processes ? " processes" : " threads"); }

// Bytes that tell where they come from.
std::vector<char> bytes_of(int from, int to, int round, size_t n) {
  std::mt19937 random(static_cast<uint32_t>(from * 1009 + to * 31 + round));
  std::vector<char> bytes(n);
  for (char& b : bytes) b = static_cast<char>(random());
  return bytes;
}

// What rank `from` sends to rank `to` in a round: nothing, some bytes, or several slots.
size_t size_of(int from, int to, int round) {
  constexpr size_t kSizes[] = {0, 1, 999, 65'536, 65'537, 700'001, 2'500'000};
  return kSizes[static_cast<size_t>(from * 5 + to * 3 + round) % std::size(kSizes)];
}

class CudaMessages : public ::testing::TestWithParam<MessageWorld> {
 protected:
  void SetUp() override {
    if (GetParam().processes && std::getenv("MOECCL_CUDA_DRIVER") == nullptr)
      GTEST_SKIP() << "processes with a device each: not on one GPU, where they take turns";
    setenv("MOECCL_TEST_CUDA_DEVICES", std::to_string(GetParam().processes ? GetParam().n : 1).c_str(), 1);
  }
  void TearDown() override { unsetenv("MOECCL_TEST_CUDA_DEVICES"); }
  RankOptions options() const {
    return device_options(GetParam().processes ? RankMode::kProcesses : RankMode::kThreads);
  }
};

// One rank's buffers for messages between all ranks.
struct Exchange {
  Exchange(int rank, int n, CudaDevice& device) : rank(rank), n(n) {
    constexpr size_t kMost = 2'500'000;
    for (int p = 0; p < n; ++p) {
      out.push_back(std::make_unique<DeviceBuffer>(device, kMost));
      in.push_back(std::make_unique<DeviceBuffer>(device, kMost));
    }
  }
  void prepare(int round) {
    for (int p = 0; p < n; ++p) {
      std::vector<char> bytes = bytes_of(rank, p, round, size_of(rank, p, sizes));
      if (!bytes.empty()) out[static_cast<size_t>(p)]->put(bytes);
    }
  }
  // All ranks' messages, also to itself.
  moecclResult_t issue(moecclComm_t comm, void* stream) const {
    moecclResult_t result = moecclGroupStart();
    for (int i = 0; i < n; ++i) {
      const int p = (rank + i) % n;
      const auto at = static_cast<size_t>(p);
      const moecclResult_t sent =
          moecclSend(out[at]->data(), size_of(rank, p, sizes), moecclUint8, p, comm, as_stream(stream));
      const moecclResult_t received =
          moecclRecv(in[at]->data(), size_of(p, rank, sizes), moecclUint8, p, comm, as_stream(stream));
      if (result == moecclSuccess) result = sent != moecclSuccess ? sent : received;
    }
    const moecclResult_t ended = moecclGroupEnd();
    return result != moecclSuccess ? result : ended;
  }
  void check(int round, void* stream) const {
    for (int p = 0; p < n; ++p) {
      std::vector<char> got = in[static_cast<size_t>(p)]->get(stream);
      const std::vector<char> want = bytes_of(p, rank, round, size_of(p, rank, sizes));
      got.resize(want.size());
      EXPECT_TRUE(got == want) << "from rank " << p << ", round " << round << ", sizes of round " << sizes;
    }
  }
  int rank, n;
  int sizes = 0;  // the round whose sizes the messages have
  std::vector<std::unique_ptr<DeviceBuffer>> in, out;
};

TEST_P(CudaMessages, OfAGroupAreOneLaunchAndNoThreadDrivesThem) {
  run_on_devices(GetParam().n, options(), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    Exchange all(rank, GetParam().n, device);
    for (int round = 0; round < 7; ++round) {
      all.sizes = round;
      all.prepare(round);
      all_have_ended(comm);
      const int before = device.emulated() ? device.launches() : 0;
      const uint64_t waits = device.emulated() ? device.own_calls("cuStreamWaitValue64_v2") : 0;
      all_have_ended(comm);
      MOECCL_ASSERT_OK(all.issue(comm, round % 3 == 2 ? nullptr : stream));
      all.check(round, stream);
      if (!device.emulated() || round % 3 == 2) continue;
      all_have_ended(comm);
      EXPECT_EQ(device.launches() - before, GetParam().processes ? 1 : GetParam().n);
      EXPECT_EQ(device.own_calls("cuStreamWaitValue64_v2"), waits) << "a stream waits for a thread";
    }
  });
}

TEST_P(CudaMessages, CanBeCapturedAndReplayedBesideCalls) {
  run_on_devices(GetParam().n, options(), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    Exchange all(rank, GetParam().n, device);
    all.sizes = 4;
    device.begin_capture(stream);
    MOECCL_ASSERT_OK(all.issue(comm, stream));
    void* const graph = device.end_capture(stream);
    ASSERT_NE(graph, nullptr);
    EXPECT_EQ(device.graph_kernels(graph), 1u);
    void* const instance = device.instantiate(graph);
    for (int round = 0; round < 6; ++round) {
      all.sizes = round % 2 == 0 ? 4 : round;
      all.prepare(round);
      all_have_ended(comm);
      if (round % 2 == 0)
        device.launch_graph(instance, stream);
      else
        MOECCL_ASSERT_OK(all.issue(comm, stream));
      all.check(round, stream);
    }
    device.end_graph(graph, instance);
  });
}
INSTANTIATE_TEST_SUITE_P(Worlds, CudaMessages,
                         ::testing::Values(MessageWorld{1, false}, MessageWorld{2, false}, MessageWorld{5, false},
                                           MessageWorld{2, true}, MessageWorld{4, true}));

// A message of one slot is sent before anyone receives it; that its rank then leaves does not matter.
TEST(CudaMessageOrder, ASmallMessageNeedsNoReceiverYet) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  run_on_devices(2, device_options(RankMode::kProcesses),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   DeviceBuffer x(device, 4000);
                   x.put(floats(1000, static_cast<float>(rank)));
                   if (rank == 0) {
                     MOECCL_ASSERT_OK(moecclSend(x.data(), 1000, moecclFloat32, 1, comm, as_stream(stream)));
                     device.synchronize(stream);
                     all_have_ended(comm);
                     return;
                   }
                   all_have_ended(comm);
                   // The launch waits for other work while the sender leaves.
                   uint64_t* const word = device.make_word();
                   if (device.emulated()) device.hold(stream, word, 1);
                   MOECCL_ASSERT_OK(moecclRecv(x.data(), 1000, moecclFloat32, 0, comm, as_stream(stream)));
                   if (device.emulated()) usleep(1'500'000);
                   std::atomic_ref(*word).store(1);
                   EXPECT_EQ(x.get(stream), floats(1000, 0));
                   device.end_word(word);
                 });
}

TEST(CudaMessageOrder, ManyMessagesOfAPairKeepTheirOrder) {
  run_on_devices(2, device_options(RankMode::kThreads),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   constexpr size_t kMessages = 300, kFloats = 10;  // more than the arguments of a launch have room for
                   DeviceBuffer in(device, kMessages * kFloats * 4), out(device, kMessages * kFloats * 4);
                   for (int round = 0; round < 3; ++round) {
                     std::vector<char> sent, want;
                     for (size_t i = 0; i < kMessages; ++i) {
                       const std::vector<char> one =
                           floats(kFloats, static_cast<float>(1000 * rank + static_cast<int>(i) + round));
                       const std::vector<char> other =
                           floats(kFloats, static_cast<float>(1000 * (1 - rank) + static_cast<int>(i) + round));
                       sent.insert(sent.end(), one.begin(), one.end());
                       want.insert(want.end(), other.begin(), other.end());
                     }
                     out.put(sent);
                     all_have_ended(comm);
                     MOECCL_ASSERT_OK(moecclGroupStart());
                     for (size_t i = 0; i < kMessages; ++i) {
                       auto* const from = static_cast<float*>(out.data()) + i * kFloats;
                       auto* const to = static_cast<float*>(in.data()) + i * kFloats;
                       MOECCL_EXPECT_OK(moecclSend(from, kFloats, moecclFloat32, 1 - rank, comm, as_stream(stream)));
                       MOECCL_EXPECT_OK(moecclRecv(to, kFloats, moecclFloat32, 1 - rank, comm, as_stream(stream)));
                     }
                     MOECCL_ASSERT_OK(moecclGroupEnd());
                     EXPECT_TRUE(in.get(stream) == want) << "round " << round;
                   }
                 });
}

TEST(CudaMessageOrder, AGroupMayHoldMessagesAndCollectivesAndSeveralStreams) {
  run_on_devices(
      3, device_options(RankMode::kThreads), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        constexpr size_t kMost = 300'000;
        DeviceBuffer in(device, kMost * 4), out(device, kMost * 4), sum(device, 4000);
        void* const other = device.make_stream();
        for (void* const second : {stream, other, static_cast<void*>(nullptr)}) {
          out.put(floats(kMost, static_cast<float>(rank)));
          sum.put(floats(1000, 1));
          all_have_ended(comm);
          MOECCL_ASSERT_OK(moecclGroupStart());
          MOECCL_EXPECT_OK(moecclSend(out.data(), kMost, moecclFloat32, (rank + 1) % 3, comm, as_stream(stream)));
          MOECCL_EXPECT_OK(moecclRecv(in.data(), kMost, moecclFloat32, (rank + 2) % 3, comm, as_stream(second)));
          MOECCL_EXPECT_OK(
              moecclAllReduce(sum.data(), sum.data(), 1000, moecclFloat32, moecclSum, comm, as_stream(second)));
          MOECCL_ASSERT_OK(moecclGroupEnd());
          EXPECT_EQ(in.get(second), floats(kMost, static_cast<float>((rank + 2) % 3)));
          EXPECT_EQ(sum.get(second), floats(1000, 3));
        }
        device.end_stream(other);
      });
}

TEST(CudaMessageErrors, SizesAndTypesThatDifferAreNamed) {
  for (const bool types : {false, true}) {
    run_on_devices(2, device_options(RankMode::kThreads, 60'000, 20'000),
                   [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                     DeviceBuffer x(device, 4000);
                     all_have_ended(comm);
                     if (rank == 0) {
                       MOECCL_ASSERT_OK(moecclSend(x.data(), 100, moecclFloat32, 1, comm, as_stream(stream)));
                       device.synchronize(stream);
                       return;
                     }
                     const size_t count = types ? 100 : 101;
                     MOECCL_ASSERT_OK(
                         moecclRecv(x.data(), count, types ? moecclInt32 : moecclFloat32, 0, comm, as_stream(stream)));
                     moecclResult_t state = moecclSuccess;
                     const std::string said = failure_of(comm, &state);
                     EXPECT_EQ(state, moecclMismatch) << said;
                     const char* const wanted = types ? "rank 0 sends float32, rank 1 expects int32"
                                                      : "rank 0 sends 400 bytes, rank 1 expects 404";
                     EXPECT_NE(said.find(wanted), std::string::npos) << said;
                   });
  }
}

// The memory of a process that has gone must not be written.
TEST(CudaMessageErrors, ARankThatHasLeftReceivesNothing) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  run_on_devices(2, device_options(RankMode::kProcesses, 60'000, 20'000),
                 [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   if (!device.emulated()) GTEST_SKIP() << "processes with a device each";
                   DeviceBuffer x(device, 4000);
                   all_have_ended(comm);
                   if (rank == 1) return;
                   usleep(500'000);
                   (void)moecclSend(x.data(), 1000, moecclFloat32, 1, comm, as_stream(stream));
                   moecclResult_t state = moecclSuccess;
                   const std::string said = failure_of(comm, &state);
                   EXPECT_EQ(state, moecclRemoteError) << said;
                   EXPECT_NE(said.find("rank 1 has destroyed its communicator"), std::string::npos) << said;
                   device.synchronize(stream);
                 });
}

TEST(CudaMessageErrors, AMissingRankIsATimeoutThatNamesIt) {
  run_on_devices(2, device_options(RankMode::kThreads, 60'000, 1'000),
                 [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   DeviceBuffer x(device, 4000);
                   all_have_ended(comm);
                   if (rank == 0) {
                     usleep(4'000'000);
                     return;
                   }
                   MOECCL_ASSERT_OK(moecclRecv(x.data(), 1000, moecclFloat32, 0, comm, as_stream(stream)));
                   moecclResult_t state = moecclSuccess;
                   const std::string said = failure_of(comm, &state);
                   EXPECT_EQ(state, moecclTimeout) << said;
                   EXPECT_NE(said.find("rank 0"), std::string::npos) << said;
                   device.synchronize(stream);  // the kernel has left
                 });
}

TEST(CudaMessageErrors, AnAbortEndsThem) {
  std::atomic<bool> ended{false};  // the ranks are threads
  run_on_devices(2, device_options(RankMode::kThreads, 60'000, 30'000),
                 [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
                   DeviceBuffer x(device, 4'000'000);
                   all_have_ended(comm);
                   // To free its memory, rank 1 would wait for rank 0's kernel.
                   while (rank == 1 && !ended) usleep(1000);
                   if (rank == 1) return;
                   MOECCL_EXPECT_OK(moecclSend(x.data(), 1'000'000, moecclFloat32, 1, comm, as_stream(stream)));
                   usleep(50'000);
                   MOECCL_EXPECT_OK(moecclCommAbort(comm));
                   comm = nullptr;
                   device.synchronize(stream);
                   ended = true;
                 });
}

}  // namespace
}  // namespace moeccl::testing
