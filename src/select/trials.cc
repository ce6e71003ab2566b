// SPDX-License-Identifier: Apache-2.0
#include "src/select/trials.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "src/base/format.h"
#include "src/base/hash.h"
#include "src/plan/profile.h"

namespace moeccl::comm {
namespace {

// Each time has 12 bits: its binary logarithm in steps of 1/64.
constexpr int kBits = 12;
constexpr double kSteps = 64;
constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

}  // namespace

uint64_t Trials::pack(std::span<const double> ns) {
  uint64_t word = 0;
  for (size_t i = 0; i < ns.size() && i < kMost; ++i) {
    if (ns[i] < 1) continue;
    const auto steps = static_cast<uint64_t>(std::lround(std::log2(ns[i]) * kSteps)) + 1;
    word |= std::min(steps, kMask) << (kBits * i);
  }
  return word;
}

double Trials::unpack(uint64_t word, size_t plan) {
  const uint64_t steps = word >> (kBits * plan) & kMask;
  return steps == 0 ? 0 : std::exp2(static_cast<double>(steps - 1) / kSteps);
}

// Plans that seemed too slow come into question as soon as the running one proves to be slower than predicted.
size_t Trials::State::n_worth_trying() const {
  const auto too_slow = std::ranges::find_if(plans, [&](const Plan& p) { return p.from_ns > took_ns[runs]; });
  return std::max(runs + 1, static_cast<size_t>(too_slow - plans.begin()));
}

size_t Trials::State::turn_of(uint64_t at) const {
  const uint64_t round = at / (blocks->operations * n);
  const size_t turn = at / blocks->operations % n;
  return round % 2 == 0 ? turn : n - 1 - turn;
}

void Trials::State::begin() {
  n = n_worth_trying();
  begun.store(0, std::memory_order_relaxed);
  voted = false;
  for (std::vector<double>& times : ns) times.clear();
}

// A disturbance on one of the ranks is in few of the times, so the median of single operations leaves it out. For
// blocks, the slowest is left out and the mean of the others counts, because some plans are fast in only one half of
// them.
uint64_t Trials::vote_of(State& s) {
  double times[kMost] = {};
  for (size_t i = 0; i < s.n; ++i) {
    std::vector<double>& ns = s.ns[i];
    if (ns.empty()) continue;
    std::sort(ns.begin(), ns.end());
    if (s.one_by_one) {
      times[i] = ns[ns.size() / 2];
      continue;
    }
    const auto last = ns.end() - (ns.size() > 1 ? 1 : 0);
    const auto operations = static_cast<double>((last - ns.begin()) * (s.blocks->operations - s.blocks->uncounted));
    times[i] = std::reduce(ns.begin(), last) / operations;
  }
  return pack({times, s.n});
}

uint64_t Trials::hash_of(const Class& c) const { return c.private_sizes ? hash_combine(c.hash, last_size_) : c.hash; }

// Notes how the operation before went. Operations run one after another, so it has ended. One that did not run as it
// was meant to, or had another size, counts as if it had not run.
void Trials::note_last() {
  bool meant = last_.ran.took_ns > 0;
  if (last_.private_size) {
    const auto size = static_cast<uint64_t>(std::bit_width(last_.ran.largest_block_bytes));
    meant = meant && size == last_size_;
    last_size_ = size;
  }
  if (last_.state != nullptr && !meant) last_.state->count(-uint64_t{1});
  if (last_.counts != nullptr && meant) {
    if (!last_.goes_on || last_.counts->empty()) last_.counts->push_back(0);
    last_.counts->back() += last_.ran.took_ns;
  }
  last_ = {};
}

// Called when nothing runs that would be noted in a state.
Trials::State& Trials::state_of(uint64_t hash) {
  if (recent_.second == nullptr || recent_.first != hash) {
    if (classes_.size() >= kMostClasses && !classes_.contains(hash)) classes_.clear();
    recent_ = {hash, &classes_[hash]};
  }
  return *recent_.second;
}

// Takes no lock, because only this thread writes: readers see `begun` of now or of an operation ago.
const char* Trials::settled(uint64_t hash) {
  State* const s = recent_.first == hash ? recent_.second : nullptr;
  if (s == nullptr || last_.state != nullptr || last_.private_size || !s->decided || !s->voted) return nullptr;
  const uint64_t begun = s->begun.load(std::memory_order_relaxed);
  if (begun < s->trial_operations() || begun >= kAgain) return nullptr;
  s->count(1);
  return s->plans[s->runs].name;
}

exec::Operation::Ran* Trials::still_small() {
  const bool again = last_.private_size && last_.state == nullptr && last_.ran.largest_block_bytes == 0;
  return again && last_size_ == 0 ? &last_.ran : nullptr;
}

Trials::Pick Trials::next(const Class& c, uint64_t sequence, exec::Ballot& ballot) {
  const std::lock_guard lock(mutex_);
  note_last();
  last_.private_size = c.private_sizes;
  exec::Operation::Ran* const ran = c.private_sizes ? &last_.ran : nullptr;
  uint64_t bytes = c.bytes;
  if (c.private_sizes) {
    if (last_size_ == 0) return {c.plans[0].name, ran};
    bytes = c.n_ranks << (last_size_ - 1);
    if (bytes > kMostPrivateBytes) return {c.plans[0].name, ran};
  }
  const uint64_t hash = hash_of(c);
  State& s = state_of(hash);
  if (s.plans.empty()) {
    s.plans.assign(c.plans.begin(), c.plans.begin() + static_cast<ptrdiff_t>(std::min(c.plans.size(), kMost)));
    s.meets_all = c.meets_all;
    s.one_by_one = c.meets_all || c.exchanges;
    if (!s.one_by_one) {
      s.blocks = &kRootBlocks;
    } else if (bytes > kLargeBytes) {
      s.blocks = !c.exchanges ? &kLargeBlocks : bytes > kHugeBytes ? &kHugeExchanges : &kLargeExchanges;
    }
    s.begin();
  }
  if (s.begun.load(std::memory_order_relaxed) >= kAgain) s.begin();
  const Blocks& block = *s.blocks;
  const uint64_t at = s.begun.load(std::memory_order_relaxed);
  s.count(1);
  if (at < s.trial_operations()) {
    const size_t plan = s.turn_of(at);
    last_.state = &s;
    last_.ran.is_timed = true;
    if (at % block.operations >= block.uncounted) last_.counts = &s.ns[plan];
    last_.goes_on = !s.one_by_one && at % block.operations > block.uncounted;
    return {s.plans[plan].name, &last_.ran};
  }
  // Only one vote is under way at a time.
  if (!s.voted && sequence > ballot.at + exec::Ballot::kHeardAfter) {
    s.voted = true;
    voting_ = hash;
    ballot.at = sequence;
    ballot.word = vote_of(s);
  }
  return {s.decided ? s.plans[s.runs].name : c.plans[0].name, ran};
}

void Trials::decide(std::span<const uint64_t> votes) {
  const std::lock_guard lock(mutex_);
  const auto it = classes_.find(voting_);
  if (it == classes_.end()) return;
  State& s = it->second;
  for (size_t i = 0; i < s.n; ++i) {
    double ns = unpack(votes[0], i);
    for (const uint64_t vote : votes) {
      const double theirs = unpack(vote, i);
      ns = s.meets_all ? std::min(ns, theirs) : std::max(ns, theirs);
    }
    s.took_ns[i] = ns;
  }
  s.decided = true;
  const double now = s.took_ns[s.runs];
  for (size_t i = 0; i < s.n; ++i) {
    const bool faster = now > 0 && s.took_ns[i] > 0 && s.took_ns[i] < kGain * now;
    if (faster && s.took_ns[i] < s.took_ns[s.runs]) s.runs = i;
  }
  for (size_t i = 0; i < s.n; ++i) {
    const bool close = s.took_ns[i] > 0 && kGain * s.took_ns[i] < s.took_ns[s.runs];
    if (close && std::string_view(s.plans[i].name) == plan::kFlatName) s.runs = i;
  }
  if (s.n_worth_trying() > s.n) s.begin();
}

std::string Trials::Report::text() const {
  std::string text = "tried:";
  for (const auto& [name, ns] : took_ns)
    text += format(" {} {}", name, ns > 0 ? format("{:.1f} us", ns / 1e3) : "not timed");
  return text;
}

Trials::Report Trials::report(const Class& c) const {
  const std::lock_guard lock(mutex_);
  const auto it = classes_.find(hash_of(c));
  if (it == classes_.end()) return {};
  const State& s = it->second;
  const uint64_t begun = s.begun.load(std::memory_order_relaxed), at = begun >= kAgain ? 0 : begun;
  const size_t next = at < s.trial_operations() ? s.turn_of(at) : s.decided ? s.runs : 0;
  Report r{s.decided, s.plans[s.runs].name, s.plans[next].name, {}};
  for (size_t i = 0; i < s.n; ++i) r.took_ns.emplace_back(s.plans[i].name, s.took_ns[i]);
  return r;
}

}  // namespace moeccl::comm
