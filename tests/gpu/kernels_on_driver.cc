// SPDX-License-Identifier: Apache-2.0
// Runs the contract test of kernels/cuda on the driver, with the shapes and the host reference of unit_cuda_kernels.
// The tests pass kernels the addresses of vectors and of their own variables, so operator new takes memory from one
// page-locked block here, and the tests run on a stack inside it.
#include "tests/gpu/kernels_on_driver.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/cuda/image.h"
#include "src/driver/cuda.h"

namespace {

namespace cu = moeccl::driver::cuda;

// Hands out blocks of power-of-two sizes, each behind a header of one cache line, and reuses freed blocks.
class Arena {
 public:
  static constexpr size_t kBytes = size_t{256} << 20, kHeader = 64;
  void open(char* begin) { at_ = begin_ = begin; }
  bool is_open() const { return begin_ != nullptr; }
  bool has(const void* p) const { return is_open() && p >= begin_ && p < begin_ + kBytes; }
  void* take(size_t bytes) {
    const auto size = static_cast<size_t>(std::bit_width(bytes + kHeader - 1));
    const std::lock_guard lock(mutex_);
    char* block = free_[size];
    if (block != nullptr) {
      std::memcpy(&free_[size], block + kHeader, sizeof(char*));
    } else {
      if (at_ + (size_t{1} << size) > begin_ + kBytes) return nullptr;
      block = at_;
      at_ += std::max(size_t{1} << size, 2 * kHeader);
    }
    std::memcpy(block, &size, sizeof(size));
    return block + kHeader;
  }
  void give(void* p) {
    char* block = static_cast<char*>(p) - kHeader;
    size_t size = 0;
    std::memcpy(&size, block, sizeof(size));
    const std::lock_guard lock(mutex_);
    std::memcpy(block + kHeader, &free_[size], sizeof(char*));
    free_[size] = block;
  }

 private:
  char *begin_ = nullptr, *at_ = nullptr;
  std::mutex mutex_;
  std::array<char*, 64> free_{};
};
constinit Arena arena;

void* allocate(size_t bytes) {
  void* p = arena.is_open() ? arena.take(bytes) : std::malloc(bytes == 0 ? 1 : bytes);
  if (p != nullptr) return p;
  (void)!write(2, "the page-locked memory of this test is full\n", 44);
  std::abort();
}
void release(void* p) {
  if (arena.has(p))
    arena.give(p);
  else
    std::free(p);
}

[[noreturn]] void end(const std::string& why) {
  std::printf("on_driver: Failure\n%s\n", why.c_str());
  std::fflush(stdout);
  _exit(3);
}
void must(int result, const std::string& what) {
  const moeccl::Status status = cu::check(result, what);
  if (!status.ok()) end(status.message());
}

struct Machine {
  cu::Context context = nullptr;
  cu::Stream stream = nullptr;
  std::vector<cu::Module> modules;
  std::map<std::string, cu::Function> functions;
  size_t launches = 0;
};
Machine& machine() {
  static auto* m = new Machine;
  return *m;
}

void open_machine() {
  Machine& m = machine();
  const cu::Driver& d = *cu::driver();
  must(d.cuDevicePrimaryCtxRetain(&m.context, 0), "the device's context");
  must(d.cuCtxSetCurrent(m.context), "the device's context");
  must(d.cuStreamCreate(&m.stream, 1), "a stream");
  std::vector<moeccl::cuda::Image> images = moeccl::cuda::images();
  if (cu::emulated()) images = {{"emulated", nullptr, nullptr}};
  if (images.empty()) end("the library was built without nvcc");
  for (const auto& image : images) {
    m.modules.emplace_back();
    must(d.cuModuleLoadDataEx(&m.modules.back(), image.begin, 0, nullptr, nullptr), image.name);
  }
  void* memory = nullptr;
  must(d.cuMemHostAlloc(&memory, Arena::kBytes, 3), "page-locked memory");
  arena.open(static_cast<char*>(memory));
}

// Finds pointers to memory that the emulation can read but a device could not.
void check_pointers(const std::string& kernel, const void* args, size_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(args) + i, 8);
    if (word < page || arena.has(reinterpret_cast<const void*>(word))) continue;
    if (msync(reinterpret_cast<void*>(word / page * page), page, MS_ASYNC) == 0)
      end(moeccl::format("{}: byte {} of its arguments points to memory that is not page-locked", kernel, i));
  }
}

void* run_tests(void*) {
  must(cu::driver()->cuCtxSetCurrent(machine().context), "the device's context");
  const int failed = RUN_ALL_TESTS();
  std::printf("%zu launches\n", machine().launches);
  return reinterpret_cast<void*>(static_cast<intptr_t>(failed));
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, size_t) noexcept { release(p); }
void operator delete[](void* p, size_t) noexcept { release(p); }

namespace moeccl::on_driver {

void launch(const std::string& kernel, const void* args, size_t bytes, uint32_t blocks, uint32_t threads) {
  Machine& m = machine();
  cu::Function& f = m.functions[kernel];
  for (size_t i = 0; f == nullptr && i < m.modules.size(); ++i)
    if (cu::driver()->cuModuleGetFunction(&f, m.modules[i], kernel.c_str()) != 0) f = nullptr;
  if (f == nullptr) end(kernel + " is in no image");
  if (cu::emulated()) check_pointers(kernel, args, bytes);
  void* parameters[] = {const_cast<void*>(args)};
  must(cu::driver()->cuLaunchKernel(f, blocks, 1, 1, threads, 1, 1, 0, m.stream, parameters, nullptr), kernel);
  must(cu::driver()->cuStreamSynchronize(m.stream), kernel);
  ++m.launches;
}

}  // namespace moeccl::on_driver

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (cu::driver() == nullptr) {
    std::printf("no CUDA device: %s\n", cu::why_absent().c_str());
    return 77;
  }
  open_machine();
  constexpr size_t kStackBytes = size_t{8} << 20;
  char* const stack = static_cast<char*>(arena.take(kStackBytes + 4096));
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstack(&attributes, stack + (4096 - reinterpret_cast<uintptr_t>(stack) % 4096), kStackBytes);
  pthread_t thread{};
  void* failed = nullptr;
  if (pthread_create(&thread, &attributes, run_tests, nullptr) != 0)
    end("no thread with a stack of page-locked memory");
  pthread_join(thread, &failed);
  std::fflush(stdout);
  _exit(static_cast<int>(reinterpret_cast<intptr_t>(failed)));  // objects in the arena are never destroyed
}
