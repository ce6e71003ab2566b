// SPDX-License-Identifier: Apache-2.0
// A peer lies in the data that ranks exchange about a routing and about a re-placing step. Whatever the peer sends, an
// honest rank ends with an error or with lists that stay inside its buffers and slots. The words of a real step are
// recorded on one rank and replayed to it with changes.
#include <gtest/gtest.h>

#include <random>

#include "src/moe/moe_layer.h"
#include "src/moe/moe_replace.h"
#include "tests/support/moe_cluster.h"
#include "tests/support/moe_threads.h"
#include "tests/support/ranks.h"

namespace moeccl {
namespace {

using comm::MoeHost;
using comm::MoeLayer;
using comm::MoeReplacement;
using comm::MoeRouting;
using test::HostTraits;

constexpr uint32_t kHonest = 1;

// The number of rows in the buffers of the current call.
thread_local uint64_t in_rows = 0, out_rows = 0;
void call_has(uint64_t in, uint64_t out) { in_rows = in, out_rows = out; }

// The result of one exchange: a part from each rank.
using Exchange = std::vector<std::vector<std::byte>>;

class RecordingHost final : public test::PlainHost {
 public:
  RecordingHost(MoeHost& host, std::vector<Exchange>& log) : host_(host), log_(log) {}
  uint32_t rank() const override { return host_.rank(); }
  uint32_t n_ranks() const override { return host_.n_ranks(); }
  const plan::LevelTree& tree() const override { return host_.tree(); }
  bool deterministic() const override { return host_.deterministic(); }
  uint64_t staging_bytes() const override { return host_.staging_bytes(); }
  Status all_gather(const void* mine, size_t bytes, void* all) override {
    MOECCL_TRY(host_.all_gather(mine, bytes, all));
    const std::vector<size_t> sizes(n_ranks(), bytes);
    note(all, sizes.data());
    return {};
  }
  Status all_to_all_v(const void* send, const size_t* send_bytes, void* recv, const size_t* recv_bytes) override {
    MOECCL_TRY(host_.all_to_all_v(send, send_bytes, recv, recv_bytes));
    note(recv, recv_bytes);
    return {};
  }
  Status run(std::unique_ptr<exec::Operation> op, const Place& place, bool* captured) override {
    return host_.run(std::move(op), place, captured);
  }

 private:
  void note(const void* data, const size_t* sizes) {
    const auto* at = static_cast<const std::byte*>(data);
    Exchange& e = log_.emplace_back();
    for (uint32_t r = 0; r < n_ranks(); ++r) {
      e.emplace_back(at, at + sizes[r]);
      at += sizes[r];
    }
  }
  MoeHost& host_;
  std::vector<Exchange>& log_;
};

// The honest rank alone. Its peers send the recorded words, except for some changed ones.
class LyingHost final : public test::PlainHost {
 public:
  LyingHost(const HostTraits& traits, const std::vector<Exchange>& log, uint32_t seed)
      : traits_(traits), log_(log), random_(seed) {
    lies_at_ = random_() % (log.size() + 1);
  }
  uint32_t rank() const override { return kHonest; }
  uint32_t n_ranks() const override { return traits_.tree.n_ranks; }
  const plan::LevelTree& tree() const override { return traits_.tree; }
  bool deterministic() const override { return traits_.deterministic; }
  uint64_t staging_bytes() const override { return traits_.staging; }

