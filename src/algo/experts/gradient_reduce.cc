// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/gradient_reduce.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/base/hash.h"

namespace moeccl::algo {

namespace {

enum Sig : uint32_t { kData, kCredit, kPassed, kReturned };

}  // namespace

void GradientReduce::group_hosts() {
  experts_.resize(placement_.n_experts);
  for (uint32_t e = 0; e < placement_.n_experts; ++e) {
    Expert& expert = experts_[e];
    expert.number = e;
    expert.n_replicas = placement_.n_replicas(e);
    for (const ExpertHost* host : hosts_by_node(placement_, e, node_of_)) {
      if (expert.groups.empty() || expert.groups.back().node != node_of(host->rank))
        expert.groups.push_back({node_of(host->rank), {}, {}});
      expert.groups.back().members.push_back(host);
    }
  }
}

// A member of a group of g sums every g-th shard of other nodes for the group: ceil(n / g) times g - 1 parts come to
// it.
void GradientReduce::number_places() {
  const uint32_t n = placement_.n_ranks;
  std::vector<uint32_t> used(n, 0);
  uint32_t arriving = 0;
  for (Expert& expert : experts_) {
    uint32_t largest = 0;
    for (Group& group : expert.groups) {
      largest = std::max(largest, group.size());
      for (const ExpertHost* host : group.members) {
        group.first_passed.push_back(used[host->rank]);
        if (node_of_ != nullptr) used[host->rank] += (n + group.size() - 1) / group.size() * (group.size() - 1);
      }
    }
    // One place for each other node, or for each rank of the own node.
    expert.first_place = arriving;
    arriving += static_cast<uint32_t>(expert.groups.size()) + largest;
  }
  n_passed_ = *std::max_element(used.begin(), used.end());
  n_places_ = n == 1 ? 0 : n_passed_ + arriving;
}

bool GradientReduce::nodes_save_bytes(const ReplicaPlacement& placement, const LevelTree& tree) {
  Shape shape;
  shape.n_ranks = placement.n_ranks;
  if (!needs_nodes(shape, tree).ok()) return false;
  const std::vector<uint32_t>& node_of = tree.levels.front().group_of_rank;
  for (uint32_t e = 0; e < placement.n_experts; ++e) {
    const std::vector<const ExpertHost*> hosts = hosts_by_node(placement, e, &node_of);
    for (size_t i = 1; i < hosts.size(); ++i)
      if (node_of[hosts[i]->rank] == node_of[hosts[i - 1]->rank]) return true;
  }
  return false;
}

Result<GradientReduce> GradientReduce::make(const ReplicaPlacement& placement, const LevelTree& tree,
                                            const Settings& settings) {
  MOECCL_TRY(every_expert_has_a_slot(placement));
  GradientReduce r(placement, settings);
  r.shape_ = {.op = moecclOpReduceGradients,
              .n_ranks = placement.n_ranks,
              .count = shard_elements(settings.count, placement.n_ranks),
              .element_bytes = settings.element_bytes,
              .reach = settings.reach,
              .staging_bytes = settings.staging_bytes};
  if (settings.way == Way::kNodes) {
    MOECCL_TRY(needs_nodes(r.shape_, tree));
    r.node_of_ = &tree.levels.front().group_of_rank;
    r.tree_hash_ = tree.hash();
  }
  r.group_hosts();
  r.number_places();
  MOECCL_ASSIGN_OR_RETURN(
      r.places_, StagedPlaces::make(r.shape_, r.n_places_, tuning::kExpertMove / std::max(1u, placement.most_experts)));
  return r;
}

// Writes a rank's steps and the lists that they name.
class GradientReduce::Writer {
 public:
  Writer(const GradientReduce& r, uint32_t rank, const ExpertPlaces& places)
      : r_(r), me_(rank), node_(r.node_of(rank)), places_(places), b_(r.shape_, rank, r.places_.layout) {
    for (const Expert& e : r.experts_)
      for (uint32_t g = 0; g < e.groups.size(); ++g)
        for (uint32_t i = 0; i < e.groups[g].size() && e.groups[g].node == node_; ++i)
          if (e.groups[g].members[i]->rank == rank) own_.push_back({&e, &e.groups[g], g, i});
  }

  BoundRows write() && {
    if (!own_.empty()) {
      pass();
      give();
    }
    take();
    BoundRows bound;
    bound.program = std::move(b_).finish();
    bound.sums = std::move(sums_);
    bound.stretches = std::move(stretches_);
    for (size_t i = 0; i < bound.sums.size(); ++i) bound.sums[i].src_first = bound.stretches.data() + first_stretch_[i];
    bound.binding.chunking = r_.chunking();
    bound.binding.element_bytes = r_.s_.element_bytes;
    bound.binding.slot_elements = r_.places_.slot_elements();
    bound.binding.sums = bound.sums;
    return bound;
  }

