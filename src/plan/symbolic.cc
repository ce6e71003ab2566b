// SPDX-License-Identifier: Apache-2.0
#include "src/plan/symbolic.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace moeccl::plan {

bool term_less(const Term& a, const Term& b) {
  if (a.rank != b.rank) return a.rank < b.rank;
  if (a.unit != b.unit) return a.unit < b.unit;
  return a.weight < b.weight;
}

Values::Values(const std::vector<uint64_t>& input_sizes) : first_leaf_{0} {
  for (const uint64_t size : input_sizes) first_leaf_.push_back(first_leaf_.back() + size);
}

ValueId Values::sum(const std::vector<Child>& children, bool final) {
  if (children.size() == 1 && children[0].weight == 1 && !final) return children[0].value;
  uint64_t hash = final ? 0x9ae16a3b2f90404full : 0xcbf29ce484222325ull;
  for (const Child& child : children) {
    hash = (hash ^ child.value ^ (uint64_t{std::bit_cast<uint32_t>(child.weight)} << 32)) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  for (auto [it, end] = by_hash_.equal_range(hash); it != end; ++it) {
    const Node& known = node(it->second);
    if (known.final == final && known.n_children == children.size() &&
        std::equal(children.begin(), children.end(), children_.begin() + static_cast<ptrdiff_t>(known.first_child)))
      return it->second;
  }
  Node fresh{children_.size(), static_cast<uint32_t>(children.size()), final, 0};
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  for (const Child& child : children) {
    const uint64_t more = n_terms(child.value);
    fresh.n_terms = fresh.n_terms > kMax - more ? kMax : fresh.n_terms + more;
  }
  children_.insert(children_.end(), children.begin(), children.end());
  nodes_.push_back(fresh);
  const auto id = static_cast<ValueId>(first_leaf_.back() + nodes_.size() - 1);
  by_hash_.emplace(hash, id);
  return id;
}

Term Values::leaf_term(ValueId v) const {
  const auto next = std::upper_bound(first_leaf_.begin(), first_leaf_.end(), uint64_t{v});
  const auto rank = static_cast<uint32_t>(next - first_leaf_.begin() - 1);
  return {rank, static_cast<uint32_t>(v - first_leaf_[rank]), 1};
}

void Values::expand(ValueId v, float weight, size_t limit, std::vector<Term>& out) const {
  if (out.size() >= limit) return;
  if (is_leaf(v)) {
    Term term = leaf_term(v);
    term.weight = weight;
    out.push_back(term);
    return;
  }
  const Node& sum = node(v);
  for (uint32_t i = 0; i < sum.n_children; ++i) {
    const Child& child = children_[sum.first_child + i];
    if (n_terms(child.value) != 0) expand(child.value, weight * child.weight, limit, out);
  }
}

bool Values::is_fused_sum(ValueId v, const std::vector<Term>& terms) const {
  const auto matches = [&](ValueId value, const Term& term) {
    return is_leaf(value) && leaf_term(value) == Term{term.rank, term.unit, 1};
  };
  if (is_leaf(v)) return terms.size() == 1 && matches(v, terms[0]);
  const Node& sum = node(v);
  if (sum.n_children != terms.size()) return false;
  for (uint32_t i = 0; i < sum.n_children; ++i) {
    const Child& child = children_[sum.first_child + i];
    if (child.weight != terms[i].weight || !matches(child.value, terms[i])) return false;
  }
  return true;
}

bool Values::holds(ValueId v, const std::vector<Term>& sorted) const {
  if (n_terms(v) != sorted.size()) return false;
  std::vector<Term> terms;
  expand(v, 1, sorted.size(), terms);
  std::sort(terms.begin(), terms.end(), term_less);
  return terms == sorted;
}

std::string Values::describe(ValueId v) const {
  if (v == kUndefined) return "nothing";
  constexpr size_t kShown = 40;
  std::vector<Term> terms;
  expand(v, 1, kShown, terms);
  if (terms.empty()) return "zeros";
  std::string text;
  for (const Term& term : terms) {
    if (!text.empty()) text += " + ";
    if (term.weight != 1) text += format("{} * ", term.weight);
    text += format("in[{}] of rank {}", term.unit, term.rank);
  }
  if (n_terms(v) > terms.size()) text += format(" + ... ({} terms)", n_terms(v));
  return text;
}

Access read_unit(Unit& unit, Buffer as, Epoch self, const Clock& clock) {
  if (!unit.written.before(clock)) return {Fault::kRaceWithWrite, unit.written};
  if (as == Buffer::kInput && !unit.input_intact) return {Fault::kOverwritten, unit.written};
  if (as == Buffer::kOutput && !unit.output_defined) return {Fault::kUndefined, {}};
  if (unit.value == kUndefined) return {Fault::kUndefined, {}};
  unit.used = true;
  // An earlier read of the same lane is implied by this one.
  if (!unit.reads.empty() && unit.reads.back().lane == self.lane) {
    unit.reads.back() = self;
  } else {
    unit.reads.push_back(self);
  }
  return {};
}

Access write_unit(Unit& unit, ValueId value, Epoch self, const Clock& clock) {
  if (!unit.written.before(clock)) return {Fault::kRaceWithWrite, unit.written};
  for (const Epoch& read : unit.reads)
    if (!read.before(clock)) return {Fault::kRaceWithRead, read};
  if (!unit.used) return {Fault::kDeadStore, unit.written};
  unit.value = value;
  unit.written = self;
  unit.reads.clear();
  unit.used = false;
  unit.output_defined = true;
  unit.input_intact = false;
  return {};
}

}  // namespace moeccl::plan
