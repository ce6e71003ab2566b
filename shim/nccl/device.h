// SPDX-License-Identifier: Apache-2.0
// The little that the shim must know about CUDA: whether there are devices, which one is current, and what a pointer
// names. It asks the driver library, if that is there; the shim needs no CUDA to build or run.
#pragma once

#include <cstddef>

namespace moeccl::shim::device {

// Returns whether CUDA's driver is here and has a device for this process. The first call may initialise the driver.
bool present();
// Returns how many devices there are, 0 without CUDA.
int count();
// Returns whether the program has initialised the driver. Initialises nothing itself.
bool in_use();
// Returns the ordinal of the calling thread's current device; 0, the CUDA runtime's default, when none was chosen; -1
// without CUDA.
int current();
// Makes the device current for the calling thread during the object's lifetime, and the previous one current again
// afterwards. A thread that had none keeps this one, as after a call of the CUDA runtime. A negative ordinal does
// nothing.
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
// Returns whether `pointer` is device memory, including managed memory.
bool names(const void* pointer);
// Returns whether the driver knows `pointer`: as names(), or page-locked host memory.
bool knows(const void* pointer);
// Returns whether the host cannot read `pointer`: device memory that is not managed.
bool owns(const void* pointer);
// Returns whether a handle may be a CUDA stream: a pointer to something aligned, or one of the driver's names for
// default streams. The driver reads what a handle points to, so it must never get one of MoECCL's, which are numbers
// that end in 0xC2.
bool may_be_stream(const void* stream);
// Copies device memory to the host, after the work that is on the stream already. Returns false on failure.
bool read(void* to, const void* from, size_t bytes, void* stream);

// Copies and fills in the order of the stream return false on failure. put() copies host memory, which may change as
// soon as it returns.
bool put(void* to, const void* from, size_t bytes, void* stream);
bool copy(void* to, const void* from, size_t bytes, void* stream);
bool fill(void* to, unsigned char value, size_t bytes, void* stream);
// Returns whether the stream is being captured into a graph.
bool captures(void* stream);
// Waits for the work on a CUDA stream. Returns false without CUDA, and for anything but such a stream.
bool synchronize(void* stream);
// Records a CUDA event on the stream. Returns false without CUDA, and for anything but a CUDA stream.
bool record(void* event, void* stream);

// A mark in the work of streams. It needs neither the streams that it was recorded on nor a current device later.
class Event {
 public:
  Event() = default;
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  // Marks the work that is on the stream now, in the current device. A stream that is being captured, or is none of
  // CUDA's, leaves the mark where it was.
  void record(void* stream);
  // Waits for the marked work.
  void wait() const;

 private:
  void* event_ = nullptr;
};

// Returns memory of the current device, making one current if none was; null when none is left. release() frees it.
void* allocate(size_t bytes);
bool release(void* pointer);
// The same in the order of a stream, from the device's pool, which waits for no kernel.
void* allocate_on(size_t bytes, void* stream);
bool release_on(void* pointer, void* stream);

// A word of memory and a stream of the current device, which is current for the calling thread during the object's
// lifetime.
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
