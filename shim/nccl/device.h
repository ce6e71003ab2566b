// SPDX-License-Identifier: Apache-2.0
// The little that the shim must know of CUDA: whether there are devices, which one is current, what a pointer names.
// Through the driver library, if it is there; the shim needs no CUDA to build or run.
#pragma once

#include <cstddef>

namespace moeccl::shim::device {

// Whether CUDA's driver is here and has a device for this process. The first call may initialise the driver.
bool present();
// The ordinal of the calling thread's current device; 0, the CUDA runtime's default, when none was chosen; -1 without
// CUDA.
int current();
// Makes the device current for the calling thread while this lives. The device that was current before comes back; a
// thread that had none keeps this one, as after a call of the CUDA runtime. Ordinal < 0 is nothing to do.
class Current {
 public:
  explicit Current(int ordinal);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  bool ok() const { return ok_; }

 private:
  void* before_ = nullptr;
  bool ok_ = true;
};
// Whether it is memory of a device, managed memory too.
bool names(const void* pointer);
// Whether the host cannot read `pointer`: memory of a device that is not managed.
bool owns(const void* pointer);
// Copies bytes of device memory to the host, after what is on the stream before. False on failure.
bool read(void* to, const void* from, size_t bytes, void* stream);

// The same the other way, at once.
bool write(void* to, const void* from, size_t bytes);
// Waits for what is on a stream of CUDA's. False without CUDA, and for what is no such stream.
bool synchronize(void* stream);
// Records a CUDA event on the stream. False without CUDA.
bool record(void* event, void* stream);

// Memory of the current device, which becomes so if none was; null when there is none left. Given back by release().
void* allocate(size_t bytes);
bool release(void* pointer);

// A word of memory and a stream of the current device, which is current for the calling thread while this lives.
class Probe {
 public:
  Probe();
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;
  bool ok() const { return stream_ != nullptr; }
  void* word() const { return word_; }  // 8 bytes
  void* stream() const { return stream_; }
  bool synchronize() const;

 private:
  void* context_before_ = nullptr;
  void* word_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace moeccl::shim::device
