// What the files of the emulated driver share: its results, and the memory that it has given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace moeccl::emulation::driver {

inline constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500, kNotReady = 600,
                     kAlreadyRegistered = 712, kNotRegistered = 713, kInvalidContext = 201;

struct Allocation {
  size_t bytes = 0;
  int fd = -1;
  int opened = 0;  // by handle, how often; 0: our own
  int source_pid = 0, source_fd = -1;
  bool mapped = false;     // by cuMemMap
  bool accessible = true;  // cuMemSetAccess was called
};
struct Machine {
  std::mutex mutex;
  std::map<uint64_t, Allocation> device;
  std::map<uint64_t, size_t> pinned;
  int users = 0;  // streams at work: device memory is accessible
  bool open = false;
  unsigned rests = 0;  // times that no stream was at work
};
Machine& machine();

// Maps what `fd` holds, as memory of the device; accessible while a stream works.
int map_device(int fd, size_t bytes, uint64_t* out, const Allocation& as);

}  // namespace moeccl::emulation::driver
