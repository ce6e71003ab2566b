// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/messages.h"

#include <algorithm>
#include <limits>

#include "src/base/names.h"

namespace moeccl::bootstrap {

const char* round_name(uint16_t type) {
  static constexpr const char* kNames[] = {"unknown",        "join",    "all_gather", "barrier",
                                           "all_gather_fds", "unknown", "all_to_all"};
  static_assert(kJoin == 1 && kGather == 2 && kBarrier == 3 && kFds == 4 && kRows == 6);
  return name_among(kNames, type);
}

std::vector<std::byte> encode_failure(const Status& failure) {
  Writer w;
  w.u8(static_cast<uint8_t>(failure.code()));
  w.string(std::string_view(failure.message()).substr(0, kMaxSentenceBytes));
  return w.take();
}

Status decode_failure(std::span<const std::byte> bytes) {
  Reader r(bytes);
  const uint8_t code = r.u8();
  std::string sentence = r.string(kMaxSentenceBytes);
  if (!r.done() || code == moecclSuccess || code > moecclUnsupported) {
    return Status(moecclInternalError, "a failure arrived that cannot be read");
  }
  return Status(static_cast<Code>(code), std::move(sentence));
}

std::vector<std::byte> encode_numbers(std::span<const uint32_t> numbers) {
  Writer w;
  w.u32(static_cast<uint32_t>(numbers.size()));
  for (const uint32_t n : numbers) w.u32(n);
  return w.take();
}

bool decode_numbers(std::span<const std::byte> bytes, std::vector<uint32_t>* numbers,
                    std::span<const std::byte>* rest) {
  Reader r(bytes);
  const uint32_t n = r.u32();
  if (n > r.left() / sizeof(uint32_t)) return false;
  numbers->resize(n);
  for (uint32_t& number : *numbers) number = r.u32();
  *rest = r.raw(r.left());
  return r.ok();
}

std::vector<std::byte> encode_peers(std::span<const Peer> peers) {
  Writer w;
  for (const Peer& p : peers) {
    w.i32(p.pid);
    w.u32(p.uid);
    w.u8(static_cast<uint8_t>((p.over_unix ? 1 : 0) | (p.with_root ? 2 : 0)));
  }
  return w.take();
}

bool decode_peers(std::span<const std::byte> bytes, size_t n_ranks, std::vector<Peer>* peers) {
  constexpr size_t kPeerBytes = 9;
  if (bytes.size() != n_ranks * kPeerBytes) return false;
  Reader r(bytes);
  peers->assign(n_ranks, {});
  for (Peer& p : *peers) {
    p.pid = r.i32();
    p.uid = r.u32();
    const uint8_t flags = r.u8();
    p.over_unix = (flags & 1) != 0;
    p.with_root = (flags & 2) != 0;
  }
  return r.done();
}

std::vector<std::byte> encode_blobs(std::span<const std::vector<std::byte>> blobs) {
  Writer w;
  for (const std::vector<std::byte>& blob : blobs) w.bytes(blob);
  return w.take();
}

bool decode_blobs(std::span<const std::byte> bytes, size_t n_ranks, std::vector<std::vector<std::byte>>* blobs) {
  Reader r(bytes);
  blobs->assign(n_ranks, {});
  for (std::vector<std::byte>& blob : *blobs) {
    const std::span<const std::byte> from = r.bytes(kMaxBlobBytes);
    blob.assign(from.begin(), from.end());
  }
  return r.done();
}

bool decode_rows(std::span<const std::byte> bytes, size_t n_ranks, std::vector<std::vector<std::byte>>* rows) {
  Reader r(bytes);
  rows->assign(n_ranks, {});
  RankSet seen(n_ranks);
  for (size_t i = 0; i < n_ranks; ++i) {
    const uint32_t from = r.u32();
    const std::span<const std::byte> row = r.bytes(kMaxRowsBytes);
    if (!r.ok() || from >= n_ranks || seen[from]) return false;
    seen[from] = true;
    (*rows)[from].assign(row.begin(), row.end());
  }
  return r.done();
}

std::vector<std::byte> encode_ranks(const RankSet& ranks) {
  std::vector<std::byte> bits((ranks.size() + 7) / 8);
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i]) bits[i / 8] |= std::byte{1} << (i % 8);
  }
  return bits;
}

bool decode_ranks(std::span<const std::byte> bytes, size_t n_ranks, RankSet* ranks) {
  if (bytes.size() != (n_ranks + 7) / 8) return false;
  ranks->assign(n_ranks, false);
  for (size_t i = 0; i < n_ranks; ++i) (*ranks)[i] = (bytes[i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
  return true;
}

uint32_t wire_timeout(Deadline deadline) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  return deadline.is_never() ? 0 : static_cast<uint32_t>(std::clamp<int64_t>(deadline.left_ms(), 1, kMost));
}

Deadline deadline_of(uint32_t wire_timeout) {
  return wire_timeout == 0 ? Deadline::never() : Deadline::after_ms(wire_timeout);
}

std::string describe_ranks(std::span<const int> ranks) {
  constexpr int kMaxRuns = 8;  // keeps the sentence readable
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  size_t i = 0;
  for (int runs = 0; i < ranks.size() && runs < kMaxRuns; ++runs) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (runs > 0) text += ", ";
    text += last == i ? format("{}", ranks[i]) : format("{}-{}", ranks[i], ranks[last]);
    i = last + 1;
  }
  if (i < ranks.size()) text += format(" and {} more", ranks.size() - i);
  return text;
}

}  // namespace moeccl::bootstrap
