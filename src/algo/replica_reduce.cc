// SPDX-License-Identifier: Apache-2.0
#include "src/algo/replica_reduce.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/algo/whole_plan.h"
#include "src/base/hash.h"
#include "src/base/names.h"

namespace moeccl::algo {

namespace {

// Between ranks: contributions, results in a group, sums of a group to a root, results from a root. Between the lanes
// of a rank (which also use kContribution): a chunk has been copied out, its result is there.
enum Sig : uint32_t { kContribution, kResult, kGroupSum, kRootResult, kFreeToGive, kFreeToSum, kSummed, kRooted };

// A set of ranks with which a rank exchanges signals.
class Peers {
 public:
  explicit Peers(uint32_t n) : is_(n, false) {}
  void add(uint32_t rank) {
    any_ = true;
    is_[rank] = true;
  }
  bool any() const { return any_; }
  bool has(uint32_t rank) const { return is_[rank]; }

 private:
  std::vector<bool> is_;
  bool any_ = false;
};

}  // namespace

const char* reduce_kind_name(ReduceKind kind) {
  static constexpr const char* kNames[] = {"direct", "flat", "nodes"};
  return name_among(kNames, kind);
}

Status ReplicaReduce::applies(ReduceKind kind, const plan::Reach& reach, const LevelTree& tree) {
  Shape shape;
  shape.n_ranks = tree.n_ranks;
  shape.reach = reach;
  if (kind == ReduceKind::kDirect) return needs_views(shape);
  return kind == ReduceKind::kNodes ? needs_nodes(shape, tree) : Status();
}

ReplicaReduce::ReplicaReduce(const ReplicaPlacement& placement, const Shape& shape, const LevelTree& tree,
                             ReduceKind kind, bool average)
    : placement_(placement), shape_(shape), tree_(tree), kind_(kind), average_(average) {
  const std::vector<uint32_t>& node_of = tree.levels.front().group_of_rank;
  of_rank_.resize(shape.n_ranks);
  slot_base_.resize(shape.n_ranks);
  std::vector<uint32_t> used(shape.n_ranks, 0);
  for (uint32_t e = 0; e < placement.n_experts; ++e) {
    if (placement.hosts[e].empty()) continue;
    Expert expert;
    expert.number = e;
    expert.n_replicas = placement.n_replicas(e);
    for (const ExpertHost& host : placement.hosts[e]) {
      const uint32_t node = kind == ReduceKind::kNodes ? node_of[host.rank] : 0;
      auto at =
          std::find_if(expert.groups.begin(), expert.groups.end(), [&](const Group& g) { return g.node == node; });
      if (at == expert.groups.end()) at = expert.groups.insert(at, {node, {}});
      at->members.push_back(&host);
      expert.n_parts = std::max(expert.n_parts, static_cast<uint32_t>(at->members.size()));
    }
    for (const Group& group : expert.groups) {
      for (const ExpertHost* host : group.members) {
        of_rank_[host->rank].push_back(static_cast<uint32_t>(experts_.size()));
        slot_base_[host->rank].push_back(used[host->rank]);
        if (expert.shared()) used[host->rank] += staging_slots(expert, group);
      }
    }
    experts_.push_back(std::move(expert));
  }
  // Three rotations: one chunk is given away while another is summed and a third is copied out.
  layout_ = {*std::max_element(used.begin(), used.end()), 3};
  if (kind == ReduceKind::kDirect) layout_ = {};
}

// Counts own sum and result; between groups, the group's sum and the other groups' sums; contributions where peers
// cannot read this rank's staging.
uint32_t ReplicaReduce::staging_slots(const Expert& e, const Group& g) const {
  const size_t groups = e.groups.size();
  return static_cast<uint32_t>(2 + (groups > 1 ? groups : 0) + (shape_.reach.staging ? 0 : g.members.size() - 1));
}

uint32_t ReplicaReduce::owner(const Expert& e, uint32_t group, uint32_t part) {
  const std::vector<const ExpertHost*>& members = e.groups[group].members;
  return members[part % members.size()]->rank;
}

uint32_t ReplicaReduce::first_slot(uint32_t rank, const Expert& e) const {
  const std::vector<uint32_t>& all = of_rank_[rank];
  const auto at = std::lower_bound(all.begin(), all.end(), static_cast<uint32_t>(&e - experts_.data()));
  return slot_base_[rank][static_cast<size_t>(at - all.begin())];
}

Chunking ReplicaReduce::chunking() const {
  if (kind_ == ReduceKind::kDirect) return cut(shape_, layout_, tuning::kExpertDirect);
  // The data that all ranks have in flight shares the last-level cache.
  const uint64_t slots = std::max<uint64_t>(1, uint64_t{layout_.n_slots} * layout_.depth * shape_.n_ranks);
  return cut(shape_, layout_, std::max(tuning::kExpertLeast, tuning::kExpertReduce / slots));
}

// Writes the program of one rank. There are four lanes: giving own sums away, summing inside the group, summing between
// groups, copying results out. No staging slot needs a credit from another rank: a rank gives chunk c + depth away only
// after it has copied chunk c out, and by then every rank to which it gave chunk c has read it.
struct ReplicaReduce::Writer {
  Writer(const ReplicaReduce& r, uint32_t rank)
      : r(r), me(rank), b(r.shape_, rank, r.layout_), mates(r.shape_.n_ranks), roots(mates), leaves(mates) {
    for (const uint32_t position : r.of_rank_[rank]) {
      const Expert& e = r.experts_[position];
      for (uint32_t g = 0; g < e.groups.size(); ++g)
        for (const ExpertHost* host : e.groups[g].members)
          if (host->rank == rank) own.push_back({&e, &e.groups[g], host, g, r.first_slot(rank, e)});
    }
    for (const Own& o : own) note_peers(o);
  }

