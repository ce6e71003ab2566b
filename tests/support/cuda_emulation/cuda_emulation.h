// SPDX-License-Identifier: Apache-2.0
// Runs the sources of kernels/cuda on a CPU. A launch runs its blocks one after another, or each block on a separate OS
// thread (for kernels whose blocks wait for each other or for other kernels). The threads of a block are fibers that
// switch at barriers, warp operations and pauses, in an order that a seed changes, so that bugs that depend on the
// order show. A block that deadlocks ends the process and prints what each thread waits for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <type_traits>

namespace moeccl::emulation {

struct Block;
// A running fiber's place in its launch.
struct Place {
  uint32_t thread = 0, block = 0, n_threads = 0, n_blocks = 0;
  Block* owner = nullptr;
};
extern constinit thread_local Place place;

// All threads of a block come to a barrier from one place in the source. A block that mixes two barriers ends the
// process.
void block_sync(const std::source_location& at);
void warp_sync();
// Shuffles and votes order nothing, as on a GPU. Deposits a value, waits for all lanes of the warp, and returns the
// value of `lane`.
uint64_t exchange(uint64_t value, uint32_t lane);
uint32_t vote(bool value);
uint32_t match(uint32_t value);
void pause();
uint64_t now_ns();
// Number of calls in this process: of store_release_system(), and of load_acquire_system() and load_acquire_device().
extern std::atomic<int> releases, acquires;

// A kernel by name. Its one argument is a struct of `bytes` bytes.
struct Kernel {
  const char* name;
  size_t bytes;
  void (*run)(const void* args);
};
struct Registration {
  Registration(const char* name, size_t bytes, void (*run)(const void*));
};
const Kernel* find_kernel(const std::string& name);
size_t n_kernels();
const Kernel& kernel_at(size_t i);

struct Launch {
  uint32_t blocks = 1, threads = 256;
  bool concurrent = false;                                     // each block runs on a separate OS thread
  uint64_t seed = 0;                                           // changes the order of threads
  const std::atomic<int>* failed = nullptr;                    // the kernel ends where it is when this is no longer 0
  std::function<std::shared_ptr<void>()> on_thread = nullptr;  // its result lives while a separate thread runs a block
  // Lets the thread sanitizer find races between the threads of a block, too. It supports only some thousand threads,
  // and each one makes all barriers slower.
  bool threads_apart = true;
};
void launch(const Kernel& kernel, const void* args, const Launch& how);
// For signal handlers: in_kernel() tells whether this thread runs a kernel, and abandon() leaves the kernel for good.
bool in_kernel();
void abandon();

}  // namespace moeccl::emulation

#define MOECCL_DEVICE inline
#define MOECCL_KERNEL(name, Args)                                                             \
  static void name##_body(const Args& a);                                                     \
  static const ::moeccl::emulation::Registration name##_registration(                         \
      #name, sizeof(Args), [](const void* p) { name##_body(*static_cast<const Args*>(p)); }); \
  static void name##_body(const Args& a)
// The fibers of a block share an OS thread.
#define MOECCL_SHARED static thread_local
#define MOECCL_UNROLL
#define MOECCL_UNROLL4

namespace moeccl::cuda {

struct alignas(16) Vec16 {
  uint32_t x, y, z, w;
};

inline uint32_t thread_index() { return emulation::place.thread; }
inline uint32_t block_threads() { return emulation::place.n_threads; }
inline uint32_t block_index() { return emulation::place.block; }
inline uint32_t grid_blocks() { return emulation::place.n_blocks; }
inline void block_sync(const std::source_location& at = std::source_location::current()) { emulation::block_sync(at); }
inline void warp_sync() { emulation::warp_sync(); }

template <class T>
T shuffle(T v, uint32_t lane) {
  uint64_t word = 0;
  std::memcpy(&word, &v, sizeof(v));
  word = emulation::exchange(word, lane);
  std::memcpy(&v, &word, sizeof(v));
  return v;
}
template <class T>
T shuffle_xor(T v, uint32_t mask) {
  return shuffle(v, (thread_index() % 32) ^ mask);
}
inline uint32_t ballot(bool v) { return emulation::vote(v); }
inline uint32_t match(uint32_t v) { return emulation::match(v); }
inline uint32_t leading_zeros(uint32_t v) { return static_cast<uint32_t>(__builtin_clz(v)); }
inline uint32_t count_bits(uint32_t v) { return static_cast<uint32_t>(__builtin_popcount(v)); }

inline const void* in_global(const void* p) { return p; }

inline uint32_t atomic_add(uint32_t* p, uint32_t v) {
  return std::atomic_ref(*p).fetch_add(v, std::memory_order_relaxed);
}
inline uint32_t atomic_or(uint32_t* p, uint32_t v) {
  return std::atomic_ref(*p).fetch_or(v, std::memory_order_relaxed);
}
inline uint32_t atomic_min(uint32_t* p, uint32_t v) {
  std::atomic_ref ref(*p);
  uint32_t old = ref.load(std::memory_order_relaxed);
  while (old > v && !ref.compare_exchange_weak(old, v, std::memory_order_relaxed)) {
  }
  return old;
}

inline uint64_t load_acquire_system(const uint64_t* p) {
  emulation::acquires.fetch_add(1, std::memory_order_relaxed);
  return std::atomic_ref(*const_cast<uint64_t*>(p)).load(std::memory_order_acquire);
}
inline void store_release_system(uint64_t* p, uint64_t v) {
  emulation::releases.fetch_add(1, std::memory_order_relaxed);
  std::atomic_ref(*p).store(v, std::memory_order_release);
}
inline uint64_t load_relaxed_system(const uint64_t* p) {
  return std::atomic_ref(*const_cast<uint64_t*>(p)).load(std::memory_order_relaxed);
}
inline void store_relaxed_system(uint64_t* p, uint64_t v) { std::atomic_ref(*p).store(v, std::memory_order_relaxed); }
inline uint32_t load_acquire_device(const uint32_t* p) {
  emulation::acquires.fetch_add(1, std::memory_order_relaxed);
  return std::atomic_ref(*const_cast<uint32_t*>(p)).load(std::memory_order_acquire);
}
inline uint32_t load_relaxed_device(const uint32_t* p) {
  return std::atomic_ref(*const_cast<uint32_t*>(p)).load(std::memory_order_relaxed);
}
inline void store_relaxed_device(uint32_t* p, uint32_t v) { std::atomic_ref(*p).store(v, std::memory_order_relaxed); }
inline uint32_t add_release_device(uint32_t* p, uint32_t v) {
  return std::atomic_ref(*p).fetch_add(v, std::memory_order_acq_rel);
}
inline void store_relaxed_block(uint32_t* p, uint32_t v) { std::atomic_ref(*p).store(v, std::memory_order_relaxed); }
inline uint64_t device_ns() { return emulation::now_ns(); }
inline void pause() { emulation::pause(); }

}  // namespace moeccl::cuda
