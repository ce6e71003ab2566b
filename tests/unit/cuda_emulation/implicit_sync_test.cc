// SPDX-License-Identifier: Apache-2.0
// Calls that implicitly wait for the device.
#include "tests/unit/cuda_emulation/driver.h"

namespace moeccl::emulation {
namespace {

const Settings kStrict = {{"MOECCL_TEST_CUDA_IMPLICIT_SYNC", "1"}, {"MOECCL_TEST_CUDA_LAZY_LOADING", "1"}};

// A running kernel of the context, to test whether a call waits for it.
struct Busy {
  Busy() : word(make_pinned()), stream(make_stream()) {
    void* const function = make_function("emulated_spin");
    EXPECT_EQ(call("cuFuncLoad", function), 0);
    spin(function, stream, word);
  }
  // `expected` determines how long to look.
  bool holds_up(const std::function<void()>& what, bool expected = true) {
    return waits(
        what, [&] { store(word, 1); }, expected);
  }
  bool lets(const std::function<void()>& what) { return !holds_up(what, false); }
  ~Busy() { EXPECT_EQ(synchronize(stream), 0); }
  uint64_t* word;
  void* stream;
};

TEST(EmulatedImplicitSync, FreeingAndPageLockingAndModulesWaitForAllStreamsOfTheContext) {
  in_process(kStrict, [] {
    (void)use(0);
    const uint64_t memory = make_memory();
    void *page = make_pinned(), *module = make_module(), *made = nullptr;
    static char host[8192], other[8192];
    EXPECT_EQ(call("cuMemHostRegister_v2", static_cast<void*>(other), sizeof(other), 0u), 0);
    const std::vector<std::pair<const char*, std::function<void()>>> waiting = {
        {"cuMemFree", [&] { EXPECT_EQ(call("cuMemFree_v2", memory), 0); }},
        {"cuMemHostAlloc", [&] { EXPECT_EQ(call("cuMemHostAlloc", &made, size_t{64}, 0u), 0); }},
        {"cuMemFreeHost", [&] { EXPECT_EQ(call("cuMemFreeHost", page), 0); }},
        {"cuMemHostRegister",
         [&] { EXPECT_EQ(call("cuMemHostRegister_v2", static_cast<void*>(host), sizeof(host), 0u), 0); }},
        {"cuMemHostUnregister", [&] { EXPECT_EQ(call("cuMemHostUnregister", static_cast<void*>(other)), 0); }},
        {"cuModuleLoadData", [&] { (void)make_module(); }},
        {"cuModuleUnload", [&] { EXPECT_EQ(call("cuModuleUnload", module), 0); }},
        {"cuCtxSynchronize", [&] { EXPECT_EQ(call("cuCtxSynchronize"), 0); }}};
    for (const auto& [name, what] : waiting) {
      Busy busy;
      EXPECT_TRUE(busy.holds_up(what)) << name;
    }
  });
}

TEST(EmulatedImplicitSync, AllocatingAndMappingAndPoolsAndOtherContextsDoNotWait) {
  in_process({{"MOECCL_TEST_CUDA_IMPLICIT_SYNC", "1"}, {"MOECCL_TEST_CUDA_DEVICES", "2"}}, [] {
    (void)use(0);
    uint64_t p = 0, elsewhere = 0;
    (void)use(1);
    elsewhere = make_memory();
    (void)use(0);
    void* made = nullptr;
    void* const own = make_stream();
    void* const event = make_event();
    const std::vector<std::pair<const char*, std::function<void()>>> free = {
        {"cuMemAlloc", [&] { EXPECT_EQ(call("cuMemAlloc_v2", &p, size_t{64}), 0); }},
        {"cuMemAllocAsync", [&] { EXPECT_EQ(call("cuMemAllocAsync", &p, size_t{64}, own), 0); }},
        {"cuMemFreeAsync",
         [&] {
           EXPECT_EQ(call("cuMemFreeAsync", p, own), 0);
           EXPECT_EQ(synchronize(own), 0);
         }},
        {"cuStreamCreate", [&] { EXPECT_EQ(call("cuStreamCreate", &made, 1u), 0); }},
        {"cuStreamDestroy", [&] { EXPECT_EQ(call("cuStreamDestroy_v2", made), 0); }},
        {"cuEventQuery", [&] { EXPECT_EQ(call("cuEventQuery", event), 0); }},
        {"cuMemFree of another context", [&] {
           (void)use(1);
           EXPECT_EQ(call("cuMemFree_v2", elsewhere), 0);
         }}};
    for (const auto& [name, what] : free) {
      Busy busy;
      EXPECT_TRUE(busy.lets(what)) << name;
    }
  });
}

TEST(EmulatedImplicitSync, ACopyToMemoryThatIsNotPageLockedReturnsWhenItIsDone) {
  in_process(kStrict, [] {
    (void)use(0);
    static char pageable[128 << 10];
    const uint64_t memory = make_memory(sizeof(pageable));
    void* const locked = make_pinned();
    const auto down = [&](void* to, size_t bytes, void* s) {
      return call("cuMemcpyDtoHAsync_v2", to, memory, bytes, s);
    };
    const auto up = [&](size_t bytes, void* s) {
      return call("cuMemcpyHtoDAsync_v2", memory, static_cast<const void*>(pageable), bytes, s);
    };
    {
      Busy busy;
      EXPECT_TRUE(busy.holds_up([&] { EXPECT_EQ(down(pageable, 8, busy.stream), 0); }));
    }
    {
      Busy busy;
      EXPECT_TRUE(busy.holds_up([&] { EXPECT_EQ(up(sizeof(pageable), busy.stream), 0); }));
    }
    {
      Busy busy;
      EXPECT_TRUE(busy.holds_up([&] {
        EXPECT_EQ(call("cuMemcpyAsync", reinterpret_cast<uint64_t>(pageable), memory, size_t{8}, busy.stream), 0);
      }));
    }
    {
      Busy busy;
      EXPECT_TRUE(busy.lets([&] {
        EXPECT_EQ(up(4096, busy.stream), 0) << "little is taken over at once";
        EXPECT_EQ(down(locked, 4096, busy.stream), 0);
      }));
    }
  });
}

TEST(EmulatedImplicitSync, AFreeThatWaitsHoldsUpTheContextsOtherCalls) {
  in_process(kStrict, [] {
    (void)use(0);
    const uint64_t memory = make_memory();
    void* event = nullptr;
    Busy busy;
    std::thread free([&] {
      (void)use(0);
      EXPECT_EQ(call("cuMemFree_v2", memory), 0);
    });
    some_time();
    EXPECT_TRUE(busy.holds_up([&] { EXPECT_EQ(call("cuEventCreate", &event, 0u), 0); }));
    free.join();
  });
}

TEST(EmulatedImplicitSync, AFreeWaitsForDevicesThatReachTheMemory) {
  in_process({{"MOECCL_TEST_CUDA_IMPLICIT_SYNC", "1"}, {"MOECCL_TEST_CUDA_DEVICES", "2"}}, [] {
    void* const other = use(1);
    const uint64_t first = make_memory(), second = make_memory();
    (void)use(0);
    const auto free = [](uint64_t memory) {
      (void)use(1);
      EXPECT_EQ(call("cuMemFree_v2", memory), 0);
    };
    {
      Busy busy;
      EXPECT_TRUE(busy.lets([&] { free(first); }));
    }
    EXPECT_EQ(call("cuCtxEnablePeerAccess", other, 0u), 0);
    Busy busy;
    EXPECT_TRUE(busy.holds_up([&] { free(second); }));
  });
}

TEST(EmulatedImplicitSync, UnmappingWaitsWhereATestWantsIt) {
  for (const bool wanted : {false, true}) {
    Settings settings = kStrict;
    settings.emplace_back("MOECCL_TEST_CUDA_UNMAP_WAITS", wanted ? "1" : "0");
    in_process(settings, [wanted] {
      (void)use(0);
      constexpr size_t kUnit = 2 << 20;
      const int properties[12] = {1, 1, 1, 0};
      uint64_t object = 0, mapped = 0;
      EXPECT_EQ(call("cuMemCreate", &object, kUnit, static_cast<const void*>(properties), 0ull), 0);
      EXPECT_EQ(call("cuMemAddressReserve", &mapped, kUnit, size_t{0}, uint64_t{0}, 0ull), 0);
      EXPECT_EQ(call("cuMemMap", mapped, kUnit, size_t{0}, object, 0ull), 0);
      {
        Busy busy;
        EXPECT_EQ(busy.holds_up([&] { EXPECT_EQ(call("cuMemUnmap", mapped, kUnit), 0); }, wanted), wanted);
      }
      Busy busy;
      EXPECT_EQ(busy.holds_up([&] { EXPECT_EQ(call("cuMemRelease", object), 0); }, wanted), wanted);
    });
  }
}

TEST(EmulatedImplicitSync, APageableCopyThatWaitsHoldsUpOthersOfItsKind) {
  in_process(kStrict, [] {
    (void)use(0);
    const uint64_t memory = make_memory();
    void *idle = make_stream(), *locked = make_pinned();
    char first[8], second[8];
    const auto down = [&](void* to, void* s) { return call("cuMemcpyDtoHAsync_v2", to, memory, size_t{8}, s); };
    Busy busy;
    std::thread copy([&] {
      (void)use(0);
      EXPECT_EQ(down(first, busy.stream), 0);
    });
    some_time();
    EXPECT_EQ(down(locked, idle), 0);
    EXPECT_EQ(synchronize(idle), 0) << "a copy to page-locked memory needs no lock";
    EXPECT_TRUE(busy.holds_up([&] { EXPECT_EQ(down(second, idle), 0); }));
    copy.join();
  });
}

TEST(EmulatedImplicitSync, TheFirstLaunchOfAFunctionWaitsForWhatRuns) {
  in_process(kStrict, [] {
    (void)use(0);
    void* const stream = make_stream();
    uint64_t* const word = make_pinned();
    int mode = 0, loaded = 1;
    EXPECT_EQ(call("cuModuleGetLoadingMode", &mode), 0);
    EXPECT_EQ(mode, 2) << "lazy, as drivers are since 12.2";
    void* const function = make_function("emulated_store");
    EXPECT_EQ(call("cuFuncIsLoaded", &loaded, function), 0);
    EXPECT_EQ(loaded, 0);
    const auto store_once = [&](void* f) {
      EXPECT_EQ(launch(f, stream, StoreArgs{word, 1}), 0);
      EXPECT_EQ(synchronize(stream), 0);
    };
    {
      Busy busy;
      EXPECT_TRUE(busy.holds_up([&] { store_once(function); })) << "two that wait for each other would stand still";
    }
    {
      Busy busy;
      EXPECT_TRUE(busy.lets([&] { store_once(function); })) << "it is there now";
    }
    // Asking for its attributes, or cuFuncLoad, loads it before that.
    void* const asked = make_function("emulated_store");
    int registers = 0;
    EXPECT_EQ(call("cuFuncGetAttribute", &registers, 4, asked), 0);
    Busy busy;
    EXPECT_TRUE(busy.lets([&] { store_once(asked); }));
  });
  Settings eager = kStrict;
  eager.emplace_back("CUDA_MODULE_LOADING", "EAGER");
  in_process(eager, [] {
    (void)use(0);
    void *function = make_function("emulated_store"), *stream = make_stream(), *module = nullptr;
    {
      Busy busy;
      EXPECT_TRUE(busy.lets([&] {
        EXPECT_EQ(launch(function, stream, StoreArgs{busy.word + 1, 1}), 0);
        EXPECT_EQ(synchronize(stream), 0);
      }));
    }
    Busy busy;
    EXPECT_TRUE(busy.holds_up([&] {
      EXPECT_EQ(call("cuModuleLoadData", &module, static_cast<const void*>("image")), 0);
    })) << "loading everything waits for the device";
  });
}

}  // namespace
}  // namespace moeccl::emulation
