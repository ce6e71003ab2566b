// SPDX-License-Identifier: Apache-2.0
// The kernel of messages: ranks' kernels run concurrently, with one thread per rank and per block. cuda_api runs it
// through the library.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "kernels/cuda/messages_args.h"
#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {
namespace {

constexpr uint64_t kSlotBytes = 256;

struct MessageRank {
  std::vector<uint64_t> area, header;
  std::vector<MessagePair> pairs;
  WalkReport report{};
  uint64_t begun = 0, ended = 0;
  std::vector<uint64_t> channel_ended;
  std::vector<uint32_t> counts;
  std::vector<std::vector<uint8_t>> sent, received;  // of a round, in the order of the arguments
};

class World {
 public:
  explicit World(uint32_t n) : n_(n), ranks_(n) {
    for (MessageRank& r : ranks_) {
      r.area.assign(message_area_bytes(n, kSlotBytes) / 8 + 1, 0);
      r.header.assign(sizeof(WalkHeader) / 8 + 1, 0);
      r.channel_ended.assign(2 * size_t{n}, 0);
      r.counts.assign(1 + kMessageChannels, 0);
    }
    const size_t slots = kMessageWays * kMessageBuffers * kSlotBytes;
    const auto box = [&](uint32_t r, uint32_t of) { return reinterpret_cast<MessageBox*>(ranks_[r].area.data()) + of; };
    const auto slots_of = [&](uint32_t r, uint32_t of) {
      return reinterpret_cast<uint8_t*>(ranks_[r].area.data()) + message_boxes_bytes(n_) + of * slots;
    };
    for (uint32_t r = 0; r < n; ++r)
      for (uint32_t p = 0; p < n; ++p)
        ranks_[r].pairs.push_back({box(r, p), slots_of(r, p), box(p, r), slots_of(p, r)});
  }

  // Runs a round of random messages between all ranks and checks what has arrived.
  void round(std::mt19937& random, bool direct) {
    // sizes[from][to]: the messages of a pair.
    std::vector<std::vector<std::vector<size_t>>> sizes(n_, std::vector<std::vector<size_t>>(n_));
    for (auto& row : sizes)
      for (auto& pair : row)
        for (uint32_t i = random() % 4; i > 0; --i)
          pair.push_back(random() % 3 == 0 ? random() % 9000 : random() % 300);
    std::vector<MessagesArgs> args;
    for (uint32_t r = 0; r < n_; ++r) args.push_back(args_of(r, sizes, direct, random));
    const emulation::Kernel* const kernel = emulation::find_kernel("moeccl_messages");
    ASSERT_NE(kernel, nullptr);
    std::vector<std::thread> threads;
    const auto blocks = static_cast<uint32_t>(1 + random() % 5);
    const uint64_t seed = random();
    for (uint32_t r = 0; r < n_; ++r) {
      threads.emplace_back([&, r] {
        emulation::launch(*kernel, &args[r],
                          {.blocks = blocks + r % 2, .threads = 64, .concurrent = true, .seed = seed + r});
      });
    }
    for (std::thread& t : threads) t.join();
    ++shapes_run();
    for (uint32_t r = 0; r < n_; ++r) {
      EXPECT_EQ(ranks_[r].report.kind, 0u);
      EXPECT_EQ(ranks_[r].ended, args[r].number);
      size_t at = 0;
      for (uint32_t p = 0; p < n_; ++p) {
        for (size_t i = 0; i < sizes[p][r].size(); ++i, ++at) {
          size_t theirs = i;
          for (uint32_t q = 0; q < r; ++q) theirs += sizes[p][q].size();
          ASSERT_TRUE(ranks_[r].received[at] == ranks_[p].sent[theirs])
              << "message " << i << " of rank " << p << " to rank " << r;
        }
        if (p != r && !sizes[p][r].empty()) {
          EXPECT_EQ(ranks_[r].channel_ended[2 * p], args[r].number);
        }
      }
    }
  }

 private:
  MessagesArgs args_of(uint32_t me, const std::vector<std::vector<std::vector<size_t>>>& sizes, bool direct,
                       std::mt19937& random) {
    MessageRank& r = ranks_[me];
    r.sent.clear(), r.received.clear();
    for (uint32_t p = 0; p < n_; ++p) {
      for (const size_t bytes : sizes[me][p]) {
        r.sent.emplace_back(bytes);
        for (uint8_t& b : r.sent.back()) b = static_cast<uint8_t>(random());
      }
      for (const size_t bytes : sizes[p][me]) r.received.emplace_back(bytes, uint8_t{0x5a});
    }
    MessagesArgs a{};
    a.header = reinterpret_cast<WalkHeader*>(r.header.data());
    a.report = &r.report;
    a.pairs = r.pairs.data();
    a.begun = &r.begun, a.ended = &r.ended, a.channel_ended = r.channel_ended.data();
    a.number = r.ended + 1;
    a.left = r.counts.data();
    a.slot_bytes = kSlotBytes;
    a.timeout_ns = 60'000'000'000ull;
    uint16_t n_messages = 0;
    const auto buffer = [](std::vector<uint8_t>& v) {
      return MessageBuffer{v.data(), v.size() | uint64_t{3} << kMessageTypeShift};
    };
    const auto add = [&](uint32_t peer, uint8_t flags, std::vector<MessageBuffer> buffers) {
      if (buffers.empty()) return;
      uint32_t ways = 1;
      for (const MessageBuffer& b : buffers) ways = std::max(ways, message_ways(message_bytes(b), kSlotBytes));
      a.channels[a.n_channels++] = {static_cast<uint16_t>(peer), n_messages, static_cast<uint16_t>(buffers.size()),
                                    flags, static_cast<uint8_t>(ways)};
      for (const MessageBuffer& b : buffers) a.messages[n_messages++] = b;
    };
    size_t sent = 0, received = 0;
    const uint8_t how = direct ? kMessageDirect : 0;
    for (uint32_t p = 0; p < n_; ++p) {
      std::vector<MessageBuffer> out, in, own;
      for (size_t i = 0; i < sizes[me][p].size(); ++i) out.push_back(buffer(r.sent[sent++]));
      for (size_t i = 0; i < sizes[p][me].size(); ++i) in.push_back(buffer(r.received[received++]));
      if (p == me) {
        for (size_t i = 0; i < in.size(); ++i) own.push_back(in[i]), own.push_back(out[i]);
        add(p, kMessageSelf, own);
        continue;
      }
      add(p, how, in);
      add(p, kMessageSends | how, out);
    }
    return a;
  }

  uint32_t n_;
  std::vector<MessageRank> ranks_;
};

TEST(WalkMessages, ArriveInOrderWhateverTheirSizesAndTheBlocks) {
  std::mt19937 random(7);
  for (const bool direct : {false, true}) {
    for (const uint32_t n : {1u, 2u, 4u}) {
      World world(n);
      for (int i = 0; i < 12; ++i) {
        world.round(random, direct);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace moeccl::cuda
