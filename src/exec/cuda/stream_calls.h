// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "src/driver/cuda/streams.h"

namespace moeccl::exec {

// The library's own work on a stream, of which the first failure counts. The work must not outlive the memory that it
// uses, so an object that owns both declares this member after the memory.
class StreamCalls {
 public:
  StreamCalls() = default;
  StreamCalls(driver::cuda::StreamOwner stream) : stream_(std::move(stream)) {}

  driver::cuda::Stream stream() const { return stream_.get(); }
  const Status& status() const { return status_; }
  void note(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  void copy(void* to, const void* from, size_t bytes, const std::string& what) {
    note(driver::cuda::copy(to, from, bytes, stream(), what));
  }
  void fill(void* at, unsigned char value, size_t bytes, const std::string& what) {
    note(driver::cuda::fill(at, value, bytes, stream(), what));
  }
  void synchronize(const std::string& what) { note(driver::cuda::synchronize(stream(), what)); }
  // Waits, and returns the first failure since the last finish().
  Status finish(const std::string& what) {
    synchronize(what);
    return std::exchange(status_, Status());
  }

 private:
  driver::cuda::StreamOwner stream_;
  Status status_;
};

}  // namespace moeccl::exec
