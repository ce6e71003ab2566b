// SPDX-License-Identifier: Apache-2.0
// What a kernel may use of the machine: threads, barriers, shuffles, atomics, flags. Kernels use only these names, so
// the same sources run on a GPU (nvcc) and, under the launch emulation of tests/support/cuda_emulation, on a CPU.
//
// The order between ranks follows the PTX memory model. Each release names its acquire:
//   store_release_system() -> load_acquire_system(): flags between ranks, on one device or several, and the host.
//   add_release_device()   -> load_acquire_device(): between the blocks of one kernel.
// Both are cumulative: what other threads of the block wrote before block_sync() is ordered with the thread that
// releases.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)

#define MOECCL_DEVICE __device__ __forceinline__
// A kernel takes one packed struct, which host and device share. A block has at most 256 threads, which alone would
// allow 256 registers; the second argument asks for at least two blocks on a multiprocessor.
#define MOECCL_KERNEL(name, Args) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ Args a)
#define MOECCL_SHARED __shared__
#define MOECCL_UNROLL _Pragma("unroll")
#define MOECCL_UNROLL4 _Pragma("unroll 4")

namespace moeccl::cuda {

using Vec16 = uint4;

MOECCL_DEVICE uint32_t thread_index() { return threadIdx.x; }
MOECCL_DEVICE uint32_t block_threads() { return blockDim.x; }
MOECCL_DEVICE uint32_t block_index() { return blockIdx.x; }
MOECCL_DEVICE uint32_t grid_blocks() { return gridDim.x; }
MOECCL_DEVICE void block_sync() { __syncthreads(); }
MOECCL_DEVICE void warp_sync() { __syncwarp(); }

// All 32 lanes take part.
template <class T>
MOECCL_DEVICE T shuffle(T v, uint32_t lane) {
  return __shfl_sync(0xffffffffu, v, static_cast<int>(lane));
}
template <class T>
MOECCL_DEVICE T shuffle_xor(T v, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, v, static_cast<int>(mask));
}
MOECCL_DEVICE uint32_t ballot(bool v) { return __ballot_sync(0xffffffffu, v); }
// Returns the lanes that pass the same value.
MOECCL_DEVICE uint32_t match(uint32_t v) { return __match_any_sync(0xffffffffu, v); }
MOECCL_DEVICE uint32_t count_bits(uint32_t v) { return static_cast<uint32_t>(__popc(v)); }
MOECCL_DEVICE uint32_t leading_zeros(uint32_t v) { return static_cast<uint32_t>(__clz(static_cast<int>(v))); }  // v > 0

// Returns an address of global memory. The compiler cannot see this of a pointer that a kernel reads from a list, and
// would use generic loads.
MOECCL_DEVICE const void* in_global(const void* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

MOECCL_DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
MOECCL_DEVICE uint32_t atomic_or(uint32_t* p, uint32_t v) { return atomicOr(p, v); }
MOECCL_DEVICE uint32_t atomic_min(uint32_t* p, uint32_t v) { return atomicMin(p, v); }

MOECCL_DEVICE uint64_t load_acquire_system(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MOECCL_DEVICE void store_release_system(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MOECCL_DEVICE uint64_t load_relaxed_system(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MOECCL_DEVICE void store_relaxed_system(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MOECCL_DEVICE uint32_t load_acquire_device(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MOECCL_DEVICE uint32_t load_relaxed_device(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MOECCL_DEVICE void store_relaxed_device(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MOECCL_DEVICE uint32_t add_release_device(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
// Stores to a word of the block that several threads may store to before the next barrier.
MOECCL_DEVICE void store_relaxed_block(uint32_t* p, uint32_t v) { *static_cast<volatile uint32_t*>(p) = v; }

// Returns the nanoseconds of a clock that all SMs share.
MOECCL_DEVICE uint64_t device_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// Called in every loop that waits for another thread, rank or host.
MOECCL_DEVICE void pause() {
#if __CUDA_ARCH__ >= 700
  __nanosleep(20);
#endif
}

}  // namespace moeccl::cuda

#else

// A name instead of a path: tests/support/cuda_emulation passes it on the compiler's command line.
#include MOECCL_CUDA_EMULATION

#endif

namespace moeccl::cuda {

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kBlockThreads = 256;

// The threads that share a piece of work: a whole launch, or the blocks of one lane. Always whole warps.
struct Team {
  size_t thread, n_threads;
  MOECCL_DEVICE size_t warp() const { return thread / kWarp; }
  MOECCL_DEVICE size_t n_warps() const { return n_threads / kWarp; }
  MOECCL_DEVICE uint32_t lane() const { return static_cast<uint32_t>(thread % kWarp); }
};
MOECCL_DEVICE Team whole_grid() {
  return {static_cast<size_t>(block_index()) * block_threads() + thread_index(),
          static_cast<size_t>(grid_blocks()) * block_threads()};
}

}  // namespace moeccl::cuda
