// SPDX-License-Identifier: Apache-2.0
#include "src/world/gpu_introduction.h"

#include <algorithm>

namespace moeccl::comm {
namespace {

constexpr size_t kMaxPci = 31;

void write(Writer& out, const GpuAnswer& a) {
  out.u8(a.able);
  out.u8(a.reaches);
  out.u64(a.kernel_staging);
  out.string(std::string_view(a.why).substr(0, GpuAnswer::kMaxWhy));
}

GpuAnswer read_answer(Reader& in) {
  GpuAnswer a;
  a.able = in.u8() != 0;
  a.reaches = in.u8() != 0;
  a.kernel_staging = in.u64();
  a.why = in.string(GpuAnswer::kMaxWhy);
  return a;
}

void write(Writer& out, const StagingOffer& s) {
  out.u8(static_cast<uint8_t>(s.way));
  out.i32(s.device);
  out.u64(s.address);
  out.u64(s.mapped);
  out.u64(s.slot);
  if (s.way == StagingOffer::kByHandle) out.raw(as_bytes_of(s.handle));
}

// Returns false if the way to open it is not known.
bool read(Reader& in, StagingOffer& s) {
  s.way = in.u8();
  s.device = in.i32();
  s.address = in.u64();
  s.mapped = in.u64();
  s.slot = in.u64();
  if (s.way == StagingOffer::kByHandle)
    std::ranges::copy(in.raw(sizeof(s.handle)), std::as_writable_bytes(std::span(&s.handle, 1)).begin());
  return s.way <= StagingOffer::kByDescriptor;
}

}  // namespace

std::vector<std::byte> GpuAnswer::encode() const {
  Writer out;
  write(out, *this);
  return out.take();
}

Result<GpuAnswer> GpuAnswer::decode(std::span<const std::byte> bytes, uint32_t rank) {
  Reader in(bytes);
  GpuAnswer a = read_answer(in);
  if (!in.done()) return error(moecclRemoteError, "rank {} sent an answer about its GPU that cannot be read", rank);
  return a;
}

std::vector<std::byte> GpuIntroduction::encode() const {
  Writer out;
  out.u8(asked);
  if (!asked) return out.take();
  out.u8(mps);
  write(out, staging);
  out.raw(as_bytes_of(uuid));
  out.string(std::string_view(pci).substr(0, kMaxPci));
  write(out, answer);
  return out.take();
}

Result<GpuIntroduction> GpuIntroduction::decode(std::span<const std::byte> bytes, uint32_t rank) {
  Reader in(bytes);
  GpuIntroduction i;
  bool known = true;
  i.asked = in.u8() != 0;
  if (i.asked) {
    i.mps = in.u8() != 0;
    known = read(in, i.staging);
    std::ranges::copy(in.raw(sizeof(i.uuid)), std::as_writable_bytes(std::span(i.uuid)).begin());
    i.pci = in.string(kMaxPci);
    i.answer = read_answer(in);
  }
  if (!in.done() || !known)
    return error(moecclRemoteError, "rank {} sent an introduction of its GPU that cannot be read", rank);
  return i;
}

}  // namespace moeccl::comm
