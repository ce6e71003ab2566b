// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/device_regions.h"

#include <algorithm>

#include "src/driver/memory.h"
#include "transport/verbs/peer_memory.h"

namespace moeccl::transport::verbs {

using namespace driver::ibv_abi;

namespace {

constexpr uint32_t kFlushBytes = sizeof(uint64_t);

}  // namespace

Status DeviceRegions::add(std::span<std::byte> range, unsigned access, std::vector<std::unique_ptr<Region>>* out) {
  const size_t page = driver::page_bytes();
  const size_t bytes = (range.size() + page - 1) / page * page;
  if (reinterpret_cast<uintptr_t>(range.data()) % page != 0)
    return error(moecclUnsupported, "{} bytes of device memory do not begin a page", range.size());
  if (bytes > kMaxDevicePieces * kDevicePiece)
    return error(moecclUnsupported, "{} bytes are more than is registered: make MOECCL_STAGING_BYTES smaller", bytes);
  for (size_t at = 0; at < bytes; at += kDevicePiece) {
    const size_t n = std::min<size_t>(kDevicePiece, bytes - at);
    Fd fd;
    if (dmabuf_) {
      MOECCL_ASSIGN_OR_RETURN(fd, driver::cuda::dmabuf_of(range.data() + at, n));
    }
    // A region keeps its dma-buf, so the descriptor is not needed any more.
    MOECCL_ASSIGN_OR_RETURN(auto region, Region::make(rails_, range.data() + at, n, access, fd.get()));
    out->push_back(std::move(region));
  }
  return {};
}

Result<std::unique_ptr<DeviceRegions>> DeviceRegions::make(std::span<const std::unique_ptr<Rail>> rails,
                                                           const DeviceMemory& memory) {
  const driver::cuda::Current current(memory.context);
  const driver::cuda::RdmaAbility able = driver::cuda::rdma_ability();
  if (!able.supported) return error(moecclUnsupported, "this GPU is not reached by NICs (no GPUDirect RDMA)");
  Status why = able.dmabuf ? Status() : error(moecclUnsupported, "the CUDA driver gives no dma-buf");
  for (const auto& rail : rails)
    if (why.ok()) why = takes_dmabuf(rail->api(), rail->pd()).with_context(rail->info().name());
  std::string reasons;
  for (const bool dmabuf : {true, false}) {
    std::unique_ptr<DeviceRegions> made(new DeviceRegions(rails, memory));
    made->writes_ = able.writes;
    made->dmabuf_ = dmabuf;
    Status status = dmabuf ? std::move(why) : Status();
    constexpr unsigned kLanding = kLocalWrite | kRemoteWrite | kRemoteRead | kRelaxedOrdering;
    if (status.ok()) status = made->add(memory.landing, kLanding, &made->landing_);
    if (status.ok()) status = made->add(memory.source, kLocalWrite, &made->source_);
    if (status.ok()) return made;
    reasons += format("{}no {}: {}", reasons.empty() ? "" : "; ", made->way(), status.message());
  }
  return error(moecclUnsupported, "{} (modprobe nvidia_peermem)", reasons);
}

std::vector<uint32_t> DeviceRegions::landing_keys(size_t rail) const {
  std::vector<uint32_t> keys;
  for (const auto& region : landing_) keys.push_back(region->rkey(rail));
  return keys;
}

const Region* DeviceRegions::source(const void* p, size_t* bytes) const {
  const auto* const at = static_cast<const std::byte*>(p);
  for (const auto& region : source_) {
    if (!region->holds(at, 1)) continue;
    *bytes = std::min(*bytes, static_cast<size_t>(region->base() + region->bytes() - at));
    return region.get();
  }
  return nullptr;
}

Status DeviceRegions::connect_flush(const Env& settings, uint8_t timeout_code, uint32_t first_id) {
  if (writes_ != driver::cuda::RemoteWrites::kRead) return {};
  first_id_ = first_id;
  MOECCL_ASSIGN_OR_RETURN(word_region_,
                          Region::make(rails_, reinterpret_cast<std::byte*>(&word_), sizeof(word_), kLocalWrite));
  for (const auto& rail : rails_) {
    const auto id = first_id + static_cast<uint32_t>(flush_.size());
    MOECCL_ASSIGN_OR_RETURN(auto pair, QueuePair::make(*rail, {kFlushDepth, 0, id}));
    MOECCL_TRY(pair->connect(settings, {pair->address(), rail->info(), timeout_code})
                   .with_context("a queue pair with itself, for flushes"));
    flush_.push_back(std::move(pair));
  }
  return {};
}

Status DeviceRegions::begin_flush() {
  MOECCL_TRY(Status(failure_));
  if (writes_ == driver::cuda::RemoteWrites::kCall) {
    const driver::cuda::Current current(memory_.context);
    return driver::cuda::flush_remote_writes();
  }
  for (size_t i = 0; i < flush_.size(); ++i) {
    flush_[i]->read({landing(), landing_[0]->rkey(i)}, &word_, word_region_->lkey(i), kFlushBytes);
    MOECCL_TRY(flush_[i]->flush());
    ++missing_;
  }
  return {};
}

void DeviceRegions::completed(const Completion& c) {
  const uint32_t id = QueuePair::id_of(c.wr_id);
  if (id < first_id_ || id - first_id_ >= flush_.size() || missing_ == 0) return;
  QueuePair& pair = *flush_[id - first_id_];
  --missing_;
  pair.done(c.wr_id);
  if (c.status == kSuccess || !failure_.ok()) return;
  failure_ = error(moecclSystemError, "{} does not read from this GPU's memory: {} (status {}, vendor {})",
                   pair.rail().info().name(), pair.rail().api().wc_status_str(c.status), c.status, c.vendor_err);
}

Status DeviceRegions::end_flush() {
  if (failure_.ok() && missing_ > 0)
    failure_ =
        error(moecclSystemError, "{} has not read from this GPU's memory in time", rails_.front()->info().name());
  return failure_;
}

}  // namespace moeccl::transport::verbs
