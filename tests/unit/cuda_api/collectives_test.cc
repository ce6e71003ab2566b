// SPDX-License-Identifier: Apache-2.0
// Standard collectives, Send/Recv and their errors on CUDA memory. The expected bits come from the same calls on host
// memory, which the conformance tests verify. Without a GPU, the emulated driver replaces it.
#include <algorithm>
#include <random>

#include "tests/support/cuda_ranks.h"
#include "tests/support/plain_call.h"

namespace moeccl::testing {
namespace {

struct World {
  int n;
  RankMode mode;
  bool ipc;
  bool walk = true;  // threads, and processes with a device each, run on the persistent kernel
  int devices = 1;
};

std::vector<char> random_bytes(std::mt19937_64& random, size_t elements, moecclDataType_t type) {
  std::vector<char> bytes(elements * moecclTypeSize(type));
  for (size_t i = 0; i < elements; ++i) {
    if (type == moecclFloat32) {
      const float f = static_cast<float>(static_cast<int64_t>(random() % 2000) - 1000) / 7.0f;
      std::memcpy(&bytes[i * 4], &f, 4);
    } else if (type == moecclFloat64) {
      const double d = static_cast<double>(static_cast<int64_t>(random() % 2000) - 1000) / 7.0;
      std::memcpy(&bytes[i * 8], &d, 8);
    } else if (type == moecclBfloat16 || type == moecclFloat16) {
      const bool nan = random() % 16 == 0;  // with either sign
      const uint16_t h = static_cast<uint16_t>((nan ? 0x7fc0 : 0x3c00 + random() % 0x300) + (random() % 2) * 0x8000);
      std::memcpy(&bytes[i * 2], &h, 2);
    } else {
      for (size_t b = 0; b < moecclTypeSize(type); ++b)
        bytes[i * moecclTypeSize(type) + b] = static_cast<char>(random());
    }
  }
  return bytes;
}

// Sums and products of NaNs are NaNs on a GPU as on the host, but with other bits (kernels/cuda/element.cuh).
bool both_nan(const char* a, const char* b, moecclDataType_t type) {
  const bool narrow = type == moecclFloat8e4m3 || type == moecclFloat8e5m2;
  if (!narrow && type != moecclBfloat16 && type != moecclFloat16) return false;
  uint16_t x = 0, y = 0;
  std::memcpy(&x, a, moecclTypeSize(type));
  std::memcpy(&y, b, moecclTypeSize(type));
  // The largest magnitude that is a number or infinite.
  const int most = type == moecclBfloat16     ? 0x7f80
                   : type == moecclFloat16    ? 0x7c00
                   : type == moecclFloat8e4m3 ? 0x7e
                                              : 0x7c;
  const int magnitude = narrow ? 0x7f : 0x7fff;
  return (x & magnitude) > most && (y & magnitude) > most;
}

struct Call {
  int op;  // moecclOp_t
  size_t count;
  moecclDataType_t type;
  moecclRedOp_t reduce;
  int root;
};

moecclResult_t issue(const Call& c, const void* in, void* out, moecclComm_t comm, int rank, int n, moecclStream_t s) {
  switch (c.op) {
    case moecclOpAllToAllv: {
      std::vector<size_t> out_counts, in_counts, out_at, in_at;
      for (int r = 0; r < n; ++r) {
        out_counts.push_back(c.count * static_cast<size_t>((rank + r) % 3) / 2);
        in_counts.push_back(out_counts.back());
        out_at.push_back(c.count * static_cast<size_t>(r));
        in_at.push_back(out_at.back());
      }
      return moecclAllToAllv(in, out_counts.data(), out_at.data(), out, in_counts.data(), in_at.data(), c.type, comm,
                             s);
    }
    case moecclOpSendRecv: {  // a ring of messages, and one to itself
      const size_t bytes = moecclTypeSize(c.type) * c.count;
      auto* to = static_cast<char*>(out);
      EXPECT_EQ(moecclGroupStart(), moecclSuccess);
      EXPECT_EQ(moecclSend(in, c.count, c.type, (rank + 1) % n, comm, s), moecclSuccess) << moecclGetLastError(comm);
      EXPECT_EQ(moecclRecv(to, c.count, c.type, (rank + n - 1) % n, comm, s), moecclSuccess);
      EXPECT_EQ(moecclSend(in, c.count, c.type, rank, comm, s), moecclSuccess);
      EXPECT_EQ(moecclRecv(to + bytes, c.count, c.type, rank, comm, s), moecclSuccess);
      return moecclGroupEnd();
    }
    default:
      return plain_call(c, c.reduce, in, out, comm, s);
  }
}

void compare_calls(int rank, int n, moecclComm_t comm, CudaDevice& device, int cases) {
  std::mt19937_64 shared(test_seed()), own(test_seed() * 77 + static_cast<uint64_t>(rank));
  void* stream = device.make_stream();
  constexpr moecclDataType_t kTypes[] = {moecclInt8,     moecclInt32,   moecclUint64,  moecclFloat32,
                                         moecclBfloat16, moecclFloat16, moecclFloat64, moecclUint8};
  for (int i = 0; i < cases; ++i) {
    Call c{};
    c.op = static_cast<int>(shared() % (moecclOpSendRecv + 1));
    c.type = kTypes[shared() % std::size(kTypes)];
    c.count = shared() % 10 == 0 ? shared() % 60000 : shared() % 700;
    c.reduce = static_cast<moecclRedOp_t>(shared() % MOECCL_NUM_REDUCTIONS);
    c.root = static_cast<int>(shared() % static_cast<uint64_t>(n));
    const bool on_stream = shared() % 2 == 0;
    set_note("case " + std::to_string(i) + ": op " + std::to_string(c.op) + " count " + std::to_string(c.count) +
             " type " + std::to_string(c.type) + " reduce " + std::to_string(c.reduce) +
             (on_stream ? " on a stream" : ""));
    const size_t elements = c.count * static_cast<size_t>(std::max(n, 2));
    const std::vector<char> in = random_bytes(own, elements, c.type), blank(in.size(), 0x5a);
    std::vector<char> want = blank;
    ASSERT_EQ(issue(c, in.data(), want.data(), comm, rank, n, nullptr), moecclSuccess) << moecclGetLastError(comm);
    DeviceBuffer d_in(device, in.size()), d_out(device, in.size());
    void* s = on_stream ? stream : nullptr;
    d_in.put(in, s);
    d_out.put(blank, s);
    all_have_ended(comm);  // the driver may have waited for a kernel to make room, and that kernel for this rank
    ASSERT_EQ(issue(c, d_in.data(), d_out.data(), comm, rank, n, reinterpret_cast<moecclStream_t>(s)), moecclSuccess)
        << moecclGetLastError(comm);
    const std::vector<char> got = d_out.get(s);
    size_t wrong = 0;
    const bool sums = c.op == moecclOpAllReduce || c.op == moecclOpReduce || c.op == moecclOpReduceScatter;
    const size_t size = moecclTypeSize(c.type);
    for (size_t j = 0; j < want.size(); j += size)
      wrong += std::memcmp(&want[j], &got[j], size) != 0 && !(sums && both_nan(&want[j], &got[j], c.type));
    ASSERT_EQ(wrong, 0u) << "case " << i << ", op " << c.op << ", count " << c.count << ", type " << c.type
                         << ", reduce " << c.reduce << ", root " << c.root << ", stream " << on_stream;
  }
  // The stream may see the end of the last operation before the communicator does.
  moecclResult_t state = moecclInProgress;
  while (moecclCommGetAsyncError(comm, &state) == moecclSuccess && state == moecclInProgress) usleep(1000);
  EXPECT_EQ(state, moecclSuccess) << moecclGetLastError(comm);
  device.end_stream(stream);
}

class CudaCollectives : public ::testing::TestWithParam<World> {};

TEST_P(CudaCollectives, EveryCallGivesTheBitsOfHostMemory) {
  const World w = GetParam();
  RankOptions options{.mode = w.mode, .deadline_ms = 150'000, .init = false};
  options.config.deterministic = 1;
  options.config.timeout_ms = capped_ms(60'000);
  options.config.init_timeout_ms = capped_ms(60'000);
  const Setting ipc("MOECCL_CUDA_IPC", w.ipc ? "1" : "0"), persistent("MOECCL_CUDA_PERSISTENT", w.walk ? "1" : "0"),
      devices("MOECCL_TEST_CUDA_DEVICES", std::to_string(w.devices).c_str());
  run_ranks(
      w.n,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, w.n, device, options);
        ASSERT_NE(comm, nullptr);
        compare_calls(rank, w.n, comm, device, scaled(w.n > 2 ? 24 : 40));
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, CudaCollectives,
    ::testing::Values(World{1, RankMode::kThreads, true}, World{2, RankMode::kThreads, true},
                      World{4, RankMode::kThreads, true}, World{2, RankMode::kProcesses, true},
                      World{4, RankMode::kProcesses, true}, World{4, RankMode::kMixed, true},
                      World{3, RankMode::kProcesses, false}, World{2, RankMode::kThreads, false},
                      World{4, RankMode::kThreads, true, false}, World{8, RankMode::kThreads, true},
                      World{2, RankMode::kProcesses, true, true, 2}, World{4, RankMode::kMixed, true, true, 4}),
    [](const ::testing::TestParamInfo<World>& info) {
      return std::to_string(info.param.n) + mode_name(info.param.mode) +
             (info.param.ipc ? "" : "_staged_in_host_memory") + (info.param.walk ? "" : "_step_by_step") +
             (info.param.devices > 1 ? "_on_" + std::to_string(info.param.devices) + "_devices" : "");
    });

RankOptions error_options(RankMode mode) {
  RankOptions options{.mode = mode, .deadline_ms = 60'000, .init = false};
  options.config.timeout_ms = capped_ms(20'000);
  options.config.init_timeout_ms = capped_ms(60'000);
  return options;
}

TEST(CudaErrors, RanksThatDisagreeAreNamedAndTheStreamGoesOn) {
  const RankOptions options = error_options(RankMode::kThreads);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 2, device, options);
        ASSERT_NE(comm, nullptr);
        void* stream = device.make_stream();
        DeviceBuffer a(device, 4096);
        ASSERT_EQ(moecclAllReduce(a.data(), a.data(), rank == 0 ? 100 : 101, moecclFloat32, moecclSum, comm,
                                  reinterpret_cast<moecclStream_t>(stream)),
                  moecclSuccess)
            << moecclGetLastError(comm);
        device.synchronize(stream);  // does not hang: the wait on the stream ends with the failure
        moecclResult_t state = moecclSuccess;
        for (int i = 0; i < 2000 && (state == moecclSuccess || state == moecclInProgress); ++i)
          ASSERT_EQ(moecclCommGetAsyncError(comm, &state), moecclSuccess);
        EXPECT_EQ(state, moecclMismatch) << moecclGetErrorString(state);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("count"), std::string::npos) << moecclGetLastError(comm);
        (void)moecclCommDestroy(comm);
        device.end_stream(stream);
      },
      options);
}

TEST(CudaErrors, AMissingRankIsATimeoutThatNamesIt) {
  RankOptions options = error_options(RankMode::kProcesses);
  options.config.timeout_ms = 1500;
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 2, device, options);
        ASSERT_NE(comm, nullptr);
        DeviceBuffer a(device, 4096);
        if (rank == 0) {
          EXPECT_EQ(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, nullptr), moecclTimeout);
          EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 1"), std::string::npos)
              << moecclGetLastError(comm);
        } else {
          const int64_t until = now_ms() + 4000;
          while (now_ms() < until) {
          }
        }
        (void)moecclCommDestroy(comm);
      },
      options);
}

TEST(CudaErrors, MixedMemoryIsRefusedWithARemedy) {
  const RankOptions options = error_options(RankMode::kThreads);
  run_ranks(
      1,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 1, device, options);
        ASSERT_NE(comm, nullptr);
        DeviceBuffer a(device, 4096);
        float host[100] = {};
        EXPECT_EQ(moecclAllReduce(a.data(), host, 100, moecclFloat32, moecclSum, comm, nullptr), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("CUDA memory"), std::string::npos);
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
      },
      options);
}

TEST(CudaErrors, ACommunicatorMadeWithoutAContextSaysSo) {
  const RankOptions options = error_options(RankMode::kProcesses);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice* device = rank == 0 ? new CudaDevice : nullptr;
        moecclComm_t comm = nullptr;
        ASSERT_EQ(moecclCommInitRankConfig(&comm, 2, unique_id(), rank, &options.config), moecclSuccess);
        if (rank == 0) {
          DeviceBuffer a(*device, 4096);
          EXPECT_EQ(moecclAllReduce(a.data(), a.data(), 10, moecclFloat32, moecclSum, comm, nullptr),
                    moecclUnsupported);
          EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 1"), std::string::npos)
              << moecclGetLastError(comm);
        }
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
        delete device;
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
