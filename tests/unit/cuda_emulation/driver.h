// SPDX-License-Identifier: Apache-2.0
// The emulated driver through its functions' names, for tests of its rules.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/cuda_emulation/test_kernels.h"

namespace moeccl::emulation {

using Settings = std::vector<std::pair<const char*, const char*>>;

// Runs a test in a separate process, so that contexts, settings and sticky errors do not affect others.
inline void in_process(const Settings& settings, const std::function<void()>& body) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (const auto& [name, value] : settings) setenv(name, value, 1);
    alarm(60);  // a driver that waits for ever is a failure
    body();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "see above";
}

inline void* library() {
  static void* const opened = dlopen(std::getenv("MOECCL_CUDA_DRIVER"), RTLD_NOW);
  return opened;
}
template <class... Args>
int call(const char* name, Args... args) {
  auto* const f = reinterpret_cast<int (*)(Args...)>(dlsym(library(), name));
  if (f == nullptr) ADD_FAILURE() << "the driver has no " << name;
  return f == nullptr ? -1 : f(args...);
}

inline void* context_of(int device) {
  void* context = nullptr;
  EXPECT_EQ(call("cuDevicePrimaryCtxRetain", &context, device), 0);
  return context;
}
// Makes the device's context current.
inline void* use(int device) {
  void* const context = context_of(device);
  EXPECT_EQ(call("cuCtxSetCurrent", context), 0);
  return context;
}
inline void* make_stream(unsigned flags = 1, int priority = 0) {
  void* stream = nullptr;
  EXPECT_EQ(call("cuStreamCreateWithPriority", &stream, flags, priority), 0);
  return stream;
}
inline void* make_event() {
  void* event = nullptr;
  EXPECT_EQ(call("cuEventCreate", &event, 2u), 0);
  return event;
}
// Returns a page of zeros.
inline uint64_t* make_pinned() {
  void* p = nullptr;
  EXPECT_EQ(call("cuMemHostAlloc", &p, size_t{4096}, 0u), 0);
  return p == nullptr ? nullptr : static_cast<uint64_t*>(std::memset(p, 0, 4096));
}
inline uint64_t make_memory(size_t bytes = 4096) {
  uint64_t p = 0;
  EXPECT_EQ(call("cuMemAlloc_v2", &p, bytes), 0);
  return p;
}
inline void* make_module() {
  void* module = nullptr;
  EXPECT_EQ(call("cuModuleLoadData", &module, static_cast<const void*>("image")), 0);
  return module;
}
inline void* make_function(const char* name, void* module = nullptr) {
  void* function = nullptr;
  if (module == nullptr) module = make_module();
  EXPECT_EQ(call("cuModuleGetFunction", &function, module, name), 0) << name;
  return function;
}
template <class A>
int launch(void* function, void* stream, const A& args, unsigned blocks = 1, unsigned threads = 32) {
  void* parameters[] = {const_cast<A*>(&args)};
  return call("cuLaunchKernel", function, blocks, 1u, 1u, threads, 1u, 1u, 0u, stream, &parameters[0],
              static_cast<void**>(nullptr));
}
inline void spin(void* function, void* stream, const uint64_t* word, uint64_t value = 1) {
  EXPECT_EQ(launch(function, stream, SpinArgs{word, value}), 0);
}
inline int query(void* stream) { return call("cuStreamQuery", stream); }
inline int synchronize(void* stream) { return call("cuStreamSynchronize", stream); }
inline void store(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline uint64_t address(const uint64_t* word) { return reinterpret_cast<uint64_t>(word); }

// Usually long enough for work that may proceed to have done so.
inline void some_time() { std::this_thread::sleep_for(std::chrono::milliseconds(150)); }
// Returns whether the condition becomes true, on a machine that has other work too. Waits only briefly if that is not
// expected.
inline bool becomes(const std::function<bool()>& what, bool expected = true) {
  for (int i = 0; i < (expected ? 2000 : 15); ++i) {
    if (what()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return what();
}
// Returns whether the call, on a separate thread with the same context, still waits after some time. `release` lets it
// end.
inline bool waits(const std::function<void()>& what, const std::function<void()>& release, bool expected) {
  void* context = nullptr;
  EXPECT_EQ(call("cuCtxGetCurrent", &context), 0);
  std::atomic<bool> done = false;
  std::thread t([&] {
    EXPECT_EQ(call("cuCtxSetCurrent", context), 0);
    what();
    done = true;
  });
  const bool waited = !becomes([&] { return done.load(); }, !expected);
  release();
  t.join();
  return waited;
}

}  // namespace moeccl::emulation