 private:
  // An expert of this rank, and this rank's place in its group.
  struct Own {
    const Expert* expert = nullptr;
    const Group* group = nullptr;
    uint32_t group_index = 0, index = 0;
    const ExpertHost* host() const { return group->members[index]; }
  };
  // One summand: `first` moves with the chunk if it lies in a user's buffer.
  struct Source {
    Ref ref;
    uint64_t first = 0;
  };

  Shard shard(uint32_t rank) const { return shard_of(r_.s_.count, r_.shape_.n_ranks, rank); }
  Source place(uint32_t rank, uint32_t number) const {
    return {r_.places_.ref(rank, number), r_.places_.first_row(number)};
  }
  // Returns the place of the part for `to` that `from` passes to `through`; both are in the group.
  uint32_t passed_number(const Group& g, uint32_t through, uint32_t from, uint32_t to) const {
    return g.first_passed[through] + to / g.size() * (g.size() - 1) + (from < through ? from : from - 1);
  }
  // At the rank that has the shard: return the place of another node's sum, or of what a rank of its own node gives.
  uint32_t number_of_group(const Expert& e, uint32_t group) const { return r_.n_passed_ + e.first_place + group; }
  uint32_t number_of_member(const Expert& e, uint32_t index) const {
    return number_of_group(e, static_cast<uint32_t>(e.groups.size()) + index);
  }
  void add_own(const ExpertHost& host, uint32_t to) {
    for (const uint32_t s : host.slots) summed_.push_back({in(me_), places_.slot(s, r_.s_.count) + shard(to).begin});
  }

  // Sets dst to the sum of `summed_`, and empties it.
  void sum(const Source& dst, uint64_t length, bool final, uint32_t divisor = 0) {
    refs_.clear();
    for (const Source& s : summed_) refs_.push_back(s.ref);
    const auto at = [](const Source& s, uint64_t begin) {
      return s.ref.buffer == Buffer::kStaging ? s.first : s.first + begin;
    };
    const uint32_t n_chunks = r_.chunking().n_chunks;
    for (uint32_t c = 0; c < n_chunks; ++c) {
      const plan::Range range = plan::chunk_range(r_.chunking(), length, c);
      plan::SumBlock& block = sums_.emplace_back();
      block.dst_first = at(dst, range.offset);
      block.count = range.length;
      first_stretch_.push_back(stretches_.size());
      for (const Source& s : summed_) stretches_.push_back(at(s, range.offset));
    }
    b_.rows(StepKind::kReduceRows, dst.ref, refs_, static_cast<uint32_t>(sums_.size() / n_chunks - 1), final);
    if (final && divisor > 1) b_.divide(divisor);
    summed_.clear();
  }

  // Passes own parts to the ranks of the node that add them up for other nodes.
  void pass() {
    b_.lane(LaneKind::kIntra);
    for_each_mate(true, [&](uint32_t mate) {
      bool any = false;
      for_each_passed(mate, [&](const Own& o, uint32_t through, uint32_t to) {
        if (!any) b_.wait(mate, kReturned, b_.depth());
        any = true;
        add_own(*o.host(), to);
        sum(place(mate, passed_number(*o.group, through, o.index, to)), shard(to).length, false);
      });
      if (any) b_.signal(mate, kPassed);
    });
  }

  // Sends sums of own parts, and of parts that were passed here, to the ranks whose shards they are.
  void give() {
    b_.lane(LaneKind::kInter);
    std::vector<uint32_t> givers;
    for_each_mate(false, [&](uint32_t mate) {
      const bool passes = std::any_of(own_.begin(), own_.end(),
                                      [&](const Own& o) { return holds(*o.group, mate) && sums_for_others(o); });
      if (passes) givers.push_back(mate);
    });
    for (const uint32_t mate : givers) b_.wait(mate, kPassed);
    for (uint32_t d = 1; d < r_.shape_.n_ranks; ++d) {
      const uint32_t to = b_.after(d);
      if (shard(to).length == 0) continue;
      const bool inside = r_.node_of(to) == node_;
      bool any = false;
      for (const Own& o : own_) {
        if (!inside && through(o, to) != o.index) continue;
        if (!any) b_.wait(to, kCredit, b_.depth());
        any = true;
        for (uint32_t i = 0; i < o.group->size(); ++i) {
          if (i == o.index) {
            add_own(*o.host(), to);
          } else if (!inside) {
            summed_.push_back(place(me_, passed_number(*o.group, o.index, i, to)));
          }
        }
        const uint32_t number =
            inside ? number_of_member(*o.expert, o.index) : number_of_group(*o.expert, o.group_index);
        sum(place(to, number), shard(to).length, false);
      }
      if (any) b_.signal(to, kData);
    }
    for (const uint32_t mate : givers) b_.signal(mate, kReturned);
  }

