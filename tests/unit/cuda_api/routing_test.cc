// SPDX-License-Identifier: Apache-2.0
// Routings with choices in CUDA memory: every table and every error is that of the same choices in host memory.
#include <algorithm>
#include <random>
#include <set>
#include <sstream>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

template <class T>
void append(std::ostringstream& out, const char* name, const T* list, size_t n) {
  out << name;
  for (size_t i = 0; list != nullptr && i < n; ++i) out << ' ' << list[i];
  out << '\n';
}

// Returns all information about a routing except times, with the prices of its candidates.
std::string words_of(moecclRouting_t routing, int n_experts, bool expert_major) {
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  if (moecclRoutingGetInfo(routing, &info) != moecclSuccess) return moecclGetLastError(nullptr);
  std::ostringstream out;
  const auto n_local = static_cast<size_t>(info.n_local_experts);
  const size_t n_choices = expert_major      ? info.n_rows
                           : info.n_rows > 0 ? static_cast<size_t>(info.choice_offsets[info.n_rows])
                                             : 0;
  out << info.n_tokens << ' ' << info.n_rows << ' ' << info.n_unique << ' ' << info.n_dropped << ' '
      << info.logical_bytes << ' ' << info.algorithm << '\n';
  append(out, "local", info.local_experts, n_local);
  append(out, "counts", info.expert_counts, n_local);
  append(out, "offsets", info.expert_offsets, n_local + 1);
  append(out, "source", info.row_source, info.n_rows);
  append(out, "token", info.row_token, info.n_rows);
  append(out, "choices", info.choice_offsets, info.n_rows + 1);
  append(out, "experts", expert_major ? nullptr : info.choice_expert, n_choices);
  append(out, "weights", info.choice_weight, n_choices);
  append(out, "dropped", info.drop_counts, static_cast<size_t>(n_experts));
  for (int l = 0; l < info.n_levels; ++l)
    out << info.levels[l].name << ' ' << info.levels[l].rows << ' ' << info.levels[l].metadata_bytes << '\n';
  std::string page(1 << 16, '\0');
  if (moecclMoeExplain(routing, page.data(), page.size(), nullptr) != moecclSuccess) return moecclGetLastError(nullptr);
  const size_t prices = page.find("\ncandidates");
  out << page.substr(prices, page.find("\nchosen") - prices) << '\n';
  return out.str();
}

struct RoutingWorld {
  int n;
  RankMode mode;
  const char* topology;
};

