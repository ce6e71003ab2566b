// SPDX-License-Identifier: Apache-2.0
// Random buffers with guarded ends, and bitwise comparison, for the kernel tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/float_formats.h"
#include "kernels/host/tables.h"

namespace moeccl::kernels {

inline constexpr const char* kTypeNames[MOECCL_NUM_DATA_TYPES] = {
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "e4m3", "e5m2"};
inline constexpr size_t kTypeSizes[MOECCL_NUM_DATA_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// The names of the tables that must agree with the reference; this processor may not run some of them.
inline std::span<const char* const> overlays() { return names().first(names().size() - 1); }

inline bool is_float(int type) { return type >= moecclFloat16; }

// Returns the element at p of a float type.
inline double read_float(int type, const std::byte* p) {
  uint16_t u16;
  float f;
  double d;
  switch (type) {
    case moecclFloat16:
      std::memcpy(&u16, p, 2);
      return Fp16::decode(u16);
    case moecclBfloat16:
      std::memcpy(&u16, p, 2);
      return Bf16::decode(u16);
    case moecclFloat8e4m3:
      return Fp8e4m3::decode(static_cast<uint8_t>(*p));
    case moecclFloat8e5m2:
      return Fp8e5m2::decode(static_cast<uint8_t>(*p));
    case moecclFloat32:
      std::memcpy(&f, p, 4);
      return f;
    default:
      std::memcpy(&d, p, 8);
      return d;
  }
}

inline void write_float(int type, std::byte* p, double value) {
  const float f = static_cast<float>(value);
  uint16_t u16;
  switch (type) {
    case moecclFloat16:
      u16 = static_cast<uint16_t>(Fp16::encode(f));
      std::memcpy(p, &u16, 2);
      break;
    case moecclBfloat16:
      u16 = static_cast<uint16_t>(Bf16::encode(f));
      std::memcpy(p, &u16, 2);
      break;
    case moecclFloat8e4m3:
      *p = static_cast<std::byte>(Fp8e4m3::encode(f));
      break;
    case moecclFloat8e5m2:
      *p = static_cast<std::byte>(Fp8e5m2::encode(f));
      break;
    case moecclFloat32:
      std::memcpy(p, &f, 4);
      break;
    default:
      std::memcpy(p, &value, 8);
      break;
  }
}

// Bytes at any offset from a cache line, with guards that a kernel must not touch.
class Buffer {
 public:
  static constexpr size_t kGuard = 64;

  Buffer(size_t bytes, size_t misalignment) : bytes_(bytes), storage_(bytes + 2 * kGuard + 128, std::byte{0xa5}) {
    const size_t past_line = reinterpret_cast<uintptr_t>(storage_.data()) % 64;
    begin_ = kGuard + (64 - past_line) % 64 + misalignment;
  }
  std::byte* data() { return storage_.data() + begin_; }
  const std::byte* data() const { return storage_.data() + begin_; }
  size_t size() const { return bytes_; }

  bool guards_intact() const {
    for (size_t i = 0; i < storage_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && storage_[i] != std::byte{0xa5}) return false;
    }
    return true;
  }

 private:
  size_t bytes_;
  size_t begin_ = 0;
  std::vector<std::byte> storage_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  size_t below(size_t n) { return engine_() % n; }
  bool chance(int percent) { return below(100) < static_cast<size_t>(percent); }
  double normal() { return std::normal_distribution<double>()(engine_); }

  // Every second buffer holds raw bits: for floats, this gives NaNs, infinities and subnormals of all kinds.
  Buffer elements(int type, size_t count) {
    Buffer b(count * kTypeSizes[type], below(64));
    for (size_t i = 0; i < b.size(); ++i) b.data()[i] = static_cast<std::byte>(bits());
    if (is_float(type) && chance(50)) {
      for (size_t i = 0; i < count; ++i)
        write_float(type, b.data() + i * kTypeSizes[type], chance(5) ? -0.0 : normal());
    }
    return b;
  }

  // Returns sizes around the vector widths, and a few larger ones.
  size_t count() { return chance(80) ? below(300) : below(5000); }
  size_t misalignment() { return chance(30) ? 0 : below(64); }

 private:
  std::mt19937_64 engine_;
};

// Returns the first difference between two buffers of `type`, or an empty string. Any NaN equals any NaN.
inline std::string difference(int type, const Buffer& expected, const Buffer& actual) {
  const size_t size = kTypeSizes[type];
  for (size_t i = 0; i + size <= expected.size(); i += size) {
    const std::byte *e = expected.data() + i, *a = actual.data() + i;
    if (std::memcmp(e, a, size) == 0) continue;
    if (is_float(type) && std::isnan(read_float(type, e)) && std::isnan(read_float(type, a))) continue;
    std::string text = std::string(kTypeNames[type]) + " element " + std::to_string(i / size) + " of " +
                       std::to_string(expected.size() / size);
    if (is_float(type)) {
      text += ": expected " + std::to_string(read_float(type, e)) + ", got " + std::to_string(read_float(type, a));
    }
    return text;
  }
  return actual.guards_intact() ? "" : "wrote outside the destination";
}

// The overlays, each compared with the reference. An absent overlay is skipped with a message.
class OverlayTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    table_ = select(GetParam());
    if (!table_) GTEST_SKIP() << "this processor does not run the " << GetParam() << " kernels";
  }
  const KernelTable& overlay() const { return *table_; }
  const KernelTable& reference() const { return reference_table(); }

 private:
  const KernelTable* table_ = nullptr;
};

}  // namespace moeccl::kernels
