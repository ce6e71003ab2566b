// SPDX-License-Identifier: Apache-2.0
// A program's CUDA driver that lacks functions: its memory and streams are refused in words. Runs with the fake libcuda
// of tests/support/fake_hardware as MOECCL_CUDA_DRIVER.
#include <dlfcn.h>
#include <sys/mman.h>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

TEST(CudaOldDriver, IsNamedWhereItsMemoryOrAStreamIsGiven) {
  const char* const name = std::getenv("MOECCL_CUDA_DRIVER");
  void* const library = name == nullptr ? nullptr : dlopen(name, RTLD_NOW);
  auto* const give = library == nullptr
                         ? nullptr
                         : reinterpret_cast<void (*)(const void*, size_t)>(dlsym(library, "moeccl_fake_cuda_memory"));
  if (give == nullptr) GTEST_SKIP() << "needs the fake libcuda";
  constexpr size_t kBytes = 4096;
  // Ends the process when the host touches it, as memory of a device does.
  void* const memory = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  give(memory, kBytes);
  run_ranks(2, [&](int, moecclComm_t comm) {
    constexpr const char* kWhy = "the CUDA driver lacks cuGetErrorString: it is too old";
    EXPECT_EQ(moecclAllReduce(memory, memory, 16, moecclFloat32, moecclSum, comm, nullptr), moecclUnsupported);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find(kWhy), std::string::npos) << moecclGetLastError(comm);
    float x = 1;
    alignas(64) char stream[64] = {};
    EXPECT_EQ(moecclAllReduce(&x, &x, 1, moecclFloat32, moecclSum, comm, as_stream(stream)), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find(kWhy), std::string::npos) << moecclGetLastError(comm);
    MOECCL_EXPECT_OK(moecclAllReduce(&x, &x, 1, moecclFloat32, moecclSum, comm, nullptr));
    EXPECT_EQ(x, 2.0f);
  });
  give(nullptr, 0);
  munmap(memory, kBytes);
}

}  // namespace
}  // namespace moeccl::testing