RankOptions options_of(const RoutingWorld& w) {
  RankOptions options{.mode = w.mode, .deadline_ms = 120'000, .init = false};
  options.config.topology = w.topology;
  options.config.timeout_ms = capped_ms(60'000);
  options.config.init_timeout_ms = capped_ms(60'000);
  return options;
}

// One layer shape, drawn equally on all ranks.
struct Shape {
  int n_experts, top_k;
  bool expert_major, weighted, all_to_one;
  std::vector<int32_t> owner;
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;

  Shape(std::mt19937& common, int n_ranks, int i) {
    n_experts = 2 + static_cast<int>(common() % 20);
    top_k = std::min(n_experts, 1 + static_cast<int>(common() % 7));
    expert_major = i % 2 == 0;
    weighted = common() % 3 > 0;
    all_to_one = common() % 4 == 0;
    for (int e = 0; e < n_experts; ++e) owner.push_back(static_cast<int32_t>(common() % 1000) % n_ranks);
    static constexpr const char* kAlgorithms[] = {nullptr, "hier:1", "hier:2", "flat", "2dh"};
    config.hidden_bytes = 64;
    config.type = moecclFloat32;
    config.top_k = top_k;
    config.n_experts = n_experts;
    config.expert_rank = common() % 2 == 0 ? owner.data() : nullptr;
    config.max_tokens = 600;
    config.layout = expert_major ? moecclLayoutExpertMajor : moecclLayoutRows;
    config.align_rows = expert_major ? static_cast<int32_t>(common() % 5) : 0;
    config.capacity = common() % 2 == 0 ? static_cast<int32_t>(1 + common() % 60) : 0;
    config.algorithm = kAlgorithms[i % 5];
  }
};

class CudaRoutings : public ::testing::TestWithParam<RoutingWorld> {};

TEST_P(CudaRoutings, SayWhatThoseOfHostMemorySay) {
  const RoutingWorld w = GetParam();
  RankOptions options = options_of(w);
  run_ranks(
      w.n,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, w.n, device, options);
        ASSERT_NE(comm, nullptr);
        std::mt19937 common(static_cast<uint32_t>(test_seed()) + 5), random(common() + static_cast<uint32_t>(rank));
        for (int i = 0; i < 5; ++i) {
          const Shape shape(common, w.n, i);
          moecclMoe_t moe = nullptr;
          MOECCL_ASSERT_OK(moecclMoeCreate(&moe, comm, &shape.config));
          moecclRouting_t updated = nullptr;  // updated with both kinds in turn
          for (int step = 0; step < std::max(3, scaled(5)); ++step) {
            const bool none = step == 1 && (rank == 0 || shape.all_to_one);
            const size_t tokens = none ? 0 : random() % (step == 2 ? 601 : 80), n = tokens * size_t(shape.top_k);
            std::vector<int32_t> topk;
            std::vector<float> weight;
            for (size_t t = 0; t < tokens; ++t) {
              std::set<int32_t> chosen;
              for (int k = 0; k < shape.top_k; ++k) {
                int32_t e = k == 0 && shape.all_to_one ? 0 : static_cast<int32_t>(random() % 1000) % shape.n_experts;
                while (!chosen.insert(e).second) e = (e + 1) % shape.n_experts;
                topk.push_back(random() % 9 == 0 ? -1 : e);
                weight.push_back(static_cast<float>(random() % 100) / 64.0f);
              }
            }
            DeviceBuffer d_topk(device, n * 4), d_weight(device, n * 4);
            device.upload(d_topk.data(), topk.data(), n * 4);
            device.upload(d_weight.data(), weight.data(), n * 4);
            const auto* index = static_cast<const int32_t*>(d_topk.data());
            // Weights may be of either kind when indices are in CUDA memory, and ranks may differ.
            const float* weights = !shape.weighted          ? nullptr
                                   : (step + rank) % 3 == 0 ? weight.data()
                                                            : static_cast<const float*>(d_weight.data());
            moecclRouting_t host = nullptr, on_device = nullptr;
            MOECCL_ASSERT_OK(
                moecclRoutingCreate(&host, moe, topk.data(), shape.weighted ? weight.data() : nullptr, tokens));
            // One rank's choices may be in host memory while the others' are not.
            MOECCL_ASSERT_OK(
                moecclRoutingCreate(&on_device, moe, step == 3 && rank == 1 ? topk.data() : index, weights, tokens));
            const std::string want = words_of(host, shape.n_experts, shape.expert_major);
            EXPECT_EQ(words_of(on_device, shape.n_experts, shape.expert_major), want)
                << "shape " << i << ", step " << step;
            if (updated == nullptr)
              MOECCL_ASSERT_OK(moecclRoutingCreate(&updated, moe, index, weights, tokens));
            else
              MOECCL_ASSERT_OK(moecclRoutingUpdate(updated, step % 2 == 0 ? index : topk.data(), weights, tokens));
            EXPECT_EQ(words_of(updated, shape.n_experts, shape.expert_major), want) << "updated, step " << step;
            MOECCL_EXPECT_OK(moecclRoutingDestroy(host));
            MOECCL_EXPECT_OK(moecclRoutingDestroy(on_device));
          }
          MOECCL_EXPECT_OK(moecclRoutingDestroy(updated));
          MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        }
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Worlds, CudaRoutings,
                         ::testing::Values(RoutingWorld{4, RankMode::kThreads, "node:2 gpu:2"},
                                           RoutingWorld{3, RankMode::kProcesses, "node:2 gpu:1+2"},
                                           RoutingWorld{5, RankMode::kMixed, "node:2 gpu:2+3"}),
                         [](const ::testing::TestParamInfo<RoutingWorld>& info) {
                           return std::to_string(info.param.n) + mode_name(info.param.mode);
                         });

TEST(CudaRoutingErrors, AreTheHostsAndReachAllRanks) {
  const RoutingWorld w{2, RankMode::kThreads, nullptr};
  RankOptions options = options_of(w);
  run_ranks(
      w.n,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, w.n, device, options);
        ASSERT_NE(comm, nullptr);
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = 64;
        config.type = moecclFloat32;
        config.top_k = 3;
        config.n_experts = 7;
        config.max_tokens = 50;
        moecclMoe_t moe = nullptr;
        MOECCL_ASSERT_OK(moecclMoeCreate(&moe, comm, &config));
        std::vector<int32_t> topk;
        for (int t = 0; t < 50; ++t)
          for (int k = 0; k < 3; ++k) topk.push_back((t + 2 * k) % 7);
        struct Mistake {
          size_t at;
          int32_t value;
          const char* text;
        };
        for (const Mistake m : {Mistake{31 * 3 + 1, 7, "topk_index[31][1] is 7: experts are 0..6, and -1 means none"},
                                Mistake{4 * 3, -2, "topk_index[4][0] is -2"},
                                Mistake{49 * 3 + 2, 0, "topk_index[49] names expert 0 twice"}}) {
          std::vector<int32_t> wrong = topk;
          if (rank == 1) wrong[m.at] = m.value;
          DeviceBuffer buffer(device, wrong.size() * 4);
          device.upload(buffer.data(), wrong.data(), wrong.size() * 4);
          moecclRouting_t routing = nullptr;
          const moecclResult_t result =
              moecclRoutingCreate(&routing, moe, static_cast<const int32_t*>(buffer.data()), nullptr, 50);
          EXPECT_EQ(result, rank == 1 ? moecclInvalidArgument : moecclRemoteError);
          EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(rank == 1 ? m.text : "rank 1 could not update"),
                    std::string::npos)
              << moecclGetLastError(nullptr);
        }
        DeviceBuffer buffer(device, topk.size() * 4);
        device.upload(buffer.data(), topk.data(), topk.size() * 4);
        moecclRouting_t routing = nullptr;
        EXPECT_EQ(moecclRoutingCreate(&routing, moe, static_cast<const int32_t*>(buffer.data()), nullptr, 51),
                  moecclInvalidArgument);
        // The layer works after every mistake.
        MOECCL_ASSERT_OK(moecclRoutingCreate(&routing, moe, static_cast<const int32_t*>(buffer.data()), nullptr, 50));
        MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
        MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

// A rank without a context leaves the communicator without a CUDA side. The host must not read the other's memory.
TEST(CudaRoutingErrors, MemoryThatTheCommunicatorCannotReachIsRefusedOnAllRanks) {
  RankOptions options = options_of({2, RankMode::kProcesses, nullptr});
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        std::unique_ptr<CudaDevice> device;
        if (rank == 0) device = std::make_unique<CudaDevice>();
        moecclComm_t comm = nullptr;
        ASSERT_EQ(moecclCommInitRankConfig(&comm, 2, unique_id(), rank, &options.config), moecclSuccess);
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = 64;
        config.type = moecclFloat32;
        config.top_k = 2;
        config.n_experts = 4;
        config.max_tokens = 8;
        moecclMoe_t moe = nullptr;
        MOECCL_ASSERT_OK(moecclMoeCreate(&moe, comm, &config));
        const std::vector<int32_t> host = {0, 1, 2, 3, 0, 2, 1, 3};
        std::unique_ptr<DeviceBuffer> buffer;
        const int32_t* topk = host.data();
        if (rank == 0) {
          buffer = std::make_unique<DeviceBuffer>(*device, host.size() * 4);
          topk = static_cast<const int32_t*>(buffer->data());
        }
        moecclRouting_t routing = nullptr;
        EXPECT_EQ(moecclRoutingCreate(&routing, moe, topk, nullptr, 4),
                  rank == 0 ? moecclUnsupported : moecclRemoteError);
        EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(rank == 0 ? "no CUDA side: rank 1" : "rank 0"),
                  std::string::npos)
            << moecclGetLastError(nullptr);
        if (rank == 0) {
          std::vector<int64_t> counts(4);
          EXPECT_EQ(moecclExpertPopularity(topk, 8, 4, counts.data(), comm, nullptr), moecclUnsupported);
        }
        EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
        buffer.reset();
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