  void note_peers(const Own& o) {
    const Expert& e = *o.expert;
    for (const ExpertHost* host : o.group->members)
      if (host->rank != me) mates.add(host->rank);
    shared = shared || e.shared();
    one_group = one_group || (e.shared() && e.groups.size() == 1);
    for (uint32_t p = 0; p < e.n_parts && e.groups.size() > 1; ++p) {
      if (!owns(o, p)) continue;
      const uint32_t root = r.root(e, p);
      if (root != o.group_index) {
        roots.add(r.owner(e, root, p));
        continue;
      }
      is_root = true;
      for (uint32_t g = 0; g < e.groups.size(); ++g)
        if (g != root) leaves.add(r.owner(e, g, p));
    }
  }

  bool owns(const Own& o, uint32_t p) const { return r.owner(*o.expert, o.group_index, p) == me; }
  bool views() const { return r.shape_.reach.staging; }
  Ref cut(Ref ref, const Own& o, uint32_t p) const { return part(ref, p, o.expert->n_parts); }
  Ref sum_slot(uint32_t rank, const Own& o) const { return slot(rank, r.first_slot(rank, *o.expert)); }
  Ref result_slot(uint32_t rank, const Own& o) const { return slot(rank, r.first_slot(rank, *o.expert) + 1); }
  Ref group_sum_slot(const Own& o) const { return slot(me, o.first_slot + 2); }
  // At a root: returns where the sum of another group arrives.
  Ref arrival_slot(uint32_t rank, const Own& o, uint32_t from_group, uint32_t root_group) const {
    const uint32_t index = from_group < root_group ? from_group : from_group - 1;
    return slot(rank, r.first_slot(rank, *o.expert) + 3 + index);
  }
  // At `rank`: returns where the contribution of another member of the group arrives.
  Ref contribution_slot(uint32_t rank, uint32_t from, const Own& o) const {
    const size_t groups = o.expert->groups.size();
    uint32_t index = 0;
    for (const ExpertHost* host : o.group->members) {
      if (host->rank == from) break;
      if (host->rank != rank) ++index;
    }
    return slot(rank, static_cast<uint32_t>(r.first_slot(rank, *o.expert) + 2 + (groups > 1 ? groups : 0) + index));
  }

  std::vector<Ref> own_inputs(const Own& o, uint32_t p) const {
    std::vector<Ref> refs;
    for (const uint32_t s : o.host->slots) refs.push_back(cut(in(me, s), o, p));
    return refs;
  }
  // Returns what the owner of a part adds up for its group: by rank, own replicas by slot.
  std::vector<Ref> group_sources(const Own& o, uint32_t p) const {
    std::vector<Ref> refs;
    for (const ExpertHost* host : o.group->members) {
      if (host->rank == me) {
        const std::vector<Ref> inputs = own_inputs(o, p);
        refs.insert(refs.end(), inputs.begin(), inputs.end());
      } else {
        refs.push_back(cut(views() ? sum_slot(host->rank, o) : contribution_slot(me, host->rank, o), o, p));
      }
    }
    return refs;
  }
  void finish(const Own& o, uint32_t p, std::span<const Ref> sources) {
    b.reduce(cut(result_slot(me, o), o, p), sources, true);
    if (r.average_) b.divide(o.expert->n_replicas);
  }
  template <class Action>
  void each(const Peers& peers, bool sending, Action&& action) {
    for (uint32_t i = 1; i < r.shape_.n_ranks; ++i) {
      const uint32_t peer = sending ? b.after(i) : b.before(i);
      if (peers.has(peer)) action(peer);
    }
  }
  void signal_all(const Peers& peers, Sig sig) {
    each(peers, true, [&](uint32_t peer) { b.signal(peer, sig); });
  }
  void wait_all(const Peers& peers, Sig sig) {
    each(peers, false, [&](uint32_t peer) { b.wait(peer, sig); });
  }