  Status all_gather(const void* mine, size_t bytes, void* all) override {
    const std::vector<size_t> sizes(n_ranks(), bytes);
    give(mine, all, sizes.data());
    return {};
  }
  Status all_to_all_v(const void* send, const size_t* send_bytes, void* recv, const size_t* recv_bytes) override {
    const auto* own = static_cast<const std::byte*>(send);
    for (uint32_t r = 0; r < kHonest; ++r) own += send_bytes[r];
    give(own, recv, recv_bytes);
    return {};
  }
  // Checks every address that the lists name.
  Status run(std::unique_ptr<exec::Operation> op, const Place&, bool*) override {
    ++n_runs;
    const plan::Program& program = *op->choice.program;
    const uint64_t slot = op->binding.slot_elements;
    const auto limit = [&](const plan::Ref& ref) {
      return ref.buffer == plan::Buffer::kStaging ? slot : ref.buffer == plan::Buffer::kInput ? in_rows : out_rows;
    };
    for (const plan::Lane& lane : program.lanes) {
      for (const plan::Step& s : lane.steps) {
        for (uint32_t c = 0; c < op->binding.chunking.n_chunks; ++c) {
          const size_t at = size_t{s.rows} * op->binding.chunking.n_chunks + c;
          const uint64_t into = limit(s.dst);
          if (s.kind == plan::StepKind::kGatherRows || s.kind == plan::StepKind::kScatterRows) {
            const plan::RowBlock& b = op->binding.rows[at];
            const uint64_t from = limit(program.srcs[s.first_src]);
            for (uint64_t i = 0; i < b.count; ++i) {
              EXPECT_LT(b.src_index != nullptr ? b.src_index[i] : b.src_first + i, from);
              EXPECT_LT(b.dst_index != nullptr ? b.dst_index[i] : b.dst_first + i, into);
            }
          } else if (s.kind == plan::StepKind::kReduceRows) {
            const plan::SumBlock& b = op->binding.sums[at];
            for (uint64_t i = 0; i < b.count; ++i) {
              EXPECT_LT(b.dst_index != nullptr ? b.dst_index[i] : b.dst_first + i, into);
              for (uint64_t t = b.offsets[i]; t < b.offsets[i + 1]; ++t) {
                if (b.terms[t].segment >= s.n_srcs) {
                  ADD_FAILURE() << "a term of source " << b.terms[t].segment;
                  continue;
                }
                EXPECT_LT(b.terms[t].row, limit(program.srcs[s.first_src + b.terms[t].segment]));
              }
            }
          }
        }
      }
    }
    return {};
  }
  int n_runs = 0;

 private:
  void give(const void* own, void* all, const size_t* sizes) {
    auto* to = static_cast<std::byte*>(all);
    const Exchange* known = next_ < log_.size() ? &log_[next_] : nullptr;
    for (uint32_t r = 0; r < n_ranks(); to += sizes[r++]) {
      if (r == kHonest) {
        if (sizes[r] > 0) std::memcpy(to, own, sizes[r]);
        continue;
      }
      const size_t n = known != nullptr ? std::min(sizes[r], (*known)[r].size()) : 0;
      if (n > 0) std::memcpy(to, (*known)[r].data(), n);
      for (size_t i = n; i < sizes[r]; ++i) to[i] = static_cast<std::byte>(random_() % 4);
      if (next_ == lies_at_ || random_() % 16 == 0) lie(to, sizes[r]);
    }
    ++next_;
  }
  void lie(std::byte* at, size_t bytes) {
    static constexpr uint64_t kWords[] = {0,
                                          1,
                                          2,
                                          63,
                                          0x7fffffff,
                                          0x80000000,
                                          0xffffffff,
                                          0x100000000,
                                          ~uint64_t{0},
                                          uint64_t{1} << 63,
                                          0xfffffffffffffffe};
    static constexpr size_t kWidths[] = {1, 2, 4, 8};
    for (size_t i = 0, n = 1 + random_() % 3; i < n && bytes > 0; ++i) {
      const size_t width = std::min(bytes, kWidths[random_() % 4]);
      const size_t place = random_() % (bytes / width) * width;
      uint64_t word = random_() % 3 != 0 ? kWords[random_() % std::size(kWords)] : random_() % 1000;
      if (random_() % 3 == 0) {
        uint64_t was = 0;
        std::memcpy(&was, at + place, width);
        word = was + (random_() % 2 == 0 ? 1 : uint64_t(-1));
      }
      std::memcpy(at + place, &word, width);
    }
  }

