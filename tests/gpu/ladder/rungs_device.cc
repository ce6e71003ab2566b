// SPDX-License-Identifier: Apache-2.0
// What the device is, and whether the driver accepts the images.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "kernels/cuda/image.h"
#include "src/base/clock.h"
#include "tests/gpu/ladder/ladder.h"

namespace moeccl::ladder {
namespace {

// The driver's numbers of attributes.
struct Named {
  int number;
  const char* name;
};
constexpr Named kAttributes[] = {{16, "multiprocessors"},
                                 {75, "compute major"},
                                 {76, "compute minor"},
                                 {13, "clock kHz"},
                                 {36, "memory clock kHz"},
                                 {37, "memory bus bits"},
                                 {38, "L2 bytes"},
                                 {39, "threads on a multiprocessor"},
                                 {81, "shared bytes of a multiprocessor"},
                                 {97, "shared bytes of a block"},
                                 {40, "copy engines"},
                                 {31, "concurrent kernels"},
                                 {41, "unified addressing"},
                                 {83, "managed memory"},
                                 {91, "registered host memory at its own address"},
                                 {122, "64-bit stream memory operations"},
                                 {78, "stream priorities"},
                                 {102, "virtual memory"},
                                 {103, "file descriptors"},
                                 {115, "memory pools"},
                                 {116, "GPUDirect RDMA"},
                                 {124, "dma-buf"},
                                 {128, "fabric handles"},
                                 {132, "multicast"},
                                 {133, "MPS"},
                                 {20, "compute mode"}};
// The attributes that the library cannot do without.
constexpr int kNeeded[] = {31, 41, 122};

// Driver calls that list the functions of a module and describe them. Old drivers lack the first three.
using Enumerate = int(cu::Function*, unsigned, cu::Module);
using CountOf = int(unsigned*, cu::Module);
using NameOf = int(const char**, cu::Function);
using AttributeOf = int(int*, int, cu::Function);
using Occupancy = int(int*, cu::Function, int, size_t);

std::vector<moeccl::cuda::Image> images() {
  if (cu::emulated()) return {{"emulated", nullptr, nullptr}};
  return moeccl::cuda::images();
}

}  // namespace

Result<std::string> attributes() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  char name[128] = {};
  int version = 0;
  MOECCL_TRY(cu::check(device.d().cuDeviceGetName(name, sizeof(name), 0), "the device's name"));
  MOECCL_TRY(cu::check(device.d().cuDriverGetVersion(&version), "the driver's version"));
  for (const Named& a : kAttributes) std::fprintf(stderr, "%-42s %d\n", a.name, device.attribute(a.number));
  for (const int number : kNeeded) {
    const auto* const a = std::find_if(std::begin(kAttributes), std::end(kAttributes),
                                       [&](const Named& n) { return n.number == number; });
    if (device.attribute(number) == 0) return error(moecclUnsupported, "{}: no {}", name, a->name);
  }
  return format("{}, sm_{}{}, {} SMs, driver of CUDA {}.{}, descriptors {}, MPS {}, multicast {}", name,
                device.attribute(75), device.attribute(76), device.attribute(16), version / 1000, version % 1000 / 10,
                device.attribute(103), device.attribute(133), device.attribute(132));
}

Result<std::string> load_images() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  auto* const load = symbol<int(cu::Module*, const void*, unsigned, int*, void**)>("cuModuleLoadDataEx");
  if (load == nullptr) return error(moecclUnsupported, "the driver has no cuModuleLoadDataEx");
  if (images().empty()) return error(moecclUnsupported, "the library was built without nvcc");
  std::string failed, slowest;
  int64_t most = 0;
  size_t bytes = 0;
  for (const auto& image : images()) {
    constexpr int kInfoLog = 3, kInfoBytes = 4, kErrorLog = 5, kErrorBytes = 6, kVerbose = 12;
    static char info[16384], errors[16384];
    info[0] = errors[0] = 0;
    int options[] = {kInfoLog, kInfoBytes, kErrorLog, kErrorBytes, kVerbose};
    void* values[] = {info, reinterpret_cast<void*>(sizeof(info)), errors, reinterpret_cast<void*>(sizeof(errors)),
                      reinterpret_cast<void*>(1)};
    const int64_t since = now_ns();
    cu::Module module = nullptr;
    const Status loaded = cu::check(load(&module, image.begin, 5, options, values), image.name);
    const int64_t took = now_ns() - since;
    std::fprintf(stderr, "%s: %s, %.1f ms\n%s%s\n", image.name, loaded.ok() ? "loaded" : loaded.message().c_str(),
                 milliseconds_of(took), info, errors);
    bytes += static_cast<size_t>(image.end - image.begin);
    if (took > most) most = took, slowest = image.name;
    if (loaded.ok()) {
      (void)device.d().cuModuleUnload(module);
    } else if (failed.empty()) {
      failed = format("{}; {}", loaded.message(), std::string(errors).substr(0, std::strcspn(errors, "\n")));
    }
  }
  if (!failed.empty()) return error(moecclSystemError, "{}", failed);
  return format("{} images, {} KiB, the slowest ({}) takes {:.1f} ms", images().size(), bytes >> 10, slowest,
                milliseconds_of(most));
}

