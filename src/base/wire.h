// SPDX-License-Identifier: Apache-2.0
// Little-endian encoding of small messages. A Reader never reads outside its bytes: missing values read as zero or
// empty, and ok() becomes false for good. A caller can therefore read a whole message and check it once.
//
// A struct lists its fields once for both directions, so that they are read in the order in which they are written:
//   static void fields(auto& io, auto& self) { io(self.count), io.text(self.name, 64); }
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace moeccl {

template <class T>
std::span<const std::byte> as_bytes_of(const T& value) {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

// How a number travels.
template <std::integral T>
struct Wire {
  using Type = std::make_unsigned_t<T>;
};
template <>
struct Wire<bool> {
  using Type = uint8_t;
};

class Writer {
 public:
  template <std::unsigned_integral T>
  void uint(T value) {
    const size_t at = out_.size();
    out_.resize(at + sizeof(T));
    for (size_t i = 0; i < sizeof(T); ++i) out_[at + i] = static_cast<std::byte>((uint64_t{value} >> (8 * i)) & 0xff);
  }
  void u8(uint8_t v) { uint(v); }
  void u16(uint16_t v) { uint(v); }
  void u32(uint32_t v) { uint(v); }
  void u64(uint64_t v) { uint(v); }
  void i32(int32_t v) { uint(static_cast<uint32_t>(v)); }
  void i64(int64_t v) { uint(static_cast<uint64_t>(v)); }
  void f64(double v);
  void raw(std::span<const std::byte> bytes);
  // Appends the length as a u32, then the bytes.
  void bytes(std::span<const std::byte> bytes);
  void string(std::string_view text);

  // Fields, see above: numbers, a number that travels as a `Wire`, the bytes of an object, a text that is cut to `most`
  // bytes, and what a reader refuses otherwise.
  template <std::integral T>
  void operator()(T v) {
    uint(static_cast<typename Wire<T>::Type>(v));
  }
  void operator()(double v) { f64(v); }
  template <class As, class T>
  void as(T v) {
    (*this)(static_cast<As>(v));
  }
  template <class T>
  void object(const T& v) {
    raw(as_bytes_of(v));
  }
  void text(std::string_view v, size_t most) { string(v.substr(0, most)); }
  void must(bool) {}

  size_t size() const { return out_.size(); }
  std::span<const std::byte> view() const { return out_; }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  template <std::unsigned_integral T>
  T uint() {
    const std::span<const std::byte> from = raw(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < from.size(); ++i) value |= uint64_t{static_cast<uint8_t>(from[i])} << (8 * i);
    return static_cast<T>(value);
  }
  uint8_t u8() { return uint<uint8_t>(); }
  uint16_t u16() { return uint<uint16_t>(); }
  uint32_t u32() { return uint<uint32_t>(); }
  uint64_t u64() { return uint<uint64_t>(); }
  int32_t i32() { return static_cast<int32_t>(uint<uint32_t>()); }
  int64_t i64() { return static_cast<int64_t>(uint<uint64_t>()); }
  double f64();
  // Returns the next n bytes. If fewer are left, returns none and makes ok() false.
  std::span<const std::byte> raw(size_t n);
  // Reads a length and its bytes. A length above `max` is a failure that is detected before anything is allocated.
  std::span<const std::byte> bytes(size_t max);
  std::string string(size_t max);

  // Fields, as Writer has them.
  template <std::integral T>
  void operator()(T& v) {
    v = static_cast<T>(uint<typename Wire<T>::Type>());
  }
  void operator()(double& v) { v = f64(); }
  template <class As, class T>
  void as(T& v) {
    As wire{};
    (*this)(wire);
    v = static_cast<T>(wire);
  }
  template <class T>
  void object(T& v) {
    const std::span<const std::byte> from = raw(sizeof(v));
    if (!from.empty()) std::memcpy(&v, from.data(), sizeof(v));
  }
  void text(std::string& v, size_t most) { v = string(most); }
  void must(bool holds) { ok_ = ok_ && holds; }

  bool ok() const { return ok_; }
  // Returns true if nothing was missing and nothing is left over.
  bool done() const { return ok_ && at_ == in_.size(); }
  size_t left() const { return in_.size() - at_; }

 private:
  std::span<const std::byte> in_;
  size_t at_ = 0;
  bool ok_ = true;
};

template <class T>
std::vector<std::byte> encode_fields(const T& value) {
  Writer out;
  T::fields(out, value);
  return out.take();
}

// Returns false unless `bytes` are exactly a T.
template <class T>
bool decode_fields(std::span<const std::byte> bytes, T* value) {
  Reader in(bytes);
  T::fields(in, *value);
  return in.done();
}

}  // namespace moeccl
