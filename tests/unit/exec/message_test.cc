// SPDX-License-Identifier: Apache-2.0
#include "src/exec/message.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/fabrics.h"

namespace moeccl::exec {
namespace {

using tests::Fabrics;

Status run_all(std::vector<std::unique_ptr<Task>>& tasks) {
  std::vector<Task*> pointers;
  for (auto& t : tasks) pointers.push_back(t.get());
  return drive(pointers);
}

TEST(Message, SizesFromZeroToManySlotsArrive) {
  Fabrics fabrics(2);
  for (const uint64_t bytes : {0ull, 1ull, 63ull, 4032ull, 4033ull, 100'000ull}) {
    fabrics.run([&](uint32_t rank, Fabric& f) {
      std::vector<uint8_t> out(bytes), in(bytes);
      std::iota(out.begin(), out.end(), static_cast<uint8_t>(rank));
      std::vector<std::unique_ptr<Task>> tasks;
      tasks.push_back(std::make_unique<MessageTask>(
          f, Message{1 - rank, reinterpret_cast<std::byte*>(out.data()), bytes, true}, nullptr));
      tasks.push_back(std::make_unique<MessageTask>(
          f, Message{1 - rank, reinterpret_cast<std::byte*>(in.data()), bytes, false}, nullptr));
      const Status s = run_all(tasks);
      ASSERT_TRUE(s.ok()) << s.message();
      for (uint64_t i = 0; i < bytes; ++i) ASSERT_EQ(in[i], static_cast<uint8_t>(1 - rank + i)) << bytes;
    });
  }
}

TEST(Message, OrderOfAPairIsKept) {
  Fabrics fabrics(2);
  fabrics.run([&](uint32_t rank, Fabric& f) {
    constexpr int kMessages = 50;
    std::vector<std::vector<uint32_t>> data(kMessages);
    std::vector<std::unique_ptr<Task>> tasks;
    const MessageTask* before = nullptr;
    for (int i = 0; i < kMessages; ++i) {
      data[i].assign(static_cast<size_t>(1 + i * 40), rank == 0 ? static_cast<uint32_t>(i) : ~0u);
      auto t = std::make_unique<MessageTask>(
          f, Message{1 - rank, reinterpret_cast<std::byte*>(data[i].data()), data[i].size() * 4, rank == 0}, before);
      before = t.get();
      tasks.push_back(std::move(t));
    }
    ASSERT_TRUE(run_all(tasks).ok());
    for (int i = 0; i < kMessages; ++i) {
      for (const uint32_t v : data[i]) ASSERT_EQ(v, static_cast<uint32_t>(i));
    }
  });
}

TEST(Message, AnotherSizeIsAMismatchAtTheReceiver) {
  Fabrics fabrics(2);
  fabrics.run([&](uint32_t rank, Fabric& f) {
    std::vector<std::byte> data(100);
    std::vector<std::unique_ptr<Task>> tasks;
    tasks.push_back(
        std::make_unique<MessageTask>(f, Message{1 - rank, data.data(), rank == 0 ? 96u : 100u, rank == 0}, nullptr));
    const Status s = run_all(tasks);
    if (rank == 0) return;
    EXPECT_EQ(s.code(), moecclMismatch);
    EXPECT_NE(s.message().find("rank 0 sends 96"), std::string::npos) << s.message();
  });
}

// Signals are numbered mod 2^32, so a message may have number 0.
TEST(Message, ASendIsAwaitedWhereItsNumberWrapsAround) {
  using transport::kSigsPerPeer;
  Fabrics fabrics(2);
  constexpr uint32_t kLast = ~uint32_t{0};
  fabrics[0].sent[1 * kSigsPerPeer + kMessageData] = kLast;
  fabrics[0].own->signal(1, kMessageCredit).word.store(kLast);
  fabrics[1].awaited[0 * kSigsPerPeer + kMessageData] = kLast;
  fabrics[1].own->signal(0, kMessageData).word.store(kLast);
  std::vector<std::byte> out(100'000, std::byte{7}), in(out.size());
  MessageTask send(fabrics[0], Message{1, out.data(), out.size(), true}, nullptr);
  MessageTask receive(fabrics[1], Message{0, in.data(), in.size(), false}, nullptr);
  EXPECT_EQ(send.poll(), Progress::kMoved);
  EXPECT_EQ(send.poll(), Progress::kBlocked) << "the receiver has yet to copy from the sender's memory";
  EXPECT_EQ(receive.poll(), Progress::kDone);
  EXPECT_EQ(send.poll(), Progress::kDone);
  EXPECT_EQ(in, out);
}

// A link without views whose first puts find it full, as a network's is while a large put of another operation is open.
class FullAtFirst final : public transport::Link {
 public:
  FullAtFirst(std::unique_ptr<transport::Link> inner, int n_full) : inner_(std::move(inner)), n_full_(n_full) {
    peer_words_ = {&inner_->board(), {&inner_->block(0), &inner_->block(1)}};
  }
  const char* name() const override { return "full at first"; }
  Result<transport::PutState> put(uint64_t offset, const void* src, size_t bytes) override {
    if (n_full_ > 0) return --n_full_, transport::PutState::kFull;
    return inner_->put(offset, src, bytes);
  }
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override { return inner_->signal(sig, number, tag); }
  Status check_peer() override { return {}; }

 private:
  std::unique_ptr<transport::Link> inner_;
  int n_full_;
};

TEST(Message, ThatFindsItsLinkFullIsSentLaterEvenWithoutBytes) {
  for (const uint64_t bytes : {0ull, 16ull}) {
    Fabrics fabrics(2);
    fabrics[0].links[1] = std::make_unique<FullAtFirst>(std::move(fabrics[0].links[1]), 3);
    std::vector<std::byte> out(bytes, std::byte{7}), in(bytes);
    MessageTask send(fabrics[0], Message{1, out.data(), bytes, true}, nullptr);
    MessageTask receive(fabrics[1], Message{0, in.data(), bytes, false}, nullptr);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(send.poll(), Progress::kBlocked) << bytes;
    EXPECT_EQ(receive.poll(), Progress::kBlocked) << bytes;
    EXPECT_EQ(send.poll(), Progress::kDone) << bytes;
    EXPECT_EQ(receive.poll(), Progress::kDone) << bytes;
    EXPECT_EQ(in, out);
  }
}

}  // namespace
}  // namespace moeccl::exec
