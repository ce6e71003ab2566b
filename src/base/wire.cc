// SPDX-License-Identifier: Apache-2.0
#include "src/base/wire.h"

#include <bit>
#include <cassert>
#include <limits>

namespace moeccl {

void Writer::f64(double v) { u64(std::bit_cast<uint64_t>(v)); }

// Defined out of line, because inlining it after other appends makes GCC 12 warn about an overflow that cannot happen.
void Writer::raw(std::span<const std::byte> bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }

void Writer::bytes(std::span<const std::byte> bytes) {
  assert(bytes.size() <= std::numeric_limits<uint32_t>::max());
  u32(static_cast<uint32_t>(bytes.size()));
  raw(bytes);
}

void Writer::string(std::string_view text) { bytes(std::as_bytes(std::span(text.data(), text.size()))); }

double Reader::f64() { return std::bit_cast<double>(u64()); }

std::span<const std::byte> Reader::raw(size_t n) {
  if (!ok_ || n > left()) {
    ok_ = false;
    return {};
  }
  const std::span<const std::byte> taken = in_.subspan(at_, n);
  at_ += n;
  return taken;
}

std::span<const std::byte> Reader::bytes(size_t max) {
  const uint32_t n = u32();
  if (n > max) ok_ = false;
  return raw(n);
}

std::string Reader::string(size_t max) {
  const std::span<const std::byte> text = bytes(max);
  return std::string(reinterpret_cast<const char*>(text.data()), text.size());
}

}  // namespace moeccl