  // Sums between groups, at their roots.
  void root_lane() {
    if (!is_root) return;
    b.lane(LaneKind::kInter);
    b.wait(me, kContribution);
    wait_all(leaves, kGroupSum);
    for (const Own& o : own) {
      const Expert& e = *o.expert;
      for (uint32_t p = 0; p < e.n_parts && e.groups.size() > 1; ++p) {
        if (!owns(o, p) || r.root(e, p) != o.group_index) continue;
        std::vector<Ref> sources;
        for (uint32_t g = 0; g < e.groups.size(); ++g) {
          if (g != o.group_index) {
            sources.push_back(cut(arrival_slot(me, o, g, o.group_index), o, p));
            continue;
          }
          const std::vector<Ref> mine = group_sources(o, p);
          sources.insert(sources.end(), mine.begin(), mine.end());
        }
        finish(o, p, sources);
        for (uint32_t g = 0; g < e.groups.size(); ++g) {
          if (g == o.group_index) continue;
          const uint32_t leaf = r.owner(e, g, p);
          b.put(cut(result_slot(leaf, o), o, p), cut(result_slot(me, o), o, p));
        }
      }
    }
    signal_all(leaves, kRootResult);
    b.signal(me, kRooted);
  }

  void group_lane() {
    if (!shared) return;
    b.lane(LaneKind::kInter);
    b.wait(me, kFreeToSum, r.layout_.depth);
    wait_all(mates, kContribution);
    for (const Own& o : own) {
      const Expert& e = *o.expert;
      for (uint32_t p = 0; p < e.n_parts && e.groups.size() > 1; ++p) {
        if (!owns(o, p) || r.root(e, p) == o.group_index) continue;
        const uint32_t root = r.root(e, p);
        const std::vector<Ref> sources = group_sources(o, p);
        Ref sum = sources[0];
        if (sources.size() > 1) b.reduce(sum = cut(group_sum_slot(o), o, p), sources, false, true);
        b.put(cut(arrival_slot(r.owner(e, root, p), o, o.group_index, root), o, p), sum);
      }
    }
    signal_all(roots, kGroupSum);
    if (is_root) b.signal(me, kContribution);
    for (const Own& o : own)
      for (uint32_t p = 0; p < o.expert->n_parts && o.expert->shared() && o.expert->groups.size() == 1; ++p)
        if (owns(o, p)) finish(o, p, group_sources(o, p));
    if (one_group) b.signal(me, kSummed);
  }

  void giving_lane() {
    if (!mates.any()) return;
    b.lane(LaneKind::kIntra);
    b.wait(me, kFreeToGive, r.layout_.depth);
    for (const Own& o : own) {
      for (uint32_t p = 0; p < o.expert->n_parts && o.group->members.size() > 1; ++p) {
        if (owns(o, p)) continue;
        const uint32_t owner = r.owner(*o.expert, o.group_index, p);
        const std::vector<Ref> inputs = own_inputs(o, p);
        const Ref sum = cut(sum_slot(me, o), o, p);
        if (inputs.size() > 1) {
          b.reduce(sum, inputs, false);
        } else if (views()) {
          b.copy(sum, inputs[0]);
        }
        if (!views()) b.put(cut(contribution_slot(owner, me, o), o, p), inputs.size() > 1 ? sum : inputs[0]);
      }
    }
    signal_all(mates, kContribution);
  }

