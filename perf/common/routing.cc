// SPDX-License-Identifier: Apache-2.0
#include "perf/common/routing.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <utility>

#include "perf/common/pattern.h"

namespace perf {
namespace {

constexpr char kMagic[8] = {'M', 'O', 'E', 'T', 'R', 'A', 'C', 'E'};
constexpr uint32_t kTraceVersion = 1;
constexpr uint64_t kMostEntries = uint64_t{1} << 33;  // 32 GiB of indices: more means a damaged header

double unit(uint64_t random) { return (static_cast<double>(random >> 11) + 0.5) * 0x1p-53; }

struct Header {
  char magic[8];
  uint32_t version, n_layers, n_steps, n_tokens, k, n_experts;
};

std::string check_header(const Header& h, uint64_t file_bytes) {
  if (std::memcmp(h.magic, kMagic, sizeof kMagic) != 0) return "does not begin with MOETRACE";
  if (h.version != kTraceVersion) return "has version " + std::to_string(h.version) + ", this program reads 1";
  for (const uint32_t n : {h.n_layers, h.n_steps, h.n_tokens, h.k})
    if (n == 0 || n > INT32_MAX) return "has a dimension of 0 or above 2^31";
  if (h.n_experts == 0 || h.n_experts > 65535 || h.k > h.n_experts || h.k > 64)
    return "has top-" + std::to_string(h.k) + " of " + std::to_string(h.n_experts) + " experts";
  const double entries = static_cast<double>(h.n_layers) * h.n_steps * h.n_tokens * h.k;
  if (entries > static_cast<double>(kMostEntries)) return "claims more than 2^33 indices";
  const uint64_t need = sizeof(Header) + static_cast<uint64_t>(entries) * sizeof(int32_t);
  if (file_bytes != need)
    return "has " + std::to_string(file_bytes) + " bytes where its header needs " + std::to_string(need);
  return "";
}

// Checks that indices are within range and distinct within a token; -1 means no expert.
std::string check_indices(const Trace& t) {
  std::vector<size_t> seen(static_cast<size_t>(t.n_experts), SIZE_MAX);
  const size_t k = static_cast<size_t>(t.k);
  for (size_t i = 0; i < t.index.size(); i++) {
    const int32_t expert = t.index[i];
    if (expert < -1 || expert >= t.n_experts)
      return "has expert " + std::to_string(expert) + " at index " + std::to_string(i) + " of " +
             std::to_string(t.n_experts);
    if (expert < 0) continue;
    if (std::exchange(seen[static_cast<size_t>(expert)], i / k) == i / k)
      return "names expert " + std::to_string(expert) + " twice for token " + std::to_string(i / k);
  }
  return "";
}

}  // namespace

// Robert Floyd's sampling without replacement (CACM 1987).
std::vector<int32_t> uniform_topk(const TopkShape& shape, uint64_t seed) {
  const size_t k = static_cast<size_t>(shape.k);
  std::vector<int32_t> index(shape.n_tokens * k);
  for (size_t t = 0; t < shape.n_tokens; t++) {
    int32_t* chosen = &index[t * k];
    for (int i = 0; i < shape.k; i++) {
      const int last = shape.n_experts - shape.k + i;
      const auto pick = static_cast<int32_t>(mix(seed, t, static_cast<uint64_t>(i)) % static_cast<uint64_t>(last + 1));
      chosen[i] = std::find(chosen, chosen + i, pick) == chosen + i ? pick : last;
    }
  }
  return index;
}

// Efraimidis and Spirakis (2006): the k smallest of -log(u) / weight are a weighted sample without replacement.
std::vector<int32_t> zipf_topk(const TopkShape& shape, const Zipf& zipf, uint64_t seed) {
  const size_t k = static_cast<size_t>(shape.k), n = static_cast<size_t>(shape.n_experts);
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = n; i > 1; i--) std::swap(order[i - 1], order[mix(zipf.popularity_seed, i) % i]);
  std::vector<double> rarity(n);
  for (size_t place = 0; place < n; place++)
    rarity[static_cast<size_t>(order[place])] = std::pow(static_cast<double>(place + 1), zipf.exponent);
  std::vector<int32_t> index(shape.n_tokens * k);
  std::vector<std::pair<double, int32_t>> keys(n);
  for (size_t t = 0; t < shape.n_tokens; t++) {
    for (size_t e = 0; e < n; e++) keys[e] = {-std::log(unit(mix(seed, t, e))) * rarity[e], static_cast<int32_t>(e)};
    std::partial_sort(keys.begin(), keys.begin() + shape.k, keys.end());
    for (size_t j = 0; j < k; j++) index[t * k + j] = keys[j].second;
  }
  return index;
}

std::string read_trace(const std::string& path, Trace& trace) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return path + ": cannot be opened: " + std::strerror(errno);
  const auto bytes = static_cast<uint64_t>(file.tellg());
  Header header = {};
  if (bytes < sizeof header) return path + ": is shorter than a trace's header";
  file.seekg(0);
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  const std::string wrong = check_header(header, bytes);
  if (!wrong.empty()) return path + ": " + wrong;
  trace.n_layers = static_cast<int>(header.n_layers);
  trace.n_steps = static_cast<int>(header.n_steps);
  trace.n_tokens = static_cast<int>(header.n_tokens);
  trace.k = static_cast<int>(header.k);
  trace.n_experts = static_cast<int>(header.n_experts);
  trace.index.resize((bytes - sizeof header) / sizeof(int32_t));
  file.read(reinterpret_cast<char*>(trace.index.data()), static_cast<std::streamsize>(bytes - sizeof header));
  if (!file) return path + ": cannot be read";
  const std::string bad = check_indices(trace);
  return bad.empty() ? "" : path + ": " + bad;
}

}  // namespace perf
