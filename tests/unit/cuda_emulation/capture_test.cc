// SPDX-License-Identifier: Apache-2.0
// Which calls are allowed during a capture, on which threads, and what happens to the capture otherwise.
#include "tests/unit/cuda_emulation/driver.h"

namespace moeccl::emulation {
namespace {

constexpr int kGlobal = 0, kThreadLocal = 1, kRelaxed = 2;
constexpr int kIllegalState = 401, kUnsupported = 900, kInvalidated = 901, kMerge = 902, kUnmatched = 903,
              kUnjoined = 904, kIsolation = 905, kImplicit = 906, kCapturedEvent = 907, kWrongThread = 908;

int begin(void* stream, int mode) { return call("cuStreamBeginCapture_v2", stream, mode); }
int end(void* stream, void** graph = nullptr) {
  void* made = nullptr;
  const int rc = call("cuStreamEndCapture", stream, &made);
  if (graph != nullptr) *graph = made;
  EXPECT_EQ(made != nullptr, rc == 0);
  return rc;
}
int status(void* stream) {
  int s = -1;
  EXPECT_EQ(call("cuStreamIsCapturing", stream, &s), 0);
  return s;
}
int record(void* event, void* stream) { return call("cuEventRecord", event, stream); }
int wait(void* stream, void* event) { return call("cuStreamWaitEvent", stream, event, 0u); }
int exchange(int mode) {
  EXPECT_EQ(call("cuThreadExchangeStreamCaptureMode", &mode), 0);
  return mode;
}
int allocate() {
  uint64_t p = 0;
  return call("cuMemAlloc_v2", &p, size_t{64});
}
// Runs on another thread, whose mode is `mode`.
int elsewhere(const std::function<int()>& what, int mode = kGlobal) {
  void* context = nullptr;
  EXPECT_EQ(call("cuCtxGetCurrent", &context), 0);
  int rc = -1;
  std::thread([&] {
    EXPECT_EQ(call("cuCtxSetCurrent", context), 0);
    (void)exchange(mode);
    rc = what();
  }).join();
  return rc;
}

// Every call that may wait for the device is refused in each mode, and invalidates the capture.
TEST(EmulatedCapture, UnsafeCallsOfTheCapturingThreadEndAGlobalAndAThreadLocalCapture) {
  for (const int mode : {kGlobal, kThreadLocal, kRelaxed}) {
    in_process({}, [mode] {
      (void)use(0);
      void *stream = make_stream(), *event = make_event(), *module = make_module(), *other = make_stream();
      const uint64_t memory = make_memory();
      void* const page = make_pinned();
      static char host[4096];
      EXPECT_EQ(record(event, other), 0);
      EXPECT_EQ(synchronize(other), 0);
      uint64_t p = 0;
      void* made = nullptr;
      const std::vector<std::pair<const char*, std::function<int()>>> unsafe = {
          {"cuMemAlloc", [&] { return call("cuMemAlloc_v2", &p, size_t{64}); }},
          {"cuMemHostAlloc", [&] { return call("cuMemHostAlloc", &made, size_t{64}, 0u); }},
          {"cuMemHostRegister",
           [&] { return call("cuMemHostRegister_v2", static_cast<void*>(host), sizeof(host), 0u); }},
          {"cuMemHostUnregister", [&] { return call("cuMemHostUnregister", static_cast<void*>(host)); }},
          {"cuEventQuery", [&] { return call("cuEventQuery", event); }},
          {"cuStreamSynchronize", [&] { return call("cuStreamSynchronize", other); }},
          {"cuEventSynchronize", [&] { return call("cuEventSynchronize", event); }},
          {"cuModuleLoadData", [&] { return call("cuModuleLoadData", &made, static_cast<const void*>("image")); }},
          {"cuModuleUnload", [&] { return call("cuModuleUnload", module); }},
          {"cuMemFree", [&] { return call("cuMemFree_v2", memory); }},
          {"cuMemFreeHost", [&] { return call("cuMemFreeHost", page); }}};
      for (const auto& [name, what] : unsafe) {
        ASSERT_EQ(begin(stream, mode), 0);
        EXPECT_EQ(what(), mode == kRelaxed ? 0 : kUnsupported) << name;
        EXPECT_EQ(status(stream), mode == kRelaxed ? 1 : 2) << name;
        if (mode != kRelaxed) {
          EXPECT_EQ(call("cuMemsetD8Async", memory, static_cast<unsigned char>(0), size_t{8}, stream), kInvalidated);
          EXPECT_EQ(record(event, stream), kInvalidated);
        }
        EXPECT_EQ(end(stream), mode == kRelaxed ? 0 : kInvalidated) << name;
        EXPECT_EQ(status(stream), 0) << "the stream works again";
      }
      // A thread that allows it may make such calls during its own capture.
      if (mode == kRelaxed) return;
      ASSERT_EQ(begin(stream, mode), 0);
      EXPECT_EQ(exchange(kRelaxed), kGlobal);
      EXPECT_EQ(allocate(), 0);
      EXPECT_EQ(exchange(kGlobal), kRelaxed);
      EXPECT_EQ(end(stream), 0);
    });
  }
}

TEST(EmulatedCapture, OtherThreadsEndAGlobalCaptureUnlessTheirModeAllowsIt) {
  in_process({}, [] {
    (void)use(0);
    void *stream = make_stream(), *event = make_event(), *other = make_stream();
    EXPECT_EQ(record(event, other), 0);
    EXPECT_EQ(synchronize(other), 0);
    const auto ask = [&] { return call("cuEventQuery", event); };
    for (const auto& [mode, theirs, rc] : std::vector<std::tuple<int, int, int>>{{kGlobal, kGlobal, kUnsupported},
                                                                                 {kGlobal, kThreadLocal, 0},
                                                                                 {kGlobal, kRelaxed, 0},
                                                                                 {kThreadLocal, kGlobal, 0},
                                                                                 {kRelaxed, kGlobal, 0}}) {
      ASSERT_EQ(begin(stream, mode), 0);
      EXPECT_EQ(elsewhere(ask, theirs), rc) << mode << " " << theirs;
      EXPECT_EQ(elsewhere(allocate, theirs), rc) << mode << " " << theirs;
      EXPECT_EQ(end(stream), rc == 0 ? 0 : kInvalidated) << mode << " " << theirs;
    }
    // Streams and events may be created and used.
    ASSERT_EQ(begin(stream, kGlobal), 0);
    void *made = make_stream(), *made_event = make_event();
    EXPECT_EQ(record(made_event, made), 0);
    EXPECT_EQ(call("cuEventDestroy_v2", made_event), 0);
    EXPECT_EQ(call("cuStreamDestroy_v2", made), 0);
    EXPECT_EQ(end(stream), 0);
  });
}

TEST(EmulatedCapture, AskingACapturedStreamOrEventOrItsContextEndsIt) {
  in_process({}, [] {
    (void)use(0);
    void *stream = make_stream(), *event = make_event();
    for (const int mode : {kGlobal, kRelaxed}) {
      ASSERT_EQ(begin(stream, mode), 0);
      EXPECT_EQ(begin(stream, mode), kIllegalState);
      EXPECT_EQ(query(stream), kUnsupported);
      EXPECT_EQ(synchronize(stream), kInvalidated);
      EXPECT_EQ(end(stream), kInvalidated);
      ASSERT_EQ(begin(stream, mode), 0);
      EXPECT_EQ(call("cuCtxSynchronize"), kUnsupported);
      EXPECT_EQ(end(stream), kInvalidated);
      ASSERT_EQ(begin(stream, mode), 0);
      EXPECT_EQ(record(event, stream), 0);
      EXPECT_EQ(call("cuEventQuery", event), kCapturedEvent);
      EXPECT_EQ(end(stream), kInvalidated);
      EXPECT_EQ(call("cuEventQuery", event), kCapturedEvent) << "until it is recorded again";
      EXPECT_EQ(record(event, stream), 0);
      EXPECT_EQ(synchronize(stream), 0);
      EXPECT_EQ(call("cuEventQuery", event), 0);
    }
    EXPECT_EQ(end(stream), kIllegalState);
  });
}

TEST(EmulatedCapture, StreamsForkAndJoinByEvents) {
  in_process({}, [] {
    (void)use(0);
    void *a = make_stream(), *b = make_stream(), *fork = make_event(), *join = make_event(), *outside = make_event();
    void* const storing = make_function("emulated_store");
    uint64_t* const words = make_pinned();
    EXPECT_EQ(record(outside, b), 0);
    const auto fork_to_b = [&] {
      ASSERT_EQ(begin(a, kGlobal), 0);
      EXPECT_EQ(launch(storing, a, StoreArgs{words, 1}), 0);
      EXPECT_EQ(record(fork, a), 0);
      EXPECT_EQ(wait(b, fork), 0);
      EXPECT_EQ(status(b), 1);
      EXPECT_EQ(launch(storing, b, StoreArgs{words + 1, 2}), 0);
    };
    fork_to_b();
    EXPECT_EQ(record(join, b), 0);
    EXPECT_EQ(wait(a, join), 0);
    void *graph = nullptr, *instance = nullptr;
    EXPECT_EQ(end(a, &graph), 0);
    EXPECT_EQ(status(b), 0);
    EXPECT_EQ(load(words), 0u) << "a capture runs nothing";
    size_t nodes = 0;
    EXPECT_EQ(call("cuGraphGetNodes", graph, static_cast<void**>(nullptr), &nodes), 0);
    EXPECT_EQ(nodes, 2u);
    EXPECT_EQ(call("cuGraphInstantiateWithFlags", &instance, graph, 0ull), 0);
    EXPECT_EQ(call("cuGraphLaunch", instance, a), 0);
    EXPECT_EQ(synchronize(a), 0);
    EXPECT_EQ(load(words + 1), 2u);

    fork_to_b();
    EXPECT_EQ(end(a), kUnjoined);
    fork_to_b();
    EXPECT_EQ(end(b), kUnmatched);
    EXPECT_EQ(end(a), kInvalidated);
    fork_to_b();
    EXPECT_EQ(wait(a, outside), kIsolation);
    EXPECT_EQ(end(a), kInvalidated);
    // Two captures must not become one.
    ASSERT_EQ(begin(a, kGlobal), 0);
    ASSERT_EQ(begin(b, kGlobal), 0);
    EXPECT_EQ(record(fork, a), 0);
    EXPECT_EQ(wait(b, fork), kMerge);
    EXPECT_EQ(end(a), kInvalidated);
    EXPECT_EQ(end(b), kInvalidated);
    EXPECT_EQ(wait(b, fork), kCapturedEvent);
    // Another thread may only end a capture that began in the relaxed mode.
    ASSERT_EQ(begin(a, kGlobal), 0);
    EXPECT_EQ(elsewhere([&] { return end(a); }), kWrongThread);
    EXPECT_EQ(end(a), 0);
    ASSERT_EQ(begin(a, kRelaxed), 0);
    EXPECT_EQ(elsewhere([&] { return end(a); }), 0);
  });
}

// Each launch of a graph waits for what was recorded before it, and what is recorded in it is waited for outside.
TEST(EmulatedCapture, ExternalEventsOrderGraphsWithOtherStreams) {
  in_process({}, [] {
    (void)use(0);
    constexpr unsigned kExternal = 1;
    void *a = make_stream(), *b = make_stream(), *before = make_event(), *after = make_event();
    void* const storing = make_function("emulated_store");
    uint64_t* const words = make_pinned();
    EXPECT_EQ(call("cuStreamWaitEvent", a, before, kExternal), 1) << "outside of a capture";
    EXPECT_EQ(call("cuEventRecordWithFlags", after, a, kExternal), 1);
    void *graph = nullptr, *instance = nullptr;
    ASSERT_EQ(begin(a, kGlobal), 0);
    EXPECT_EQ(call("cuStreamWaitEvent", a, before, kExternal), 0);
    EXPECT_EQ(launch(storing, a, StoreArgs{words, 1}), 0);
    EXPECT_EQ(call("cuEventRecordWithFlags", after, a, kExternal), 0);
    EXPECT_EQ(end(a, &graph), 0);
    EXPECT_EQ(call("cuEventQuery", after), 0) << "a capture records nothing";
    EXPECT_EQ(call("cuGraphInstantiateWithFlags", &instance, graph, 0ull), 0);
    // b is held up; the graph on a follows it, and the next store on b follows the graph.
    EXPECT_EQ(call("cuStreamWaitValue64_v2", b, reinterpret_cast<uint64_t>(words + 1), uint64_t{1}, 0u), 0);
    EXPECT_EQ(record(before, b), 0);
    EXPECT_EQ(call("cuGraphLaunch", instance, a), 0);
    EXPECT_EQ(wait(b, after), 0);
    EXPECT_EQ(launch(storing, b, StoreArgs{words, 2}), 0);
    EXPECT_EQ(call("cuEventQuery", after), 600);
    EXPECT_EQ(load(words), 0u);
    std::atomic_ref(words[1]).store(1);
    EXPECT_EQ(synchronize(b), 0);
    EXPECT_EQ(load(words), 2u);
    EXPECT_EQ(call("cuEventQuery", after), 0);
    EXPECT_EQ(call("cuGraphLaunch", instance, a), 0) << "once more, with nothing to wait for";
    EXPECT_EQ(synchronize(a), 0);
    EXPECT_EQ(load(words), 1u);
  });
}

TEST(EmulatedCapture, TheLegacyStreamMayNotDependOnACapture) {
  in_process({}, [] {
    (void)use(0);
    void *blocking = make_stream(0), *free_stream = make_stream(1);
    const uint64_t memory = make_memory();
    const auto clear = [&](void* stream) {
      return call("cuMemsetD8Async", memory, static_cast<unsigned char>(0), size_t{8}, stream);
    };
    EXPECT_EQ(begin(nullptr, kRelaxed), kUnsupported) << "it is not captured itself";
    ASSERT_EQ(begin(blocking, kRelaxed), 0);
    int s = 0;
    EXPECT_EQ(call("cuStreamIsCapturing", static_cast<void*>(nullptr), &s), kImplicit);
    EXPECT_EQ(status(blocking), 1) << "asking does no harm";
    EXPECT_EQ(clear(nullptr), kImplicit);
    EXPECT_EQ(end(blocking), kInvalidated);
    ASSERT_EQ(begin(free_stream, kRelaxed), 0);
    EXPECT_EQ(clear(nullptr), 0) << "it does not wait for that stream";
    EXPECT_EQ(clear(blocking), 0);
    EXPECT_EQ(synchronize(nullptr), 0);
    EXPECT_EQ(end(free_stream), 0);
  });
}

}  // namespace
}  // namespace moeccl::emulation
