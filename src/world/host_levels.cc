// SPDX-License-Identifier: Apache-2.0
#include "src/world/host_levels.h"

#include "src/base/wire.h"
#include "topology/discover.h"
#include "topology/tree.h"

namespace moeccl::comm {
namespace {

constexpr size_t kMaxName = 31, kMaxWhy = 500;

void level_fields(auto& io, auto& level) {
  io.text(level.name, kMaxName);
  io(level.link.alpha_ns);
  io(level.link.bytes_per_ns);
  io(level.n_groups);
}

// Each host's first rank speaks for it, because ranks that are bound to parts of a host may see less of it.
Result<plan::LevelTree> levels_of_hosts(bootstrap::Session& session, const Hosts& hosts, Deadline deadline) {
  const auto rank = static_cast<uint32_t>(session.rank());
  const std::vector<uint32_t>& here = hosts.around(rank);
  std::vector<std::byte> mine;
  if (here[0] == rank) mine = write_levels(topology::host_tree(static_cast<uint32_t>(here.size())));
  MOECCL_ASSIGN_OR_RETURN(const auto all, session.all_gather(mine, deadline));
  std::vector<plan::LevelTree> trees;
  for (const std::vector<uint32_t>& members : hosts.members) {
    MOECCL_ASSIGN_OR_RETURN(plan::LevelTree tree,
                            read_levels(all[members[0]], static_cast<uint32_t>(members.size()), members[0]));
    trees.push_back(std::move(tree));
  }
  return topology::over_hosts(trees, hosts.host_of);
}

// The contents of a file may differ from rank to rank although its name does not.
Status agree_on_tree(bootstrap::Session& session, const Result<plan::LevelTree>& mine, const std::string& topology,
                     Deadline deadline) {
  const uint64_t hash = mine.ok() ? mine.value().hash() : 0;
  MOECCL_ASSIGN_OR_RETURN(const auto hashes, session.all_gather(std::as_bytes(std::span(&hash, 1)), deadline));
  if (!mine.ok()) return mine.status();
  for (size_t r = 1; r < hashes.size(); ++r) {
    if (hashes[r] == hashes[0]) continue;
    return error(moecclMismatch,
                 "rank 0 and rank {} read different topologies from \"{}\": give all ranks the same file", r,
                 topology.substr(0, 200));
  }
  return {};
}

}  // namespace

std::vector<std::byte> write_levels(const Result<plan::LevelTree>& own) {
  Writer out;
  out.string(own.ok() ? std::string() : own.status().message().substr(0, kMaxWhy));
  out.u8(own.ok() ? static_cast<uint8_t>(own->depth()) : 0);
  for (uint32_t l = 0; own.ok() && l < own->depth(); ++l) {
    const plan::Level& level = own->levels[l];
    level_fields(out, level);
    for (const uint32_t group : level.group_of_rank) out.u32(group);
  }
  return out.take();
}

Result<plan::LevelTree> read_levels(std::span<const std::byte> bytes, uint32_t n_ranks, uint32_t rank) {
  Reader in(bytes);
  const std::string why = in.string(kMaxWhy);
  plan::LevelTree tree{n_ranks, std::vector<plan::Level>(in.u8())};
  for (plan::Level& level : tree.levels) {
    level_fields(in, level);
    for (uint32_t r = 0; r < n_ranks && in.ok(); ++r) level.group_of_rank.push_back(in.u32());
  }
  if (!in.done()) return error(moecclRemoteError, "rank {} sent levels that this MoECCL cannot read", rank);
  if (!why.empty()) return error(moecclSystemError, "rank {} found no levels of its host: {}", rank, why);
  MOECCL_TRY(tree.validate().with_context(format("levels from rank {}", rank)));
  return tree;
}

Result<plan::LevelTree> tree_of_ranks(bootstrap::Session& session, const Hosts& hosts, const std::string& topology,
                                      Deadline deadline) {
  if (topology == "auto") return levels_of_hosts(session, hosts, deadline);
  const auto n_ranks = static_cast<uint32_t>(hosts.host_of.size());
  if (!topology.empty()) {
    auto parsed = topology::tree_from_text(topology, n_ranks, hosts.n());
    if (topology::names_file(topology)) MOECCL_TRY(agree_on_tree(session, parsed, topology, deadline));
    return parsed;
  }
  plan::LevelTree tree = plan::LevelTree::flat(n_ranks);
  if (hosts.n() > 1) tree.levels.insert(tree.levels.begin(), plan::Level{"node", {}, hosts.host_of, hosts.n()});
  return tree;
}

}  // namespace moeccl::comm
