// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/tables/row_tables.h"

#include <cstring>

#include "src/exec/cuda/urgent_stream.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;
using moeccl::cuda::WalkTables;

namespace {

constexpr size_t aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

Result<std::unique_ptr<RowTables>> RowTables::create(cuda::Context context) {
  std::unique_ptr<RowTables> t(new RowTables);
  t->context_ = context;
  const cuda::Current current(context);
  MOECCL_ASSIGN_OR_RETURN(t->stream_, create_urgent_stream(context));
  return t;
}

// Lists grow by half, so that repeated updates of a routing stop allocating at some point.
Status RowTables::reserve(size_t bytes, size_t info_bytes) {
  if (head_.data() == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(head_, cuda::Memory::device(context_, kInfoAt + info_bytes));
  }
  if (lists_.bytes() < bytes) {
    lists_ = {};
    MOECCL_ASSIGN_OR_RETURN(lists_, cuda::Memory::device(context_, bytes + bytes / 2));
  }
  const size_t staged = kInfoAt + aligned(info_bytes) + lists_.bytes();
  if (staged_.bytes() < staged) {
    staged_ = {};
    MOECCL_ASSIGN_OR_RETURN(staged_, cuda::Memory::pinned(context_, staged));
  }
  return {};
}

Status RowTables::put(std::byte* to, size_t offset, size_t bytes) {
  if (bytes == 0) return {};
  return cuda::copy(to, staged_.data() + offset, bytes, stream_.get(), "row lists to the device");
}

Status RowTables::upload(const RowListsOnHost& lists, const void* info, size_t info_bytes) {
  const cuda::Current current(context_);
  const auto bring = [&]() -> Status {
    const size_t bytes = RowImage::bytes(lists), lists_at = kInfoAt + aligned(info_bytes);
    MOECCL_TRY(reserve(bytes, info_bytes));
    const WalkTables head = RowImage::write(lists, staged_.data() + lists_at, lists_.data());
    std::memcpy(staged_.data(), &head, sizeof(head));
    if (info_bytes > 0) std::memcpy(staged_.data() + kInfoAt, info, info_bytes);
    MOECCL_TRY(put(lists_.data(), lists_at, bytes));
    MOECCL_TRY(put(head_.data(), 0, kInfoAt + info_bytes));
    return cuda::synchronize(stream_.get(), "row lists to the device");
  };
  Status status = bring();
  if (!status.ok()) (void)clear();
  return status;
}

Status RowTables::clear() {
  if (head_.data() == nullptr) return {};
  const cuda::Current current(context_);
  MOECCL_TRY(cuda::fill(head_.data(), 0, sizeof(WalkTables), stream_.get(), "emptying row lists"));
  return cuda::synchronize(stream_.get(), "emptying row lists");
}

}  // namespace moeccl::exec
