// SPDX-License-Identifier: Apache-2.0
// The device as all rungs use it.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "kernels/cuda/image.h"
#include "src/base/clock.h"
#include "tests/gpu/ladder/ladder.h"

namespace moeccl::driver::cuda {
void* driver_symbol(const char* name);
}

namespace moeccl::ladder {

void* find_symbol(const char* name) { return cu::driver_symbol(name); }

Result<Device> Device::open() {
  if (cu::driver() == nullptr) return error(moecclUnsupported, "{}", cu::why_absent());
  Device device;
  int first = 0;
  MOECCL_TRY(cu::check(cu::driver()->cuDeviceGet(&first, 0), "the first device"));
  MOECCL_TRY(cu::check(cu::driver()->cuDevicePrimaryCtxRetain(&device.context_, first), "the first device's context"));
  MOECCL_TRY(cu::check(cu::driver()->cuCtxSetCurrent(device.context_), "the first device's context"));
  return device;
}

int Device::attribute(int number) const {
  int value = 0;
  return d().cuDeviceGetAttribute(&value, number, 0) == 0 ? value : 0;
}

Result<cu::Function> Device::kernel(const char* name) const {
  if (module_ == nullptr) {
    std::vector<moeccl::cuda::Image> images = moeccl::cuda::ladder_images();
    if (cu::emulated()) images = {{"emulated", nullptr, nullptr}};
    if (images.empty()) return error(moecclUnsupported, "gpu_ladder was built without nvcc");
    MOECCL_TRY(cu::check(cu::driver()->cuModuleLoadDataEx(&module_, images[0].begin, 0, nullptr, nullptr),
                         "the ladder's own image"));
  }
  cu::Function f = nullptr;
  MOECCL_TRY(cu::check(d().cuModuleGetFunction(&f, module_, name), name));
  return f;
}

Result<cu::Stream> Device::stream() const {
  constexpr unsigned kNonBlocking = 1;
  cu::Stream s = nullptr;
  MOECCL_TRY(cu::check(d().cuStreamCreate(&s, kNonBlocking), "a stream"));
  return s;
}

Status Device::launch_bytes(cu::Function f, cu::Stream s, const void* args, unsigned blocks, unsigned threads) const {
  void* parameters[] = {const_cast<void*>(args)};
  return cu::check(d().cuLaunchKernel(f, blocks, 1, 1, threads, 1, 1, 0, s, parameters, nullptr), "a launch");
}

uint64_t read_word(const uint64_t* word) {
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}
void write_word(uint64_t* word, uint64_t value) { std::atomic_ref(*word).store(value, std::memory_order_release); }

int patience() {
  const char* text = std::getenv("MOECCL_TEST_PATIENCE");
  return std::max(1, text == nullptr ? 1 : std::atoi(text));
}

bool ends_within(const Device& device, cu::Stream stream, int milliseconds) {
  const int64_t until = now_ns() + int64_t{milliseconds} * 1'000'000;
  while (device.d().cuStreamQuery(stream) == cu::kNotReady) {
    if (now_ns() > until) return false;
    usleep(20);
  }
  return true;
}

double milliseconds_of(int64_t ns) { return static_cast<double>(ns) / 1e6; }

}  // namespace moeccl::ladder
