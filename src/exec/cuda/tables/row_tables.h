// SPDX-License-Identifier: Apache-2.0
// A routing's row lists in device memory for the persistent kernel, brought there once for each routing. Their head
// keeps its address as long as this object exists, so that a launch in a CUDA graph finds the lists of the last update.
#pragma once

#include <memory>

#include "src/driver/cuda/streams.h"
#include "src/exec/cuda/tables/row_image.h"

namespace moeccl::exec {

class RowTables {
 public:
  static Result<std::unique_ptr<RowTables>> create(driver::cuda::Context context);

  // Waits until the lists are there. `info`: [info_bytes] that are put at device_info(), always the same number. No
  // launch may use the tables meanwhile. If the upload fails, the tables are empty.
  Status upload(const RowListsOnHost& lists, const void* info, size_t info_bytes);
  // Empties the tables after an update that failed. Launches fail from then on.
  Status clear();

  const moeccl::cuda::WalkTables* device() const {
    return reinterpret_cast<const moeccl::cuda::WalkTables*>(head_.data());
  }
  const std::byte* device_info() const { return head_.data() + kInfoAt; }
  // Returns the most memory that lists of this many bytes take, including the growth of the buffers.
  static uint64_t bytes_bound(uint64_t list_bytes) { return 3 * list_bytes + (uint64_t{1} << 16); }
  size_t memory_bytes() const { return head_.bytes() + lists_.bytes() + staged_.bytes(); }

 private:
  static constexpr size_t kInfoAt = 256;
  RowTables() = default;
  Status reserve(size_t bytes, size_t info_bytes);
  Status put(std::byte* to, size_t offset, size_t bytes);

  driver::cuda::Context context_ = nullptr;
  driver::cuda::Memory head_;            // WalkTables, then the bytes of device_info()
  driver::cuda::Memory lists_, staged_;  // these grow; staged_ is page-locked and is copied to lists_ and head_
  driver::cuda::StreamOwner stream_;     // last, because its end waits for copies
};

}  // namespace moeccl::exec
