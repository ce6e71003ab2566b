// SPDX-License-Identifier: Apache-2.0
// Objects that belong to a context, and what other contexts may do with them.
#include <string>

#include "tests/unit/cuda_emulation/driver.h"

namespace moeccl::emulation {
namespace {

constexpr int kInvalidContext = 201, kInvalidHandle = 400;
const Settings kTwo = {{"MOECCL_TEST_CUDA_DEVICES", "2"}};

TEST(EmulatedContexts, CallsWithoutACurrentContextAreRefused) {
  in_process({}, [] {
    void* p = nullptr;
    uint64_t memory = 0;
    int n = 0;
    EXPECT_EQ(call("cuStreamCreate", &p, 1u), kInvalidContext);
    EXPECT_EQ(call("cuEventCreate", &p, 2u), kInvalidContext);
    EXPECT_EQ(call("cuMemAlloc_v2", &memory, size_t{64}), kInvalidContext);
    EXPECT_EQ(call("cuMemHostAlloc", &p, size_t{64}, 0u), kInvalidContext);
    EXPECT_EQ(call("cuModuleLoadData", &p, static_cast<const void*>("image")), kInvalidContext);
    EXPECT_EQ(call("cuStreamSynchronize", static_cast<void*>(nullptr)), kInvalidContext);
    EXPECT_EQ(call("cuCtxGetDevice", &n), kInvalidContext);
    EXPECT_EQ(call("cuCtxSynchronize"), kInvalidContext);
    (void)use(0);
    EXPECT_EQ(call("cuStreamCreate", &p, 1u), 0);
    // Another thread has no context of its own.
    std::thread([] { EXPECT_EQ(synchronize(nullptr), kInvalidContext); }).join();
    EXPECT_EQ(call("cuCtxSetCurrent", reinterpret_cast<void*>(&n)), kInvalidContext);
  });
}

TEST(EmulatedContexts, AResetEndsWhatBelongsToTheContext) {
  in_process(kTwo, [] {
    const auto number = [] {
      unsigned long long n = 0;
      EXPECT_EQ(call("cuCtxGetId", static_cast<void*>(nullptr), &n), 0);
      return n;
    };
    void* const other = use(1);
    const unsigned long long of_other = number();
    void* const kept = make_stream();
    (void)use(0);
    const unsigned long long before = number();
    void *const stream = make_stream(), *const event = make_event(), *const own = reinterpret_cast<void*>(2);
    const uint64_t memory = make_memory();
    uint64_t* const word = make_pinned();
    EXPECT_EQ(call("cuStreamWriteValue64_v2", own, address(word), uint64_t{1}, 0u), 0);
    EXPECT_EQ(call("cuDevicePrimaryCtxReset_v2", 0), 0);
    (void)use(0);
    EXPECT_NE(number(), before);
    EXPECT_NE(number(), of_other);
    EXPECT_EQ(synchronize(stream), kInvalidHandle);
    EXPECT_EQ(call("cuEventQuery", event), kInvalidHandle);
    EXPECT_NE(call("cuMemFree_v2", memory), 0);
    EXPECT_NE(call("cuMemFreeHost", static_cast<void*>(word)), 0);
    uint64_t* const again = make_pinned();
    EXPECT_EQ(call("cuStreamWriteValue64_v2", own, address(again), uint64_t{1}, 0u), 0);
    EXPECT_EQ(synchronize(own), 0);
    EXPECT_EQ(load(again), 1u);
    EXPECT_EQ(call("cuCtxSetCurrent", other), 0);
    EXPECT_EQ(synchronize(kept), 0);
  });
}

TEST(EmulatedContexts, EventsAndFunctionsStayWithTheirContextsStreams) {
  in_process(kTwo, [] {
    void* const one = use(1);
    void *stream1 = make_stream(), *event1 = make_event(), *store1 = make_function("emulated_store");
    void* const zero = use(0);
    void *stream0 = make_stream(), *event0 = make_event(), *store0 = make_function("emulated_store");
    uint64_t* const word = make_pinned();

    EXPECT_EQ(call("cuEventRecord", event1, stream0), kInvalidHandle);
    EXPECT_EQ(call("cuEventRecord", event0, stream1), kInvalidHandle);
    EXPECT_EQ(call("cuEventRecord", event1, stream1), 0) << "another context may be current";
    EXPECT_EQ(call("cuEventRecord", event1, static_cast<void*>(nullptr)), kInvalidHandle)
        << "no stream is the current context's";
    EXPECT_EQ(call("cuStreamWaitEvent", stream0, event1, 0u), 0) << "contexts may wait for each other";

    EXPECT_EQ(launch(store1, stream0, StoreArgs{word, 1}), kInvalidHandle);
    EXPECT_EQ(launch(store1, nullptr, StoreArgs{word, 1}), kInvalidHandle);
    EXPECT_EQ(launch(store1, stream1, StoreArgs{word, 2}), 0);
    EXPECT_EQ(synchronize(stream1), 0);
    EXPECT_EQ(load(word), 2u);
    EXPECT_EQ(launch(store0, nullptr, StoreArgs{word, 3}), 0);
    EXPECT_EQ(synchronize(nullptr), 0);
    EXPECT_EQ(load(word), 3u);

    void* of = nullptr;
    EXPECT_EQ(call("cuStreamGetCtx", stream1, &of), 0);
    EXPECT_EQ(of, one);
    EXPECT_EQ(call("cuStreamGetCtx", static_cast<void*>(nullptr), &of), 0);
    EXPECT_EQ(of, zero);
    EXPECT_EQ(call("cuStreamDestroy_v2", stream1), 0);
    EXPECT_EQ(call("cuStreamSynchronize", stream1), kInvalidHandle);
    EXPECT_EQ(call("cuEventRecord", stream0, stream0), kInvalidHandle) << "a stream is no event";
  });
}

TEST(EmulatedContexts, TheNullStreamComesAfterBlockingStreamsOfItsContextAndBeforeThem) {
  in_process(kTwo, [] {
    (void)use(1);
    void* const elsewhere = make_stream(0);
    (void)use(0);
    void *blocking = make_stream(0), *free_stream = make_stream(1);
    void* const spinning = make_function("emulated_spin");
    void* const storing = make_function("emulated_store");
    uint64_t* const words = make_pinned();
    spin(spinning, blocking, words);
    EXPECT_EQ(launch(storing, nullptr, StoreArgs{words + 1, 1}), 0);
    EXPECT_EQ(launch(storing, blocking, StoreArgs{words + 2, 1}), 0);
    EXPECT_EQ(launch(storing, free_stream, StoreArgs{words + 3, 1}), 0);
    EXPECT_EQ(synchronize(free_stream), 0);
    EXPECT_EQ(synchronize(elsewhere), 0);
    some_time();
    EXPECT_EQ(load(words + 3), 1u);
    EXPECT_EQ(load(words + 1), 0u) << "the null stream overtook a blocking one";
    EXPECT_EQ(query(nullptr), 600);
    store(words, 1);
    EXPECT_EQ(synchronize(nullptr), 0);
    EXPECT_EQ(load(words + 1), 1u);
    // A blocking stream comes after it, too.
    spin(spinning, nullptr, words, 2);
    EXPECT_EQ(launch(storing, blocking, StoreArgs{words + 4, 1}), 0);
    some_time();
    EXPECT_EQ(load(words + 4), 0u);
    store(words, 2);
    EXPECT_EQ(synchronize(blocking), 0);
    EXPECT_EQ(load(words + 4), 1u);
  });
}

TEST(EmulatedContexts, EachThreadHasItsOwnPerThreadStream) {
  in_process({}, [] {
    void* const context = use(0);
    void* const per_thread = reinterpret_cast<void*>(2);
    uint64_t* const words = make_pinned();
    spin(make_function("emulated_spin"), per_thread, words);
    std::thread([&] {
      EXPECT_EQ(call("cuCtxSetCurrent", context), 0);
      EXPECT_EQ(query(per_thread), 0) << "that of another thread is busy";
      EXPECT_EQ(synchronize(per_thread), 0);
    }).join();
    EXPECT_EQ(query(per_thread), 600);
    store(words, 1);
    EXPECT_EQ(synchronize(per_thread), 0);
  });
}

TEST(EmulatedContexts, PeerAccessIsEnabledOnceForEachOrderedPair) {
  static constexpr int kAlready = 704, kNotEnabled = 705, kInvalidDevice = 101;
  in_process(kTwo, [] {
    void *zero = use(0), *one = context_of(1);
    int can = 0;
    EXPECT_EQ(call("cuDeviceCanAccessPeer", &can, 0, 1), 0);
    EXPECT_EQ(can, 1);
    EXPECT_EQ(call("cuDeviceCanAccessPeer", &can, 0, 2), kInvalidDevice);
    EXPECT_EQ(call("cuCtxEnablePeerAccess", one, 0u), 0);
    EXPECT_EQ(call("cuCtxEnablePeerAccess", one, 0u), kAlready);
    EXPECT_EQ(call("cuCtxEnablePeerAccess", zero, 0u), kInvalidContext) << "a context is not its own peer";
    EXPECT_EQ(call("cuCtxDisablePeerAccess", one), 0);
    EXPECT_EQ(call("cuCtxDisablePeerAccess", one), kNotEnabled);
    EXPECT_EQ(call("cuCtxSetCurrent", one), 0);
    EXPECT_EQ(call("cuCtxEnablePeerAccess", zero, 0u), 0) << "the other direction is another pair";
  });
  in_process({{"MOECCL_TEST_CUDA_DEVICES", "2"}, {"MOECCL_TEST_CUDA_NO_PEERS", "1"}}, [] {
    (void)use(0);
    int can = 1;
    EXPECT_EQ(call("cuDeviceCanAccessPeer", &can, 0, 1), 0);
    EXPECT_EQ(can, 0);
    EXPECT_EQ(call("cuCtxEnablePeerAccess", context_of(1), 0u), 217);
  });
}

TEST(EmulatedContexts, OneThreadWorksOnFourDevices) {
  in_process({{"MOECCL_TEST_CUDA_DEVICES", "4"}}, [] {
    void *streams[4], *events[4], *functions[4];
    uint64_t* words[4];
    for (int d = 0; d < 4; ++d) {
      (void)use(d);
      streams[d] = make_stream();
      events[d] = make_event();
      functions[d] = make_function("emulated_store");
      words[d] = make_pinned();
    }
    // A chain over all devices, with the context of the last one current.
    for (int d = 0; d < 4; ++d) {
      if (d > 0) {
        EXPECT_EQ(call("cuStreamWaitEvent", streams[d], events[d - 1], 0u), 0);
      }
      EXPECT_EQ(launch(functions[d], streams[d], StoreArgs{words[d], static_cast<uint64_t>(d) + 1}), 0);
      EXPECT_EQ(call("cuEventRecord", events[d], streams[d]), 0);
    }
    EXPECT_EQ(synchronize(streams[3]), 0);
    for (int d = 0; d < 4; ++d) EXPECT_EQ(load(words[d]), static_cast<uint64_t>(d) + 1);
    EXPECT_EQ(call("cuEventRecord", events[0], streams[3]), kInvalidHandle);
  });
}

TEST(EmulatedContexts, TheCallsOfAThreadAndOfTheProcessAreCounted) {
  in_process({}, [] {
    void* const context = use(0);
    const auto count = [](const char* which, const char* name) {
      return reinterpret_cast<uint64_t (*)(const char*)>(dlsym(library(), which))(name);
    };
    void* const stream = make_stream();
    for (int i = 0; i < 3; ++i) EXPECT_EQ(query(stream), 0);
    std::thread([&] {
      EXPECT_EQ(call("cuCtxSetCurrent", context), 0);
      EXPECT_EQ(query(stream), 0);
      EXPECT_EQ(count("moeccl_emulated_own_calls", "cuStreamQuery"), 1u);
    }).join();
    EXPECT_EQ(count("moeccl_emulated_own_calls", "cuStreamQuery"), 3u);
    EXPECT_EQ(count("moeccl_emulated_calls", "cuStreamQuery"), 4u);
    EXPECT_EQ(count("moeccl_emulated_calls", "cuMemAlloc_v2"), 0u);
    const uint64_t all = count("moeccl_emulated_calls", nullptr);
    (void)make_event();
    EXPECT_EQ(count("moeccl_emulated_calls", nullptr), all + 1);
  });
}

TEST(EmulatedContexts, WhatIsKnownOfAnAddress) {
  static constexpr int kMemoryType = 2, kOrdinal = 9, kIpcCapable = 10, kPool = 17;
  in_process(kTwo, [] {
    (void)use(1);
    const uint64_t memory = make_memory();
    uint64_t pooled = 0;
    EXPECT_EQ(call("cuMemAllocAsync", &pooled, size_t{64}, static_cast<void*>(nullptr)), 0);
    const auto ask = [](uint64_t p, int attribute) {
      uint64_t value = 0;
      EXPECT_EQ(call("cuPointerGetAttribute", static_cast<void*>(&value), attribute, p), 0) << attribute;
      return value;
    };
    EXPECT_EQ(ask(memory + 100, kMemoryType), 2u);
    EXPECT_EQ(ask(memory, kOrdinal), 1u);
    EXPECT_EQ(ask(memory, kIpcCapable), 1u);
    EXPECT_EQ(ask(memory, kPool), 0u);
    EXPECT_EQ(ask(pooled, kIpcCapable), 0u);
    EXPECT_NE(ask(pooled, kPool), 0u);
    EXPECT_EQ(ask(address(make_pinned()), kMemoryType), 1u);
    uint64_t own = 0, value = 0;
    EXPECT_EQ(call("cuPointerGetAttribute", static_cast<void*>(&value), kMemoryType, address(&own)), 1);
    // Several attributes in one call, without an error for memory that CUDA does not know.
    int wanted[] = {kMemoryType, kOrdinal, kIpcCapable};
    unsigned type = 7;
    int ordinal = 7;
    bool capable = false;
    void* out[] = {&type, &ordinal, &capable};
    EXPECT_EQ(call("cuPointerGetAttributes", 3u, &wanted[0], &out[0], memory), 0);
    EXPECT_EQ(type, 2u);
    EXPECT_EQ(ordinal, 1);
    EXPECT_TRUE(capable);
    EXPECT_EQ(call("cuPointerGetAttributes", 3u, &wanted[0], &out[0], address(&own)), 0);
    EXPECT_EQ(type, 0u);
    EXPECT_EQ(ordinal, -2);
    EXPECT_FALSE(capable);
    EXPECT_EQ(call("cuMemFreeAsync", pooled, static_cast<void*>(nullptr)), 0);
    EXPECT_EQ(synchronize(nullptr), 0);
    EXPECT_EQ(call("cuPointerGetAttribute", static_cast<void*>(&value), kMemoryType, pooled), 1);
  });
}

TEST(EmulatedModules, ARefusedImageLeavesALineInTheLog) {
  in_process({{"MOECCL_TEST_CUDA_IMAGE_ERROR", "222"}}, [] {
    (void)use(0);
    char log[256] = {};
    int options[] = {5, 6};  // the error log, and its size
    void* values[] = {log, reinterpret_cast<void*>(sizeof(log))};
    void* module = nullptr;
    EXPECT_EQ(call("cuModuleLoadDataEx", &module, static_cast<const void*>("image"), 2u, &options[0], &values[0]), 222);
    EXPECT_NE(std::string(log).find("refused"), std::string::npos) << log;
    EXPECT_EQ(reinterpret_cast<size_t>(values[1]), std::string(log).size() + 1);
    const char* words = nullptr;
    EXPECT_EQ(call("cuGetErrorString", 222, &words), 0);
    EXPECT_NE(std::string(words).find("PTX"), std::string::npos);
  });
}

TEST(EmulatedModules, OccupancyAndRegistersAgree) {
  in_process({}, [] {
    (void)use(0);
    int blocks = 0, registers = 0;
    void* const walk = make_function("moeccl_walk_rows");
    EXPECT_EQ(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", &blocks, walk, 256, size_t{0}), 0);
    EXPECT_EQ(call("cuFuncGetAttribute", &registers, 4, walk), 0);
    EXPECT_EQ(blocks, 2);
    EXPECT_EQ(65536 / (registers * 256), blocks);
    EXPECT_EQ(
        call("cuOccupancyMaxActiveBlocksPerMultiprocessor", &blocks, make_function("moeccl_copy"), 256, size_t{0}), 0);
    EXPECT_EQ(blocks, 4);
  });
}

}  // namespace
}  // namespace moeccl::emulation
