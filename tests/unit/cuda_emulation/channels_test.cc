// SPDX-License-Identifier: Apache-2.0
// Hardware channels: which work holds up which other work.
#include "tests/unit/cuda_emulation/driver.h"

namespace moeccl::emulation {
namespace {

Settings channels(const char* n) { return {{"MOECCL_TEST_CUDA_CHANNELS", "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS", n}}; }

int wait_value(void* stream, uint64_t* word, uint64_t value) {
  return call("cuStreamWaitValue64_v2", stream, address(word), value, 0u);
}
int write_value(void* stream, uint64_t* word, uint64_t value) {
  return call("cuStreamWriteValue64_v2", stream, address(word), value, 0u);
}
// Returns whether a stream that waits for a word that the other one stores finishes without help.
bool comes_through(void* waiting, void* storing, uint64_t* word, bool expected) {
  EXPECT_EQ(wait_value(waiting, word, 1), 0);
  EXPECT_EQ(write_value(storing, word, 1), 0);
  const bool came = becomes([&] { return query(waiting) == 0; }, expected);
  store(word, 1);
  EXPECT_EQ(synchronize(waiting), 0);
  EXPECT_EQ(synchronize(storing), 0);
  store(word, 0);
  return came;
}

TEST(EmulatedChannels, AStreamThatWaitsHoldsUpTheStoreThatItWaitsForOnItsChannel) {
  in_process(channels("1"), [] {
    (void)use(0);
    void *user = make_stream(), *engine = make_stream(), *urgent = make_stream(1, -5);
    uint64_t* const word = make_pinned();
    EXPECT_FALSE(comes_through(user, engine, word, false));
    EXPECT_TRUE(comes_through(user, urgent, word, true)) << "other priorities have channels of their own";
  });
  in_process({{"MOECCL_TEST_CUDA_CHANNELS", "0"}, {"CUDA_DEVICE_MAX_CONNECTIONS", "1"}}, [] {
    (void)use(0);
    void *user = make_stream(), *engine = make_stream();
    EXPECT_TRUE(comes_through(user, engine, make_pinned(), true)) << "the rule is off";
  });
}

TEST(EmulatedChannels, StreamsTakeTheEightChannelsInTurn) {
  in_process({{"MOECCL_TEST_CUDA_CHANNELS", "1"}}, [] {
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    (void)use(0);
    uint64_t* const word = make_pinned();
    void* const first = make_stream();
    for (int i = 1; i <= 8; ++i) EXPECT_EQ(comes_through(first, make_stream(), word, i < 8), i < 8) << i;
  });
}

TEST(EmulatedChannels, OfAPoolAreTakenByAnyStreamUntilNoneIsFree) {
  const Settings pool = {
      {"MOECCL_TEST_CUDA_CHANNELS", "1"}, {"MOECCL_TEST_CUDA_CHANNEL_POOL", "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS", "2"}};
  in_process(pool, [] {
    (void)use(0);
    void* const urgent = make_stream(1, -5);
    uint64_t* const words = make_pinned();
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(comes_through(make_stream(), urgent, words, true)) << "stream " << i;
    void *first = make_stream(), *second = make_stream();
    EXPECT_EQ(wait_value(first, words, 1), 0);
    EXPECT_EQ(wait_value(second, words, 1), 0);
    EXPECT_EQ(write_value(urgent, words + 1, 1), 0);
    some_time();
    EXPECT_EQ(load(words + 1), 0u) << "no channel is free, whatever the priority";
    store(words, 1);
    for (void* s : {first, second, urgent}) EXPECT_EQ(synchronize(s), 0);
    EXPECT_EQ(load(words + 1), 1u);
  });
}

TEST(EmulatedChannels, OfAPoolMustNotAllWaitWhileAStreamIsMade) {
  const Settings pool = {
      {"MOECCL_TEST_CUDA_CHANNELS", "1"}, {"MOECCL_TEST_CUDA_CHANNEL_POOL", "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS", "3"}};
  in_process(pool, [] {
    (void)use(0);
    void *first = make_stream(), *second = make_stream(), *third = nullptr, *fourth = nullptr;
    uint64_t* const words = make_pinned();
    EXPECT_EQ(wait_value(first, words, 1), 0);
    EXPECT_EQ(call("cuStreamCreate", &third, 1u), 0) << "two are free";
    EXPECT_EQ(wait_value(second, words, 1), 0);
    EXPECT_TRUE(waits([&] { EXPECT_EQ(call("cuStreamCreate", &fourth, 1u), 0); }, [&] { store(words, 1); }, true));
    for (void* s : {first, second, third, fourth}) EXPECT_EQ(synchronize(s), 0);
  });
}

TEST(EmulatedChannels, AKernelLeavesItsChannelAndWhatComesAfterItOnItsStreamDoesNot) {
  in_process(channels("1"), [] {
    (void)use(0);
    void *a = make_stream(), *b = make_stream();
    void *spinning = make_function("emulated_spin"), *storing = make_function("emulated_store");
    uint64_t* const words = make_pinned();
    spin(spinning, a, words);
    EXPECT_EQ(launch(storing, b, StoreArgs{words + 1, 1}), 0);
    EXPECT_EQ(synchronize(b), 0) << "it runs beside the other";
    EXPECT_EQ(launch(storing, a, StoreArgs{words + 2, 1}), 0);
    EXPECT_EQ(launch(storing, b, StoreArgs{words + 3, 1}), 0);
    some_time();
    EXPECT_EQ(load(words + 3), 0u);
    store(words, 1);
    EXPECT_EQ(synchronize(b), 0);
    EXPECT_EQ(synchronize(a), 0);
  });
}

TEST(EmulatedChannels, AWaitForAnEventHoldsUpOtherStreamsToo) {
  in_process(channels("2"), [] {
    (void)use(0);
    // Two channels: one for a and c, one for b and d.
    void *a = make_stream(), *b = make_stream(), *c = make_stream(), *d = make_stream(), *event = make_event();
    void *spinning = make_function("emulated_spin"), *storing = make_function("emulated_store");
    uint64_t* const words = make_pinned();
    spin(spinning, a, words);
    EXPECT_EQ(call("cuEventRecord", event, a), 0);
    EXPECT_EQ(call("cuStreamWaitEvent", b, event, 0u), 0);
    EXPECT_EQ(launch(storing, d, StoreArgs{words + 1, 1}), 0);
    EXPECT_EQ(launch(storing, c, StoreArgs{words + 2, 1}), 0);
    some_time();
    EXPECT_EQ(load(words + 1), 0u) << "behind the wait";
    EXPECT_EQ(load(words + 2), 0u) << "behind the record, which comes after the kernel";
    store(words, 1);
    for (void* s : {a, b, c, d}) EXPECT_EQ(synchronize(s), 0);
    EXPECT_EQ(load(words + 1) + load(words + 2), 2u);
  });
}

TEST(EmulatedChannels, AKernelWaitsForRoomOnTheDeviceAtTheHeadOfItsChannel) {
  in_process(channels("2"), [] {
    (void)use(0);
    void *a = make_stream(), *b = make_stream(), *c = make_stream(), *d = make_stream();
    void *all = make_function("emulated_spin_together"), *storing = make_function("emulated_store");
    uint64_t* const words = make_pinned();
    // Each of its blocks fills a multiprocessor. The launches take half of the device, and then more than the other
    // half.
    EXPECT_EQ(launch(all, a, SpinArgs{words, 1}, 32), 0);
    const auto started = [] { return call("moeccl_emulated_launches") > 0; };
    EXPECT_TRUE(becomes(started));
    EXPECT_EQ(launch(all, b, SpinArgs{words + 1, 1}, 33), 0);
    EXPECT_EQ(launch(storing, d, StoreArgs{words + 2, 1}), 0);
    EXPECT_EQ(launch(storing, c, StoreArgs{words + 3, 1}), 0);
    EXPECT_EQ(synchronize(c), 0) << "half of the device is free";
    some_time();
    EXPECT_EQ(load(words + 2), 0u) << "behind the kernel that finds no room";
    store(words, 1);
    EXPECT_EQ(synchronize(d), 0);
    store(words + 1, 1);
    EXPECT_EQ(synchronize(b), 0);
  });
}

}  // namespace
}  // namespace moeccl::emulation
