// SPDX-License-Identifier: Apache-2.0
#include "src/algo/builder.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/plan/op.h"

namespace moeccl::algo {
namespace {

constexpr uint64_t kLine = 64;  // slots and chunks are whole cache lines, see plan.h

uint64_t line_elements(const Shape& shape) { return shape.element_bytes >= kLine ? 1 : kLine / shape.element_bytes; }

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Returns the largest slot that the staging allows, in bytes.
uint64_t slot_cap(const Shape& shape, Layout layout) {
  // In units of 1 / parts of a slot. If a slot has n lines, a part has at most (n + parts - 1) / parts.
  const uint64_t parts = layout.slot_parts, part_slots = uint64_t{layout.depth} * layout.n_part_slots;
  const uint64_t shares = uint64_t{layout.depth} * layout.n_slots * parts + part_slots;
  const uint64_t all = shape.staging_bytes * parts, rounding = part_slots * (parts - 1) * kLine;
  return all < rounding ? 0 : (all - rounding) / std::max<uint64_t>(1, shares) / kLine * kLine;
}

uint64_t staging_of(Layout layout, uint64_t slot_bytes) {
  const uint64_t part = round_up((slot_bytes + layout.slot_parts - 1) / layout.slot_parts, kLine);
  return layout.depth * (layout.n_slots * slot_bytes + layout.n_part_slots * part);
}

Status does_not_fit(const Shape& shape, Layout layout, uint64_t slot_bytes) {
  return error(moecclUnsupported, "needs {} bytes of staging for {} ranks, the cap is {}: raise the cap",
               staging_of(layout, slot_bytes), shape.n_ranks, shape.staging_bytes);
}

}  // namespace

bool crosses_long_line(const Shape& shape, uint64_t chunk_bytes) {
  const bool unknown = plan::facts(shape.op).private_sizes && shape.count == 0;
  return shape.long_line.bytes > 0 && (unknown || shape.count > chunk_bytes / shape.element_bytes);
}

uint32_t rotations(const Shape& shape, uint64_t chunk_bytes, uint32_t usual) {
  return crosses_long_line(shape, chunk_bytes) ? tuning::kFar : usual;
}

uint64_t far_chunk(const Shape& shape, double streams, uint64_t least) {
  const double bytes = tuning::kFarLoop * static_cast<double>(shape.long_line.bytes) / (tuning::kFar - 1);
  return std::max(least, static_cast<uint64_t>(bytes / std::max(1.0, streams)));
}

Streams streams_across(const Shape& shape, const LevelTree& tree) {
  const uint32_t l = shape.long_line.level;
  const plan::Groups groups(tree.levels[l]);
  const auto above = [&](uint32_t rank) { return l > 0 ? tree.levels[l - 1].group_of_rank[rank] : 0; };
  std::vector<uint64_t> around(l > 0 ? tree.levels[l - 1].n_groups : 1, 0);  // ranks
  for (uint32_t r = 0; r < tree.n_ranks; ++r) ++around[above(r)];
  Streams least{UINT64_MAX, UINT64_MAX, UINT64_MAX};
  for (uint32_t g = 0; g < tree.levels[l].n_groups; ++g) {
    const uint64_t inside = groups.size(g), outside = around[above(groups.members(g)[0])] - inside;
    if (outside == 0) continue;
    least = {std::min(least.pairs, inside * outside), std::min(least.outside, outside), std::min(least.inside, inside)};
  }
  return least;
}

Chunking cut(const Shape& shape, Layout layout, uint64_t chunk_bytes) {
  uint64_t bytes = chunk_bytes;
  if (layout.n_slots > 0) bytes = std::min(bytes, slot_cap(shape, layout));
  const uint64_t line = line_elements(shape);
  const uint64_t most = std::max(line, bytes / shape.element_bytes / line * line);
  // The largest block of an AllToAllv may be unknown when the plan is made, so its chunks must not depend on it.
  if (plan::facts(shape.op).private_sizes) {
    return {most, static_cast<uint32_t>(std::max<uint64_t>(1, (shape.count + most - 1) / most))};
  }
  if (shape.count <= most) return {std::max<uint64_t>(1, shape.count), 1};
  // Divide first, because sums of a large count would wrap.
  const auto ceil_of = [](uint64_t value, uint64_t unit) { return value / unit + (value % unit != 0 ? 1 : 0); };
  const uint64_t even = round_up(ceil_of(shape.count, ceil_of(shape.count, most)), line);
  return {even, static_cast<uint32_t>(std::min<uint64_t>(ceil_of(shape.count, even), UINT32_MAX))};
}

Status chunks_cover(const Shape& shape, const Chunking& chunking) {
  if (plan::facts(shape.op).private_sizes || chunking.n_chunks < UINT32_MAX) return {};
  return error(moecclUnsupported, "{} elements of {} bytes in chunks of {}: at most 2^32 - 2 chunks are possible",
               shape.count, shape.element_bytes, chunking.chunk);
}

Chunking whole(const Shape& shape) {
  constexpr uint64_t kAnyLength = uint64_t{1} << 40;  // more elements than any block has
  return {plan::facts(shape.op).private_sizes ? kAnyLength : std::max<uint64_t>(1, shape.count), 1};
}

// Refs hold a slot's number in 16 bits.
Status slots_have_numbers(Layout layout) {
  constexpr uint32_t kMostSlots = 1 << 16;
  const uint64_t n_slots = uint64_t{layout.n_slots} + layout.n_part_slots;
  if (n_slots <= kMostSlots) return {};
  return error(moecclUnsupported, "needs {} slots of staging: at most {} have a number", n_slots, kMostSlots);
}

Status chunks_fit(const Shape& shape, Layout layout) {
  MOECCL_TRY(slots_have_numbers(layout));
  const uint64_t smallest = round_up(line_elements(shape) * shape.element_bytes, kLine);
  return slot_cap(shape, layout) >= smallest ? Status() : does_not_fit(shape, layout, smallest);
}

Status whole_fits(const Shape& shape, Layout layout) {
  MOECCL_TRY(slots_have_numbers(layout));
  const uint64_t bytes = round_up(std::max<uint64_t>(1, shape.count) * shape.element_bytes, kLine);
  return slot_cap(shape, layout) >= bytes ? Status() : does_not_fit(shape, layout, bytes);
}

Status needs_staging_views(const Shape& shape) {
  if (shape.reach.staging) return {};
  return error(moecclUnsupported, "needs ranks that map each other's staging, that is ranks of one host");
}

Status needs_views(const Shape& shape) {
  if (shape.reach.views) return {};
  return error(moecclUnsupported, "needs buffers that peers can reach: moecclMemAlloc or thread ranks");
}

Status needs_reads(const Shape& shape) {
  if (shape.reach.views || shape.reach.reads) return {};
  return error(moecclUnsupported,
               "needs buffers that peers can read: moecclMemAlloc, thread ranks or process_vm_readv");
}

Status needs_no_scaling(const Shape& shape) {
  if (!shape.scaled) return {};
  return error(moecclUnsupported, "reads peers' inputs, which a pre-multiplied sum scales on their own rank only");
}

Status needs_any_order(const Shape& shape, const char* name) {
  if (!shape.deterministic) return {};
  return error(moecclUnsupported, "{} sums partial results, deterministic mode asks for one sum in rank order", name);
}

Status needs_nodes(const Shape& shape, const LevelTree& tree) {
  if (tree.depth() >= 2 && tree.levels.front().n_groups >= 2 && tree.levels.front().n_groups < shape.n_ranks) return {};
  return error(moecclUnsupported, "needs at least two groups of ranks, one of them with two ranks or more");
}

}  // namespace moeccl::algo
