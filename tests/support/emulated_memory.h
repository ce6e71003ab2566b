// SPDX-License-Identifier: Apache-2.0
// Memory of the emulated CUDA device that the test can read as well: its file is mapped a second time.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "src/driver/cuda.h"

namespace moeccl::tests {

class EmulatedMemory {
 public:
  EmulatedMemory() = default;
  EmulatedMemory(driver::cuda::Context context, size_t bytes) {
    auto made = driver::cuda::Memory::device(context, bytes);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (!made.ok()) return;
    memory_ = std::move(*made);
    void* const library = dlopen(std::getenv("MOECCL_CUDA_DRIVER"), RTLD_NOW | RTLD_NOLOAD);
    auto* const file = reinterpret_cast<int (*)(uint64_t, size_t)>(dlsym(library, "moeccl_emulated_file"));
    const int fd = file(reinterpret_cast<uint64_t>(memory_.data()), bytes);
    void* const seen = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    EXPECT_NE(seen, MAP_FAILED);
    seen_ = static_cast<std::byte*>(seen);
    close(fd);
    dlclose(library);
  }
  EmulatedMemory(EmulatedMemory&& other) noexcept { *this = std::move(other); }
  EmulatedMemory& operator=(EmulatedMemory&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(seen_, other.seen_);
    return *this;
  }
  ~EmulatedMemory() {
    if (seen_ != nullptr) munmap(seen_, memory_.bytes());
  }
  std::byte* device() const { return memory_.data(); }
  std::byte* seen() const { return seen_; }

 private:
  driver::cuda::Memory memory_;
  std::byte* seen_ = nullptr;
};

}  // namespace moeccl::tests
