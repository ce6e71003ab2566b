// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/tables/row_image.h"

#include <cstring>

namespace moeccl::exec {

using moeccl::cuda::RowTermBits;
using moeccl::cuda::WalkRowBlock;
using moeccl::cuda::WalkSumBlock;
using moeccl::cuda::WalkTables;

namespace {

constexpr size_t kAlign = 16;

// Only adds up the sizes of what is put, or writes it as well.
class ImageWriter {
 public:
  ImageWriter(std::byte* image, const std::byte* base) : image_(image), base_(base) {}

  // Returns the address that [n] elements have on the device, or null if there are none.
  template <class T>
  const T* put(const T* from, size_t n) {
    if (from == nullptr || n == 0) return nullptr;
    const size_t at = take(n * sizeof(T));
    if (image_ != nullptr) std::memcpy(image_ + at, from, n * sizeof(T));
    return reinterpret_cast<const T*>(base_ + at);
  }
  size_t take(size_t bytes) {
    const size_t at = used_;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  size_t used() const { return used_; }
  std::byte* image() const { return image_; }
  const std::byte* base() const { return base_; }

 private:
  std::byte* image_;
  const std::byte* base_;
  size_t used_ = 0;
};

WalkRowBlock put(ImageWriter& w, const plan::RowBlock& b) {
  WalkRowBlock out{};
  out.src_index = w.put(b.src_index, b.count);
  out.dst_index = w.put(b.dst_index, b.count);
  out.weights = w.put(b.weights, b.count);
  out.src_first = b.src_first;
  out.dst_first = b.dst_first;
  out.count = b.count;
  return out;
}

// Only the terms of these rows are copied, so offsets start at 0.
WalkSumBlock put(ImageWriter& w, const plan::SumBlock& b) {
  static_assert(sizeof(plan::RowTermRef) == sizeof(RowTermBits));
  WalkSumBlock out{};
  out.dst_first = b.dst_first;
  out.count = b.count;
  if (b.count == 0) return out;
  const uint64_t first = b.offsets[0], n_terms = b.offsets[b.count] - first;
  const size_t at = w.take((b.count + 1) * sizeof(uint64_t));
  if (w.image() != nullptr) {
    auto* offsets = reinterpret_cast<uint64_t*>(w.image() + at);
    for (uint64_t i = 0; i <= b.count; ++i) offsets[i] = b.offsets[i] - first;
  }
  out.offsets = reinterpret_cast<const uint64_t*>(w.base() + at);
  if (n_terms > 0) {
    out.terms = reinterpret_cast<const RowTermBits*>(w.put(b.terms + first, n_terms));
    if (b.weights != nullptr) out.weights = w.put(b.weights + first, n_terms);
  }
  out.dst_index = w.put(b.dst_index, b.count);
  return out;
}

template <class Device, class Block>
const Device* put_all(ImageWriter& w, std::span<const Block> blocks) {
  const size_t at = w.take(blocks.size() * sizeof(Device));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Device block = put(w, blocks[i]);
    if (w.image() != nullptr) std::memcpy(w.image() + at + i * sizeof(Device), &block, sizeof(Device));
  }
  return reinterpret_cast<const Device*>(w.base() + at);
}

WalkTables put(ImageWriter& w, const RowListsOnHost& lists) {
  WalkTables t{};
  t.ready = 1;
  t.n_chunks = lists.n_chunks;
  t.rows = put_all<WalkRowBlock>(w, lists.rows);
  t.zeros = put_all<WalkSumBlock>(w, lists.zeros);
  t.sums = put_all<WalkSumBlock>(w, lists.sums);
  return t;
}

}  // namespace

size_t RowImage::bytes(const RowListsOnHost& lists) {
  ImageWriter counts(nullptr, nullptr);
  (void)put(counts, lists);
  return counts.used();
}

WalkTables RowImage::write(const RowListsOnHost& lists, std::byte* image, const std::byte* base) {
  ImageWriter writer(image, base);
  return put(writer, lists);
}

}  // namespace moeccl::exec
