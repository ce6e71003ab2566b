// SPDX-License-Identifier: Apache-2.0
#include "src/world/heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace moeccl::comm {
namespace {

// The heap as a peer sees it, through another mapping of the same segment.
class Heap : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<SymmetricHeap*> heap = SymmetricHeap::process_heap();
    ASSERT_TRUE(heap.ok()) << heap.status().message();
    heap_ = *heap;
    Result<driver::Mapping> mapping = driver::map_segment(heap_->fd(), heap_->bytes());
    ASSERT_TRUE(mapping.ok()) << mapping.status().message();
    peers_ = std::move(*mapping);
  }
  std::byte* allocate(size_t bytes) {
    Result<void*> p = heap_->allocate(bytes);
    EXPECT_TRUE(p.ok()) << p.status().message();
    return static_cast<std::byte*>(*p);
  }
  std::byte* as_peer(const std::byte* p) { return peers_.data() + (p - heap_->base()); }

  SymmetricHeap* heap_ = nullptr;
  driver::Mapping peers_;
  const size_t page_ = driver::page_bytes();
};

TEST_F(Heap, DetachedPagesKeepTheirBytesAndHearNothingOfPeers) {
  std::byte* const p = allocate(4 * page_);
  std::memset(p, 1, 4 * page_);
  std::memset(as_peer(p), 2, page_);
  EXPECT_EQ(p[0], std::byte{2});
  const uint32_t before = heap_->n_detached();
  EXPECT_FALSE(heap_->is_detached(p));
  // From the middle of the second page to the middle of the third.
  ASSERT_TRUE(heap_->detach(p + page_ + page_ / 2, page_).ok());
  EXPECT_EQ(heap_->n_detached(), before + 1);
  EXPECT_TRUE(heap_->is_detached(p)) << "the allocation is ordinary memory now, all of it";
  EXPECT_EQ(p[page_], std::byte{1});
  std::memset(as_peer(p), 3, 4 * page_);
  EXPECT_TRUE(std::all_of(p + page_, p + 3 * page_, [](std::byte b) { return b == std::byte{1}; }));
  EXPECT_EQ(p[0], std::byte{3});
  EXPECT_EQ(p[3 * page_], std::byte{3});
  EXPECT_TRUE(heap_->release(p).ok());
}

TEST_F(Heap, ARangeMayBeDetachedTwiceAndInPieces) {
  std::byte* const p = allocate(6 * page_);
  std::memset(p, 1, 6 * page_);
  ASSERT_TRUE(heap_->detach(p + page_, page_).ok());
  ASSERT_TRUE(heap_->detach(p + 3 * page_, page_).ok());
  ASSERT_TRUE(heap_->detach(p, ~size_t{0}).ok()) << "to the end of the allocation";
  std::memset(as_peer(p), 2, 6 * page_);
  EXPECT_TRUE(std::all_of(p, p + 6 * page_, [](std::byte b) { return b == std::byte{1}; }));
  EXPECT_TRUE(heap_->release(p).ok());
}

TEST_F(Heap, DetachedPagesAreNotHandedOutAgain) {
  std::byte* const p = allocate(3 * page_);
  ASSERT_TRUE(heap_->detach(p + page_, page_).ok());
  ASSERT_TRUE(heap_->release(p).ok());
  std::vector<std::byte*> given;
  for (int i = 0; i < 16; ++i) {
    given.push_back(allocate(page_));
    EXPECT_NE(given.back(), p + page_);
    EXPECT_FALSE(heap_->is_detached(given.back()));
    std::memset(given.back(), 4, page_);
  }
  EXPECT_NE(std::find(given.begin(), given.end(), p), given.end()) << "the pages around it are";
  for (std::byte* g : given) EXPECT_TRUE(heap_->release(g).ok());
  EXPECT_FALSE(heap_->release(p).ok()) << "freed twice";
}

TEST(HeapBytes, FollowTheMachineAndItsAddresses) {
  constexpr size_t kGiB = size_t{1} << 30;
  HeapSetting s{.addresses = size_t{1} << 47, .processes = 128, .memory = 256 * kGiB};
  EXPECT_EQ(heap_bytes_for(s), 256 * kGiB) << "the machine's memory";
  s.memory = 2048 * kGiB;
  EXPECT_EQ(heap_bytes_for(s), 512 * kGiB) << "all heaps have half of the addresses";
  s = {.addresses = size_t{1} << 39, .processes = 8, .memory = 64 * kGiB};  // Arm with three levels of page tables
  EXPECT_EQ(heap_bytes_for(s), 32 * kGiB);
  s.left = 16 * kGiB;
  EXPECT_EQ(heap_bytes_for(s), kGiB) << "a limit of addresses";
  s.left = 0;
  EXPECT_EQ(heap_bytes_for(s), size_t{16} << 20) << "never less than that";
}

TEST(HeapBytes, TheMachinesAddressesHoldTheStack) {
  const int here = 0;
  EXPECT_LT(reinterpret_cast<uintptr_t>(&here), driver::all_addresses());
  EXPECT_GE(driver::all_addresses(), size_t{1} << 38);
}

}  // namespace
}  // namespace moeccl::comm
