// SPDX-License-Identifier: Apache-2.0
#include "src/routing/routing_source.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <numeric>

#include "src/base/hash.h"
#include "src/base/wire.h"

namespace moeccl::algo {

namespace {

// SplitMix64, which is fast and the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(hash_mix(seed + 0x9e3779b97f4a7c15u)) {}
  uint64_t next() { return hash_mix(state_ += 0x9e3779b97f4a7c15u); }
  uint32_t below(uint32_t n) {
    return static_cast<uint32_t>((uint64_t{static_cast<uint32_t>(next() >> 32)} * n) >> 32);
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// Draws an index in proportion to its weight in constant time (Walker 1977, Vose 1991).
class AliasTable {
 public:
  explicit AliasTable(const std::vector<double>& weights) : chance_(weights.size(), 1.0), alias_(weights.size(), 0) {
    const double mean = std::accumulate(weights.begin(), weights.end(), 0.0) / static_cast<double>(weights.size());
    std::vector<double> left(weights);
    std::vector<uint32_t> small, large;
    for (uint32_t i = 0; i < left.size(); ++i) (left[i] < mean ? small : large).push_back(i);
    while (!small.empty() && !large.empty()) {
      const uint32_t s = small.back(), l = large.back();
      small.pop_back();
      chance_[s] = left[s] / mean;
      alias_[s] = l;
      left[l] -= mean - left[s];
      if (left[l] < mean) {
        large.pop_back();
        small.push_back(l);
      }
    }
  }
  uint32_t draw(Random& random) const {
    const uint32_t i = random.below(static_cast<uint32_t>(chance_.size()));
    return random.unit() < chance_[i] ? i : alias_[i];
  }

 private:
  std::vector<double> chance_;
  std::vector<uint32_t> alias_;
};

// Parses the whole of `text` as a number.
template <class T>
bool parse_number(std::string_view text, T* value) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return code == std::errc() && end == text.data() + text.size() && !text.empty();
}

Status bad_kind(std::string_view text, size_t position) {
  return error(moecclInvalidArgument,
               "routing \"{}\" at position {}: give uniform, zipf:EXPONENT (0 to 10), trace:PATH or "
               "trace:PATH:LAYER:STEP",
               std::string(text.substr(0, 200)), position);
}

constexpr char kMagic[] = {'M', 'O', 'E', 'T', 'R', 'A', 'C', 'E'};
constexpr uint64_t kTraceHeader = 32;

}  // namespace

Result<RoutingKind> parse_routing_kind(std::string_view text) {
  RoutingKind kind;
  if (text.empty() || text == "uniform") return kind;
  if (text.starts_with("zipf:")) {
    kind.kind = RoutingKind::kZipf;
    if (!parse_number(text.substr(5), &kind.exponent) || !(kind.exponent >= 0 && kind.exponent <= 10))
      return bad_kind(text, 6);
    return kind;
  }
  if (!text.starts_with("trace:") || text.size() == 6) return bad_kind(text, 1);
  kind.kind = RoutingKind::kTrace;
  std::string_view path = text.substr(6);
  const size_t last = path.rfind(':'),
               before = last == std::string_view::npos || last == 0 ? last : path.rfind(':', last - 1);
  uint32_t layer = 0, step = 0;
  if (last != std::string_view::npos && before != std::string_view::npos && before > 0 &&
      parse_number(path.substr(last + 1), &step) && parse_number(path.substr(before + 1, last - before - 1), &layer)) {
    kind.layer = layer;
    kind.step = step;
    path = path.substr(0, before);
  }
  kind.path = path;
  return kind;
}

Result<GlobalRouting> make_routing(const RoutingRequest& r, double exponent) {
  if (r.top_k < 1 || r.top_k > 64 || r.top_k > r.n_experts)
    return error(moecclInvalidArgument, "top_k is {}: give 1 to {}", r.top_k, std::min(64u, r.n_experts));
  constexpr uint64_t kMostChoices = uint64_t{1} << 28;  // 1 GiB
  if (r.tokens_per_rank > kMostChoices / r.top_k / std::max(r.n_ranks, 1u))
    return error(moecclInvalidArgument, "{} tokens on each of {} ranks, {} experts each: more than {} choices",
                 r.tokens_per_rank, r.n_ranks, r.top_k, kMostChoices);
  GlobalRouting routing;
  routing.n_ranks = r.n_ranks;
  routing.top_k = r.top_k;
  for (uint64_t rank = 0; rank <= r.n_ranks; ++rank) routing.first_token.push_back(rank * r.tokens_per_rank);
  std::vector<uint32_t> place(r.n_experts);
  std::iota(place.begin(), place.end(), 0);
  Random random(r.seed);
  for (uint32_t i = r.n_experts; i > 1; --i) std::swap(place[i - 1], place[random.below(i)]);
  std::vector<double> weight(r.n_experts);
  for (uint32_t e = 0; e < r.n_experts; ++e) weight[e] = std::pow(1.0 / (1.0 + place[e]), exponent);
  const AliasTable table(weight);
  std::vector<uint64_t> taken(r.n_experts, 0);
  routing.expert.reserve(routing.n_tokens() * r.top_k);
  for (uint64_t t = 0; t < routing.n_tokens(); ++t) {
    for (uint32_t k = 0; k < r.top_k; ++k) {
      uint32_t e = table.draw(random);
      for (uint32_t tries = 0; taken[e] == t + 1; ++tries) {
        // If popularity is steep, only rare experts may be left: take the next one instead of drawing forever.
        e = tries < 1000 ? table.draw(random) : (e + 1) % r.n_experts;
      }
      taken[e] = t + 1;
      routing.expert.push_back(static_cast<int32_t>(e));
    }
  }
  return routing;
}

Result<GlobalRouting> read_trace(std::span<const std::byte> file, const RoutingKind& kind, const RoutingRequest& r,
                                 TraceShape* shape) {
  const std::string name = kind.path;
  if (file.size() < kTraceHeader || std::memcmp(file.data(), kMagic, sizeof(kMagic)) != 0)
    return error(moecclInvalidArgument, "trace {}: byte 0: not a routing trace (perf/TRACE.md says what one is)", name);
  Reader in(file.subspan(sizeof(kMagic)));
  if (const uint32_t version = in.u32(); version != 1)
    return error(moecclInvalidArgument, "trace {}: byte 8: version {}: this MoECCL reads version 1", name, version);
  TraceShape s;
  const auto field = [&](const char* what, uint32_t most, uint32_t* value) -> Status {
    const size_t at = file.size() - in.left();
    *value = in.u32();
    if (*value >= 1 && *value <= most) return {};
    return error(moecclInvalidArgument, "trace {}: byte {}: {} is {}: 1 to {} are possible", name, at, what, *value,
                 most);
  };
  MOECCL_TRY(field("n_layers", 1u << 20, &s.n_layers));
  MOECCL_TRY(field("n_steps", 1u << 30, &s.n_steps));
  MOECCL_TRY(field("n_tokens", 1u << 30, &s.n_tokens));
  MOECCL_TRY(field("k", 64, &s.top_k));
  MOECCL_TRY(field("n_experts", 65535, &s.n_experts));
  // The factors are below 2^30, 2^20, 2^30 and 2^8, so the product is formed in steps that cannot overflow.
  const uint64_t step_words = uint64_t{s.n_tokens} * s.top_k, n_words = in.left() / sizeof(int32_t);
  const uint64_t n_steps = uint64_t{s.n_layers} * s.n_steps;
  if (in.left() % sizeof(int32_t) != 0 || n_words / step_words != n_steps || n_words % step_words != 0)
    return error(moecclInvalidArgument, "trace {}: byte {}: {} bytes of indices, {} steps of {} words are due", name,
                 kTraceHeader, in.left(), n_steps, step_words);
  if (kind.layer >= s.n_layers || kind.step >= s.n_steps)
    return error(moecclInvalidArgument, "trace {}: layer {}, step {}: it has {} layers of {} steps", name, kind.layer,
                 kind.step, s.n_layers, s.n_steps);
  const uint64_t begin = kTraceHeader + (uint64_t{kind.layer} * s.n_steps + kind.step) * step_words * sizeof(int32_t);
  GlobalRouting routing;
  routing.n_ranks = r.n_ranks;
  routing.top_k = s.top_k;
  routing.first_token.push_back(0);
  for (uint64_t rank = 0; rank < r.n_ranks; ++rank) {
    const uint64_t first = rank * s.n_tokens / r.n_ranks, last = (rank + 1) * s.n_tokens / r.n_ranks;
    const uint64_t n = r.tokens_per_rank > 0 ? std::min(last - first, r.tokens_per_rank) : last - first;
    const size_t at = routing.expert.size();
    routing.expert.resize(at + n * s.top_k);
    if (n > 0)
      std::memcpy(routing.expert.data() + at, file.data() + begin + first * s.top_k * sizeof(int32_t),
                  n * s.top_k * sizeof(int32_t));
    routing.first_token.push_back(routing.first_token.back() + n);
  }
  *shape = s;
  if (Status bad = check_routing(routing, s.n_experts); !bad.ok())
    return std::move(bad).with_context(format("trace {}, layer {}, step {}", name, kind.layer, kind.step));
  return routing;
}

}  // namespace moeccl::algo