Result<std::string> function_needs() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  auto* const count = symbol<CountOf>("cuModuleGetFunctionCount");
  auto* const enumerate = symbol<Enumerate>("cuModuleEnumerateFunctions");
  auto* const name_of = symbol<NameOf>("cuFuncGetName");
  auto* const attribute = symbol<AttributeOf>("cuFuncGetAttribute");
  auto* const occupancy = symbol<Occupancy>("cuOccupancyMaxActiveBlocksPerMultiprocessor");
  if (attribute == nullptr || occupancy == nullptr)
    return error(moecclUnsupported, "the driver has no cuFuncGetAttribute");
  if (count == nullptr || enumerate == nullptr || name_of == nullptr)
    return std::string("not run: this driver does not list functions (CUDA 12.4 does)");
  size_t n = 0, local = 0, fewest = 99;
  int most = 0;
  std::string greedy, lonely, spilling;
  std::fprintf(stderr, "%-32s %9s %11s %12s %s\n", "function", "registers", "local bytes", "shared bytes", "blocks");
  for (const auto& image : images()) {
    cu::Module module = nullptr;
    MOECCL_TRY(cu::check(device.d().cuModuleLoadDataEx(&module, image.begin, 0, nullptr, nullptr), image.name));
    unsigned here = 0;
    MOECCL_TRY(cu::check(count(&here, module), "the functions of an image"));
    std::vector<cu::Function> all(here);
    MOECCL_TRY(cu::check(enumerate(all.data(), here, module), "the functions of an image"));
    for (const cu::Function f : all) {
      constexpr int kShared = 1, kLocal = 3, kRegisters = 4, kThreads = 256;
      const char* name = "?";
      int shared = 0, bytes = 0, registers = 0, blocks = 0;
      MOECCL_TRY(cu::check(name_of(&name, f), "a function's name"));
      if (std::strncmp(name, "moeccl_", 7) != 0) continue;  // skips kernels of the emulation's own tests
      MOECCL_TRY(cu::check(attribute(&shared, kShared, f), name));
      MOECCL_TRY(cu::check(attribute(&bytes, kLocal, f), name));
      MOECCL_TRY(cu::check(attribute(&registers, kRegisters, f), name));
      MOECCL_TRY(cu::check(occupancy(&blocks, f, kThreads, 0), name));
      std::fprintf(stderr, "%-32s %9d %11d %12d %d\n", name, registers, bytes, shared, blocks);
      ++n;
      if (registers > most) most = registers, greedy = name;
      if (static_cast<size_t>(blocks) < fewest) fewest = static_cast<size_t>(blocks), lonely = name;
      if (static_cast<size_t>(bytes) > local) local = static_cast<size_t>(bytes), spilling = name;
    }
    (void)device.d().cuModuleUnload(module);
  }
  // The engines start two blocks per multiprocessor, as the kernels' launch bounds promise.
  if (fewest < 2) return error(moecclInternalError, "{}: {} blocks fit a multiprocessor, not 2", lonely, fewest);
  std::string line =
      format("{} functions, at most {} registers ({}), at least {} blocks of 256", n, most, greedy, fewest);
  if (local > 0) line += format(", {} bytes of local memory ({})", local, spilling);
  return line;
}

}  // namespace moeccl::ladder
