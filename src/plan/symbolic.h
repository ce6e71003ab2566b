// SPDX-License-Identifier: Apache-2.0
// Parts of the checker: symbolic values, vector clocks, and memory that records which step touched it and when.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/plan/checker.h"

namespace moeccl::plan {

using ValueId = uint32_t;
inline constexpr ValueId kUndefined = ~0u;

// Values are sums of Input elements, interned so that equal sums formed in the same way have equal ids.
class Values {
 public:
  struct Child {
    ValueId value = kUndefined;
    float weight = 1;
    friend bool operator==(const Child&, const Child&) = default;
  };

  explicit Values(const std::vector<uint64_t>& input_sizes);  // [n_ranks] elements of each Input

  ValueId leaf(uint32_t rank, uint64_t unit) const { return static_cast<ValueId>(first_leaf_[rank] + unit); }
  // Returns the sum of the children, in this order. A sum of one child of weight 1, if not final, is the child itself.
  ValueId sum(const std::vector<Child>& children, bool final);

  bool is_final(ValueId v) const { return !is_leaf(v) && node(v).final; }
  // Returns whether v is one single sum, in this order, of the given leaves (a leaf counts as a sum of itself).
  bool is_fused_sum(ValueId v, const std::vector<Term>& terms) const;
  // Returns whether v holds the terms, however grouped. `sorted` is ordered by term_less.
  bool holds(ValueId v, const std::vector<Term>& sorted) const;
  std::string describe(ValueId v) const;

 private:
  struct Node {
    size_t first_child = 0;
    uint32_t n_children = 0;
    bool final = false;
    uint64_t n_terms = 0;  // saturating
  };
  bool is_leaf(ValueId v) const { return v < first_leaf_.back(); }
  const Node& node(ValueId v) const { return nodes_[v - first_leaf_.back()]; }
  uint64_t n_terms(ValueId v) const { return is_leaf(v) ? 1 : node(v).n_terms; }
  Term leaf_term(ValueId v) const;
  void expand(ValueId v, float weight, size_t limit, std::vector<Term>& out) const;

  std::vector<uint64_t> first_leaf_;  // [n_ranks + 1]
  std::vector<Node> nodes_;
  std::vector<Child> children_;
  std::unordered_multimap<uint64_t, ValueId> by_hash_;
};

bool term_less(const Term& a, const Term& b);

// Lanes of all ranks are numbered consecutively. clock[lane] = how many steps of `lane` are known to be done.
using Clock = std::vector<uint32_t>;

// The `time`-th step of a lane.
struct Epoch {
  uint32_t lane = 0;
  uint32_t time = 0;  // from 1; 0: never

  bool before(const Clock& clock) const { return clock[lane] >= time; }
};

// One element of memory.
struct Unit {
  ValueId value = kUndefined;
  Epoch written;                // time 0: still as at the start
  std::vector<Epoch> reads;     // since `written`
  bool used = true;             // read since `written`
  bool output_defined = false;  // may be read as Output
  bool input_intact = false;    // may be read as Input
};

// The fault of one access of a unit. The caller, which knows the names, completes the text.
enum class Fault : uint8_t { kNone, kUndefined, kOverwritten, kRaceWithWrite, kRaceWithRead, kDeadStore };
struct Access {
  Fault fault = Fault::kNone;
  Epoch other;  // the access that this one conflicts with
};

Access read_unit(Unit& unit, Buffer as, Epoch self, const Clock& clock);
Access write_unit(Unit& unit, ValueId value, Epoch self, const Clock& clock);

}  // namespace moeccl::plan