  void copying_lane() {
    b.lane(LaneKind::kCopy);
    if (one_group) b.wait(me, kSummed);
    if (is_root) b.wait(me, kRooted);
    wait_all(roots, kRootResult);
    if (!views()) {
      for (const Own& o : own)
        for (uint32_t p = 0; p < o.expert->n_parts; ++p)
          for (const ExpertHost* host : o.group->members)
            if (host->rank != me && owns(o, p))
              b.put(cut(result_slot(host->rank, o), o, p), cut(result_slot(me, o), o, p));
    }
    signal_all(mates, kResult);
    for (const Own& o : own)
      if (!o.expert->shared()) alone(o);
    // Own parts come first; the mates' results arrive meanwhile.
    copy_out([&](const Own& o, uint32_t p) { return owns(o, p); });
    wait_all(mates, kResult);
    copy_out([&](const Own& o, uint32_t p) { return !owns(o, p); });
    if (mates.any()) b.signal(me, kFreeToGive);
    if (shared) b.signal(me, kFreeToSum);
  }
  template <class Wanted>
  void copy_out(Wanted&& wanted) {
    for (const Own& o : own)
      for (uint32_t p = 0; p < o.expert->n_parts && o.expert->shared(); ++p) {
        if (!wanted(o, p)) continue;
        const uint32_t holder = views() ? r.owner(*o.expert, o.group_index, p) : me;
        for (const uint32_t s : o.host->slots) b.copy(cut(out(me, s), o, p), cut(result_slot(holder, o), o, p));
      }
  }
  // Handles an expert whose replicas are all on this rank.
  void alone(const Own& o) {
    const std::vector<uint32_t>& slots = o.host->slots;
    const std::vector<Ref> inputs = own_inputs(o, 0);
    if (slots.size() == 1) return b.copy(out(me, slots[0]), inputs[0]);
    b.reduce(out(me, slots[0]), inputs, true, true);
    if (r.average_) b.divide(o.expert->n_replicas);
    for (size_t i = 1; i < slots.size(); ++i) b.copy(out(me, slots[i]), out(me, slots[0]));
  }

  // Works in place: only the owner of a part reads it from any input and writes it to any output.
  void direct_lane() {
    b.when(When::kFirst);
    signal_all(mates, kContribution);
    wait_all(mates, kContribution);
    b.when(When::kEvery);
    for (const Own& o : own) {
      if (o.expert->n_replicas == 1) {
        b.copy(out(me, o.host->slots[0]), in(me, o.host->slots[0]));
        continue;
      }
      for (uint32_t p = 0; p < o.expert->n_parts; ++p)
        if (owns(o, p)) spread(o, p);
    }
    b.when(When::kLast);
    signal_all(mates, kResult);
    wait_all(mates, kResult);
  }
  void spread(const Own& o, uint32_t p) {
    std::vector<Ref> inputs;
    for (const ExpertHost* host : o.group->members)
      for (const uint32_t s : host->slots) inputs.push_back(cut(in(host->rank, s), o, p));
    // The host executor joins the sum and its moves: each element is read once and written once to each replica.
    const Ref result = cut(out(me, o.host->slots[0]), o, p);
    b.reduce(result, inputs, true, true);
    if (r.average_) b.divide(o.expert->n_replicas);
    for (const ExpertHost* host : o.group->members)
      for (const uint32_t s : host->slots) {
        if (host->rank == me && s == o.host->slots[0]) continue;
        const Ref to = cut(out(host->rank, s), o, p);
        if (host->rank == me) {
          b.copy(to, result);
        } else {
          b.put(to, result);
        }
      }
  }

  const ReplicaReduce& r;
  uint32_t me;
  ProgramBuilder b;
  std::vector<Own> own;
  Peers mates, roots, leaves;  // of one group; ranks that get this rank's sums; ranks whose sums come here
  bool shared = false, one_group = false, is_root = false;
};

Program ReplicaReduce::build(uint32_t rank) const {
  Writer writer(*this, rank);
  if (kind_ == ReduceKind::kDirect) {
    writer.direct_lane();
    return std::move(writer.b).finish();
  }
  writer.root_lane();
  writer.group_lane();
  writer.giving_lane();
  writer.copying_lane();
  return std::move(writer.b).finish();
}

uint64_t ReplicaReduce::hash() const {
  const Chunking k = chunking();
  uint64_t h = hash_combine(placement_.hash(), tree_.hash());
  h = hash_combine(h, static_cast<uint64_t>(kind_) * 4 | (average_ ? 1u : 0u) | (shape_.reach.staging ? 2u : 0u));
  h = hash_combine(h, layout_.n_slots * uint64_t{16} + layout_.depth);
  return hash_combine(hash_combine(h, k.chunk), k.n_chunks);
}

plan::Plan ReplicaReduce::build_all() const { return whole_plan(*this, shape_); }

Shape replica_shape(const ReplicaPlacement& placement, uint64_t count, uint32_t element_bytes, plan::Reach reach,
                    uint64_t staging_bytes) {
  Shape s;
  s.op = moecclOpExpertAllReduce;
  s.n_ranks = placement.n_ranks;
  s.count = count;
  s.element_bytes = element_bytes;
  s.reach = reach;
  s.staging_bytes = staging_bytes;
  s.most_in_blocks = s.most_out_blocks = std::max(1u, placement.most_slots());
  return s;
}

}  // namespace moeccl::algo
