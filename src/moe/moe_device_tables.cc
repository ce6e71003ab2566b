// SPDX-License-Identifier: Apache-2.0
// The device's copies of a routing's lists: which layers have them, a layer's spare ones, and how an update fills them.
#include <algorithm>

#include "src/exec/cuda/persistent_kernel.h"
#include "src/moe/moe_layer.h"

namespace moeccl::comm {

namespace {

exec::PersistentKernel* kernel_of(const MoeLayer& layer) {
  exec::PersistentKernel* kernel = layer.host().kernel();
  if (kernel == nullptr || layer.config().shape.widest_row() > kernel->most_row_bytes()) return nullptr;
  const bool fits = std::all_of(layer.candidates().begin(), layer.candidates().end(),
                                [](const auto& candidate) { return candidate->kernel_rows > 0; });
  return fits ? kernel : nullptr;
}

}  // namespace

bool MoeLayer::has_tables() const { return kernel_of(*this) != nullptr; }

Result<std::unique_ptr<exec::RowTables>> MoeLayer::take_tables() {
  exec::PersistentKernel* kernel = kernel_of(*this);
  if (kernel == nullptr) return std::unique_ptr<exec::RowTables>();
  const std::lock_guard lock(tables_mutex_);
  if (free_tables_.empty()) return exec::RowTables::create(kernel->engine().context());
  std::unique_ptr<exec::RowTables> tables = std::move(free_tables_.back());
  free_tables_.pop_back();
  return tables;
}

void MoeLayer::give_back(std::unique_ptr<exec::RowTables> tables) {
  if (tables == nullptr) return;
  const std::lock_guard lock(tables_mutex_);
  free_tables_.push_back(std::move(tables));
}

std::unique_ptr<exec::CudaTables> MoeLayer::take_cuda_tables(size_t candidate) {
  const std::lock_guard lock(tables_mutex_);
  for (auto it = free_cuda_tables_.begin(); it != free_cuda_tables_.end(); ++it) {
    if ((*it)->candidate() != candidate) continue;
    std::unique_ptr<exec::CudaTables> tables = std::move(*it);
    free_cuda_tables_.erase(it);
    return tables;
  }
  free_cuda_tables_.clear();
  return nullptr;
}

void MoeLayer::give_back(std::unique_ptr<exec::CudaTables> tables) {
  if (tables == nullptr) return;
  tables->wait();  // its kernels write to the RowTables that are given back next
  const std::lock_guard lock(tables_mutex_);
  free_cuda_tables_.push_back(std::move(tables));
}

uint64_t MoeLayer::device_bytes(bool takes) {
  const std::lock_guard lock(tables_mutex_);
  uint64_t bytes = cuda_routing_ != nullptr ? cuda_routing_->memory_bytes() : 0;
  for (size_t i = 0; i + (takes ? 1 : 0) < free_tables_.size(); ++i) bytes += free_tables_[i]->memory_bytes();
  for (const auto& t : free_cuda_tables_) bytes += t->memory_bytes();
  return bytes;
}

// No rank launches before all ranks have their tables, because making room for them may wait for the device.
Status MoeRouting::bring_tables() {
  if (!layer_.has_tables()) return {};
  return all_ready(upload_tables(), "bring its routing to the device");
}

// All ranks leave with the same verdict.
Status MoeRouting::all_ready(const Status& own, const char* what) {
  struct Ready {
    int32_t code;
  };
  return answers_of(layer_.host(), Ready{own.code()}, own, format("could not {}", what)).status();
}

Status MoeRouting::upload_tables() {
  if (device_tables_ == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(device_tables_, layer_.take_tables());
  }
  const std::vector<std::byte> info = info_for_device();
  exec::RowListsOnHost lists;
  lists.n_chunks = tables_.n_chunks();
  lists.rows = tables_.dispatch_rows(true);
  lists.zeros = tables_.dispatch_sums();
  lists.sums = tables_.combine_sums(true);
  return device_tables_->upload(lists, info.data(), info.size());
}

}  // namespace moeccl::comm