  const HostTraits& traits_;
  const std::vector<Exchange>& log_;
  std::mt19937 random_;
  size_t next_ = 0, lies_at_ = 0;
};

struct Case {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  bool weighted = false;
  bool replaces = false;
};

// Runs a whole step of one rank, as far as it gets.
Status step(MoeHost& host, const Case& c, const std::vector<int32_t>& index, const std::vector<float>& weight,
            uint64_t n_tokens) {
  MOECCL_ASSIGN_OR_RETURN(const auto layer, MoeLayer::create(host, &c.config));
  MoeRouting routing(*layer);
  MOECCL_TRY(routing.update(index.data(), c.weighted ? weight.data() : nullptr, n_tokens));
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  MOECCL_TRY(routing.info(&info));
  std::vector<std::byte> tokens(n_tokens * c.config.hidden_bytes + 1), rows(info.n_rows * c.config.hidden_bytes + 1);
  call_has(n_tokens, info.n_rows);
  MOECCL_TRY(routing.dispatch(tokens.data(), rows.data(), nullptr));
  call_has(info.n_rows, n_tokens);
  MOECCL_TRY(routing.combine(rows.data(), tokens.data(), nullptr));
  if (!c.replaces) return {};
  moecclReplaceConfig_t config = MOECCL_REPLACE_CONFIG_INIT;
  config.sample_tokens = 2;
  config.residual = 1;
  config.use_next = 1;
  MOECCL_ASSIGN_OR_RETURN(const auto replacement, MoeReplacement::create(*layer, &config));
  const std::vector<int32_t> next(n_tokens / 2 * static_cast<size_t>(c.config.n_experts) + 1, 1);
  MOECCL_TRY(replacement->begin(routing, next.data(), nullptr));
  size_t n_rows = 0;
  MOECCL_TRY(replacement->rows(&n_rows));
  std::vector<std::byte> in(n_rows * c.config.hidden_bytes + 1);
  MOECCL_TRY(replacement->residual(tokens.data(), rows.data(), in.data()));
  call_has(n_rows, n_tokens);
  const Status combined = replacement->combine(in.data(), tokens.data(), nullptr);
  if (!combined.ok()) {
    EXPECT_EQ(replacement->combine(in.data(), tokens.data(), nullptr).message(), combined.message()) << "asked again";
  }
  return combined;
}

class LyingPeer : public ::testing::TestWithParam<int> {};

TEST_P(LyingPeer, LeavesHonestRanksInsideTheirMemory) {
  const uint32_t number = static_cast<uint32_t>(GetParam());
  std::mt19937 random(number + 1000 * static_cast<uint32_t>(testing::test_seed()));
  const HostTraits traits{number % 2 == 0 ? plan::LevelTree::flat(3) : test::tree_of({{"node", {}, {2, 1}}}), false,
                          number % 3 == 0 ? 1u << 12 : 1u << 18};
  Case c;
  c.config.hidden_bytes = 16;
  c.config.type = moecclFloat32;
  c.config.top_k = 3;
  c.config.n_experts = 7;
  // Records of many tokens are exchanged after their sizes, those of few with them.
  const uint64_t most = number % 5 == 0 ? 600 : 24;
  c.config.max_tokens = most;
  c.config.layout = number % 4 < 2 ? moecclLayoutRows : moecclLayoutExpertMajor;
  c.config.algorithm = number % 2 == 0 ? (number % 8 < 4 ? "flat" : nullptr) : (number % 8 < 4 ? "hier:2" : "2dh");
  c.weighted = number % 3 != 1;
  c.replaces = number >= 4;
  std::vector<std::vector<int32_t>> index(3);
  std::vector<float> weight;
  std::vector<uint64_t> n_tokens;
  for (auto& of_rank : index) {
    n_tokens.push_back(2 * (1 + random() % (most / 2)));
    for (uint64_t t = 0; t < n_tokens.back(); ++t) {
      const auto first = static_cast<int32_t>(random() % 7);
      for (int32_t k = 0; k < 3; ++k) of_rank.push_back(random() % 9 == 0 ? -1 : (first + 2 * k) % 7);
    }
  }
  weight.assign(most * 3, 0.5f);
  std::vector<Exchange> log;
  test::on_all_ranks(traits, [&](MoeHost& host) {
    std::vector<Exchange> ignored;
    RecordingHost recording(host, host.rank() == kHonest ? log : ignored);
    const Status s = step(recording, c, index[host.rank()], weight, n_tokens[host.rank()]);
    EXPECT_TRUE(s.ok()) << s.message();
  });
  ASSERT_GE(log.size(), 3u);
  int refused = 0, ran = 0;
  const int n_lies = testing::scaled(1500);
  for (uint32_t i = 0; i < static_cast<uint32_t>(n_lies); ++i) {
    SCOPED_TRACE(format("lie {}", i));
    LyingHost host(traits, log, i + 100'000 * number);
    const Status s = step(host, c, index[kHonest], weight, n_tokens[kHonest]);
    refused += !s.ok();
    ran += host.n_runs > 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(refused, n_lies / 5) << "lies are found";
  EXPECT_GT(ran, n_lies / 15) << "and some steps come as far as their lists";
}

INSTANTIATE_TEST_SUITE_P(Cases, LyingPeer, ::testing::Range(0, 12));

}  // namespace
}  // namespace moeccl