  // Sums what has come for this rank's shards.
  void take() {
    const uint64_t length = shard(me_).length;
    if (length == 0) return;
    b_.lane(LaneKind::kCopy);
    std::vector<bool> gives(r_.shape_.n_ranks, false);
    for (const Expert& e : r_.experts_)
      for (const Group& g : e.groups)
        for (uint32_t i = 0; i < g.size(); ++i)
          if (g.node == node_ || i == me_ % g.size()) gives[g.members[i]->rank] = true;
    for (uint32_t d = 1; d < r_.shape_.n_ranks; ++d)
      if (gives[b_.before(d)]) b_.wait(b_.before(d), kData);
    for (const Expert& e : r_.experts_) {
      for (uint32_t g = 0; g < e.groups.size(); ++g) {
        if (e.groups[g].node != node_) {
          summed_.push_back(place(me_, number_of_group(e, g)));
          continue;
        }
        for (uint32_t i = 0; i < e.groups[g].size(); ++i) {
          const ExpertHost& host = *e.groups[g].members[i];
          if (host.rank == me_) {
            add_own(host, me_);
          } else {
            summed_.push_back(place(me_, number_of_member(e, i)));
          }
        }
      }
      sum({out(me_), places_.shard(e.number, r_.shape_.count)}, length, true, r_.s_.average ? e.n_replicas : 0);
    }
    for (uint32_t d = 1; d < r_.shape_.n_ranks; ++d)
      if (gives[b_.before(d)]) b_.signal(b_.before(d), kCredit);
  }

  static bool holds(const Group& g, uint32_t rank) {
    return std::any_of(g.members.begin(), g.members.end(), [&](const ExpertHost* h) { return h->rank == rank; });
  }
  // Returns the index of the member that sums the group's parts for a rank of another node.
  static uint32_t through(const Own& o, uint32_t to) { return to % o.group->size(); }
  bool sums_for_others(const Own& o) const {
    for (uint32_t to = o.index; to < r_.shape_.n_ranks; to += o.group->size())
      if (r_.node_of(to) != node_ && shard(to).length > 0) return true;
    return false;
  }
  // Calls body(mate) for the ranks of the node with which this one shares an expert, the nearest after (or before) it
  // first.
  template <class Body>
  void for_each_mate(bool after, Body&& body) {
    std::vector<uint32_t> mates;
    for (const Own& o : own_)
      for (const ExpertHost* host : o.group->members)
        if (host->rank != me_ && r_.node_of_ != nullptr) mates.push_back(host->rank);
    const uint32_t n = r_.shape_.n_ranks;
    const auto distance = [&](uint32_t rank) { return after ? (rank + n - me_) % n : (me_ + n - rank) % n; };
    std::sort(mates.begin(), mates.end(), [&](uint32_t a, uint32_t b) { return distance(a) < distance(b); });
    mates.erase(std::unique(mates.begin(), mates.end()), mates.end());
    for (const uint32_t mate : mates) body(mate);
  }
  // Calls body(own, index of `mate` in the group, rank) for each part that this rank passes to `mate`.
  template <class Body>
  void for_each_passed(uint32_t mate, Body&& body) {
    for (const Own& o : own_)
      for (uint32_t i = 0; i < o.group->size(); ++i)
        for (uint32_t to = i; o.group->members[i]->rank == mate && to < r_.shape_.n_ranks; to += o.group->size())
          if (r_.node_of(to) != node_ && shard(to).length > 0) body(o, i, to);
  }

  const GradientReduce& r_;
  uint32_t me_, node_;
  const ExpertPlaces& places_;
  ProgramBuilder b_;
  std::vector<Own> own_;
  std::vector<Source> summed_;
  std::vector<Ref> refs_;
  std::vector<plan::SumBlock> sums_;
  std::vector<uint64_t> stretches_;
  std::vector<size_t> first_stretch_;  // [sums_]
};

BoundRows GradientReduce::build(uint32_t rank, const ExpertPlaces& places) const {
  return Writer(*this, rank, places).write();
}

uint64_t GradientReduce::hash() const {
  uint64_t h = hash_combine(placement_.hash(), static_cast<uint64_t>(shape_.op) * 2 + (s_.average ? 1 : 0));
  return hash_combine(places_.hash(hash_combine(hash_combine(h, s_.count), s_.element_bytes)), tree_hash_);
}

}  // namespace moeccl::algo
