// SPDX-License-Identifier: Apache-2.0
#include "src/world/gpu_introduction.h"

#include "src/base/wire.h"

namespace moeccl::comm {
namespace {

constexpr size_t kMaxPci = 31;

void staging_fields(auto& io, auto& s) {
  io.template as<uint8_t>(s.way);
  io(s.device);
  io(s.address);
  io(s.mapped);
  io(s.slot);
  if (s.way == StagingOffer::kByHandle) io.object(s.handle);
  io.must(s.way <= StagingOffer::kByDescriptor);
}

}  // namespace

void GpuAnswer::fields(auto& io, auto& self) {
  io(self.able);
  io(self.reaches);
  io(self.kernel_staging);
  io.text(self.why, kMaxWhy);
}

void GpuIntroduction::fields(auto& io, auto& self) {
  io(self.asked);
  if (!self.asked) return;
  io(self.mps);
  staging_fields(io, self.staging);
  io.object(self.uuid);
  io.text(self.pci, kMaxPci);
  GpuAnswer::fields(io, self.answer);
}

std::vector<std::byte> GpuAnswer::encode() const { return encode_fields(*this); }

Result<GpuAnswer> GpuAnswer::decode(std::span<const std::byte> bytes, uint32_t rank) {
  GpuAnswer a;
  if (decode_fields(bytes, &a)) return a;
  return error(moecclRemoteError, "rank {} sent an answer about its GPU that cannot be read", rank);
}

std::vector<std::byte> GpuIntroduction::encode() const { return encode_fields(*this); }

Result<GpuIntroduction> GpuIntroduction::decode(std::span<const std::byte> bytes, uint32_t rank) {
  GpuIntroduction i;
  if (decode_fields(bytes, &i)) return i;
  return error(moecclRemoteError, "rank {} sent an introduction of its GPU that cannot be read", rank);
}

}  // namespace moeccl::comm
